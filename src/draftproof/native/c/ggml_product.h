/* Products with weights of GGUF files (ggml.h), included once for each type of rows.

   Inputs are rounded to 8 bits, in groups of 32 with a float32 scale each; sums inside a group are whole numbers and exact,
   and groups are added in order in float32. Or a row has one scale, or stays as it is (ggml_type). So a row's output does not
   depend on the rows beside it. */

typedef struct {
  const ELEM *x, *bias, *onto;
  const ggml_matrix *w; /* the first of several of one form, each of whose segments lie behind one another */
  ELEM *y;
  const int64_t *from;   /* which row of x each row here is; 0 where they are in order */
  const int64_t *groups; /* [count, 3]: number of a matrix, the first of the rows that it multiplies, how many they are */
  ggml_inputs inputs;
  int has_bytes; /* whether weights are bytes, for which inputs lie in another way */
  long rows, outs, ins, blocks; /* blocks of a matrix */
  shares *shared;
} NAME(ggml_product);

/* The scale of a whole row. Where it has one, its largest number becomes 127.5, as in compressed-tensors (calculate_qparams). */
static float NAME(ggml_scale_of_row)(const ELEM *x, long ins) {
  floats top = zeros();
  for (long i = 0; i < ins; i += LANES) {
    const floats v = NAME(load_first)(x + i, ins - i);
    top = larger(top, larger(v, sub(zeros(), v)));
  }
  return largest_of(top) / 127.5f;
}

static void NAME(ggml_round)(const NAME(ggml_product) * p, long row) {
  const ggml_inputs *to = &p->inputs;
  const ELEM *x = p->x + (p->from ? p->from[row] : row) * p->ins;
  if (to->kind == AS_FLOATS) {
    for (long start = 0; start < to->padded; start += LANES)
      store_float(to->whole + row * to->padded + start, p->ins > start ? NAME(load_first)(x + start, p->ins - start) : zeros());
    return;
  }
  const float of_row = to->kind == BY_ROW ? NAME(ggml_scale_of_row)(x, p->ins) : 0;
  for (long start = 0; start < to->padded; start += GGML_GROUP) {
    const long here = p->ins - start < 0 ? 0 : p->ins - start, place = start / GGML_GROUP * to->rows + row;
    floats top = zeros(), v[2];
    for (int half = 0; half < 2; half++) {
      v[half] = here > LANES * half ? NAME(load_first)(x + start + LANES * half, here - LANES * half) : zeros();
      top = larger(top, larger(v[half], sub(zeros(), v[half])));
    }
    const float scale = to->kind == BY_ROW ? of_row : largest_of(top) / 127, by = scale > 0 ? 1 / scale : 0;
    float sum[2];
    for (int half = 0; half < 2; half++) {
      v[half] = of_row > 0 ? smaller(nearest(quotient(v[half], splat(of_row))), splat(127)) : nearest(mul(v[half], splat(by)));
      const long input = row * to->padded + start + LANES * half;
      store_bytes(to->numbers + input, v[half]);
      if (p->has_bytes) store_byte_inputs(to->of_bytes + input, v[half]);
      sum[half] = sum_of(v[half]);
      const long of_half = (start / LANES + half) * to->rows + row;
      to->half_sums[of_half] = scale * sum[half];
      to->half_less[of_half] = -HALF_LESS_TIMES * (int32_t)sum[half];
    }
    to->scales[place] = scale;
    to->sums[place] = scale * (sum[0] + sum[1]);
    to->less[place] = -LESS_TIMES * (int32_t)(sum[0] + sum[1]);
  }
}

static void NAME(share_ggml_rounding)(void *given) {
  const NAME(ggml_product) *p = given;
  const long number = thread_number(), count = thread_count();
  for (long row = p->rows * number / count; row < p->rows * (number + 1) / count; row++) NAME(ggml_round)(p, row);
}

#ifdef WITH_AMX
/* `ggml_blocks` on the matrix unit. */
static void NAME(ggml_opened_blocks)(const NAME(ggml_product) * p, int segment, long out, long block, long stop, long row, long last) {
  const int form = ggml_type_of(p->w->of[segment].type)->form;
  const long next = ggml_block_size(ggml_forms[form], p->ins);
  float sums[OPENED_ROWS * OPENED_BLOCKS * LANES] __attribute__((aligned(64)));
  for (int blocks; block < stop; block += blocks) {
    blocks = stop - block < OPENED_BLOCKS ? (int)(stop - block) : OPENED_BLOCKS;
    ggml_opened_sums(&p->inputs, p->w->of[segment].w + block * next, p->ins, form, row, last, blocks, sums);
    const float *at = sums;
    for (long tile = row; tile < last; tile += HEIGHT)
      for (int b = 0; b < blocks; b++, at += HEIGHT * LANES) {
        const long start = ggml_start_of_tile(row, last, (tile - row) / HEIGHT);
        for (long m = tile - start; m < HEIGHT; m++)
          NAME(write)(load_float(at + m * LANES), p->bias, p->onto, p->y, start + m, p->outs, out + (block + b) * LANES);
      }
  }
}
#endif

