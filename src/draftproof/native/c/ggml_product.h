/* Products with weights of GGUF files (ggml.h), included once for each type of rows.

   Inputs are rounded to 8 bits, in groups of 32 with a float32 scale each; sums inside a group are whole numbers and exact,
   and groups are added in order in float32. So a row's output does not depend on the rows beside it. */

typedef struct {
  const ELEM *x, *bias, *onto;
  const ggml_matrix *w;
  ELEM *y;
  ggml_inputs inputs;
  long rows, outs, ins;
  shares *shared;
} NAME(ggml_product);

static void NAME(ggml_round)(const NAME(ggml_product) * p, long row) {
  const ggml_inputs *to = &p->inputs;
  const ELEM *x = p->x + row * p->ins;
  for (long start = 0; start < to->padded; start += GGML_GROUP) {
    const long here = p->ins - start < 0 ? 0 : p->ins - start, group = (row * to->padded + start) / GGML_GROUP;
    floats top = zeros(), v[2];
    for (int half = 0; half < 2; half++) {
      v[half] = here > LANES * half ? NAME(load_first)(x + start + LANES * half, here - LANES * half) : zeros();
      top = larger(top, larger(v[half], sub(zeros(), v[half])));
    }
    const float scale = largest_of(top) / 127, by = scale > 0 ? 1 / scale : 0;
    float sum[2];
    for (int half = 0; half < 2; half++) {
      v[half] = nearest(mul(v[half], splat(by)));
      store_bytes(to->numbers + row * to->padded + start + LANES * half, v[half]);
      sum[half] = sum_of(v[half]);
      to->half_sums[2 * group + half] = scale * sum[half];
      to->half_less[2 * group + half] = -(int32_t)sum[half];
    }
    to->scales[group] = scale;
    to->sums[group] = scale * (sum[0] + sum[1]);
    to->less[group] = -(int32_t)(sum[0] + sum[1]);
  }
}

static void NAME(share_ggml_rounding)(void *given) {
  const NAME(ggml_product) *p = given;
  const long number = thread_number(), count = thread_count();
  for (long row = p->rows * number / count; row < p->rows * (number + 1) / count; row++) NAME(ggml_round)(p, row);
}

/* Blocks of one segment, for some rows: `block` counts in the segment, `out` is its first output in the product. */
static void NAME(ggml_blocks)(const NAME(ggml_product) * p, int segment, long out, long block, long stop, long row, long last) {
  const int form = ggml_type_of(p->w->of[segment].type)->form;
  const long next = ggml_block_size(ggml_forms[form], p->ins);
  floats sums[8 * 4];
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

static void NAME(share_ggml)(void *given) {
  const NAME(ggml_product) *p = given;
  const long near = (1 << 18) / p->inputs.padded, chunk = near > GGML_ROWS ? near / GGML_ROWS * GGML_ROWS : GGML_ROWS;
  long at = thread_number(), block, stop;
  while (next_share(p->shared, &at, &block, &stop))
    for (long row = 0; row < p->rows; row += chunk) {
      const long last = row + chunk < p->rows ? row + chunk : p->rows;
      long first = 0, out = 0; /* of the segment */
      for (int s = 0; s < p->w->count; s++) {
        const long blocks = (p->w->of[s].outs + LANES - 1) / LANES;
        const long from = block > first ? block - first : 0, to = stop - first < blocks ? stop - first : blocks;
        if (from < to) NAME(ggml_blocks)(p, s, out, from, to, row, last);
        first += blocks;
        out += p->w->of[s].outs;
      }
    }
}

/* y [rows, outs] = x [rows, ins] w^T (+ bias), rounded (+ onto [rows, outs], rounded again); `memory` is for the inputs in
   8 bits. */
void NAME(draftproof_ggml_product)(const ELEM *x, const ggml_matrix *w, const ELEM *bias, const ELEM *onto, ELEM *y, long rows,
                                   long outs, long ins, void *memory, long threads) {
  const int alone = threads < 2 || rows * outs * ins <= SMALL;
  long blocks = 0, size = 0;
  for (int s = 0; s < w->count; s++) {
    const long next = ggml_block_size(ggml_forms[ggml_type_of(w->of[s].type)->form], ins);
    blocks += (w->of[s].outs + LANES - 1) / LANES;
    size = size < next ? next : size;
  }
  shares shared;
  share_out(&shared, blocks, size, alone ? 1 : threads);
  NAME(ggml_product) p = {x, bias, onto, w, y, ggml_inputs_in(memory, rows, ins), rows, outs, ins, &shared};
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