/* Blocks of one segment, for some rows: `block` counts in the segment, `out` is the segment's first output in the product. */
static void NAME(ggml_blocks)(const NAME(ggml_product) * p, int segment, long out, long block, long stop, long row, long last) {
  const int form = ggml_type_of(p->w->of[segment].type)->form;
  const long next = ggml_block_size(ggml_forms[form], p->ins);
  floats sums[8 * 4];
#ifdef WITH_AMX
  if (p->inputs.kind != AS_FLOATS && last - row >= OPENED_LEAST) {
    NAME(ggml_opened_blocks)(p, segment, out, block, stop, row, last);
    return;
  }
#endif
  while (row < last) {
    const long left = last - row;
    const int rows = ggml_tile_rows(left);
    const long start = rows > left && last >= rows ? last - rows : row; /* of a whole tile, some rows twice */
    const int most = rows == 1 ? GGML_BLOCKS_OF_ONE : rows == 2 ? GGML_BLOCKS_OF_TWO : 1;
    for (long at = block; at < stop;) {
      const int blocks = stop - at >= most ? most : 1;
      ggml_inputs inputs = p->inputs;
      ggml_tiles[form][rows][blocks](&inputs, p->w->of[segment].w + at * next, p->ins, start, sums);
      for (long m = row - start; m < rows && start + m < last; m++)
        for (int b = 0; b < blocks; b++)
          NAME(write)(sums[m * blocks + b], p->bias, p->onto, p->y, start + m, p->outs, out + (at + b) * LANES);
      at += blocks;
    }
    row += left < rows ? left : rows;
  }
}

/* Blocks of one matrix for the rows of its group, so many at once as stay near the processor. */
static void NAME(ggml_of_group)(const NAME(ggml_product) * p, const int64_t *group, long block, long stop) {
  const long chunk = ggml_rows_together(&p->inputs);
  NAME(ggml_product) of = *p;
  ggml_matrix w = *p->w;
  of.w = &w;
  of.bias = p->bias ? p->bias + group[0] * p->outs : 0;
  for (int s = 0; s < w.count; s++)
    w.of[s].w += group[0] * ((w.of[s].outs + LANES - 1) / LANES) * ggml_size_of(w.of[s].type, p->ins);
  for (long row = group[1], end = group[1] + group[2]; row < end; row += chunk) {
    const long last = row + chunk < end ? row + chunk : end;
    long first = 0, out = 0; /* of the segment */
    for (int s = 0; s < w.count; s++) {
      const long blocks = (w.of[s].outs + LANES - 1) / LANES;
      const long from = block > first ? block - first : 0, to = stop - first < blocks ? stop - first : blocks;
      if (from < to) NAME(ggml_blocks)(&of, s, out, from, to, row, last);
      first += blocks;
      out += w.of[s].outs;
    }
  }
}

static void NAME(share_ggml)(void *given) {
  const NAME(ggml_product) *p = given;
  long at = thread_number(), block, stop;
  while (next_share(p->shared, &at, &block, &stop))
    while (block < stop) {
      const long first = block / p->blocks * p->blocks, last = stop < first + p->blocks ? stop : first + p->blocks;
      NAME(ggml_of_group)(p, p->groups + 3 * (block / p->blocks), block - first, last - first);
      block = last;
    }
}

/* y [rows, outs] = x [rows, ins], or those rows of it that `from` names, with each group's matrix (+ bias [matrices, outs]),
   rounded (+ onto [rows, outs], rounded again); `groups` is [count, 3], and `memory` is for the inputs of all rows in 8 bits. */
static void NAME(ggml_groups_product)(const ELEM *x, const int64_t *from, const ggml_matrix *w, const ELEM *bias,
                                      const ELEM *onto, ELEM *y, const int64_t *groups, long count, long rows, long outs,
                                      long ins, void *memory, long threads) {
  const int alone = threads < 2 || rows * outs * ins <= SMALL;
  int has_bytes = 0;
  long blocks = 0, size = 0;
  for (int s = 0; s < w->count; s++) {
    const long next = ggml_size_of(w->of[s].type, ins);
    blocks += (w->of[s].outs + LANES - 1) / LANES;
    size = size < next ? next : size;
    has_bytes |= HALVES && ggml_bits(ggml_forms[ggml_type_of(w->of[s].type)->form]) == 8;
  }
  shares shared;
  share_out(&shared, count * blocks, size, alone ? 1 : threads);
  const ggml_inputs inputs = ggml_inputs_in(memory, rows, ins, ggml_type_of(w->of[0].type)->inputs);
  NAME(ggml_product) p = {x, bias, onto, w, y, from, groups, inputs, has_bytes, rows, outs, ins, blocks, &shared};
  if (rows < 1) return;
  ggml_clear_beyond(&p.inputs, rows);
  if (alone || rows < 8)
    for (long row = 0; row < rows; row++) NAME(ggml_round)(&p, row);
  else
    parallel(NAME(share_ggml_rounding), &p, (unsigned)threads, 0);
  if (alone)
    NAME(share_ggml)(&p);
  else
    parallel(NAME(share_ggml), &p, (unsigned)threads, 0);
}

/* The same with one matrix for all rows. */
void NAME(draftproof_ggml_product)(const ELEM *x, const ggml_matrix *w, const ELEM *bias, const ELEM *onto, ELEM *y, long rows,
                                   long outs, long ins, void *memory, long threads) {
  const int64_t all[] = {0, 0, rows};
  NAME(ggml_groups_product)(x, 0, w, bias, onto, y, all, 1, rows, outs, ins, memory, threads);
}
