/* Products with bfloat16 weights as torch keeps them on the matrix unit (AMX), in place of the vector code of rows.h.

   Sixteen outputs of a weight, 32 inputs of each, are the first operand as they lie, so few rows need no packed weight. Rows of
   x are the second operand: they are paired once, sixteen at a time. So a tile of sums has an output in each row, and a row
   of x in each column. Sums are those of matrix_unit.h, in its order: where inputs fill the last step, packed weights give the
   same bits. */

enum {
  PAIRED_BYTES = 512 * 1024, /* of paired rows that are kept near while all weights pass by */
  STEPS_AHEAD = 8,           /* of which weights are asked for */
  TILE = HEIGHT * STEP       /* numbers of a tile of weights */
};

/* Some inputs of sixteen rows, or of fewer and zeros, as a second operand: [16][16][2], with zeros behind the last input. */
INLINE void pair_step(const bfloat16 *x, long ins, long rows, long k, units *out) {
  for (long row = 0; row < HEIGHT; row++)
    out[row] = row < rows ? load_some_bfloat16(x + row * ins + k, ins - k) : no_units();
  exchange(out);
}

/* The inputs of some outputs from `k` on, with zeros behind the last input and the last output: [blocks][16][32]. What lies
   behind them may be no number. */
static void lay_step(const bfloat16 *w, long stride, long count, long outs, const int blocks, bfloat16 *out) {
  if (count < STEP || outs < HEIGHT) memset(out, 0, (size_t)(blocks * TILE) * sizeof *out);
  for (long n = 0; n < outs + (blocks - 1) * HEIGHT; n++)
    memcpy(out + n * STEP, w + n * stride, (size_t)(count < STEP ? count : STEP) * sizeof *w);
}

/* Registers 0 to 3 hold sums, 4 and 5 weights, 6 and 7 rows. */
static void shape_plain_tiles(long outs) {
  tile_shapes shapes = {.palette = 1};
  for (int t = 0; t < 8; t++) shape_tile(&shapes, t, t < 6 ? outs : HEIGHT, LANES * sizeof(float));
  take_shapes(&shapes);
}

/* Sums of one tile of rows or two with a block of outputs or two neighbouring ones: [tiles][2][HEIGHT][LANES]. Where inputs do
   not fill the last step, its weights are in `last`. */
INLINE void multiply_plain(const bfloat16 *w, const bfloat16 *last, long stride, const units *x, long steps, float *sums,
                           const int blocks, const int tiles, const int fetch) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long s = 0; s < steps; s++, x += HEIGHT) {
    const int is_last = last && s + 1 == steps;
    const bfloat16 *at = is_last ? last : w + s * STEP;
    const long line = is_last ? STEP : stride, wide = line * (long)sizeof *at;
    if (fetch) {
      const long soon = s + STEPS_AHEAD < steps ? (s + STEPS_AHEAD) * STEP : blocks * HEIGHT * stride;
#pragma GCC unroll 2
      for (int b = 0; b < blocks; b++)
#pragma GCC unroll 16
        for (long out = 0; out < HEIGHT; out++) __builtin_prefetch(w + soon + (b * HEIGHT + out) * stride);
    }
    LOAD_TILE(6, x, 64);
    LOAD_TILE(4, at, wide);
    _tile_dpbf16ps(0, 4, 6);
    if (tiles > 1) {
      LOAD_TILE(7, x + steps * HEIGHT, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if (blocks > 1) {
      LOAD_TILE(5, at + HEIGHT * line, wide);
      _tile_dpbf16ps(1, 5, 6);
      if (tiles > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 64);
  if (blocks > 1) _tile_stored(1, sums + HEIGHT * LANES, 64);
  if (tiles > 1) _tile_stored(2, sums + 2 * HEIGHT * LANES, 64);
  if (tiles > 1 && blocks > 1) _tile_stored(3, sums + 3 * HEIGHT * LANES, 64);
}

/* Sums of some rows with outputs from `out` on, of which `sums` has those from `first` on, to y. */
static void write_plain(const rows_product_bfloat16 *p, const bfloat16 *bias, const float *sums, long row, long rows, long first,
                        long out) {
  units each[LANES];
  for (long i = 0; i < LANES; i++) {
    const long line = out - first + i;
    each[i] = line < LANES ? load_units((const bfloat16 *)(sums + line * LANES)) : no_units();
  }
  exchange(each);
  for (long i = 0; i < rows; i++)
    write_bfloat16(load_float((const float *)(each + i)), bias, p->onto, p->y, row + i, p->outs, out);
}

/* Paired rows with one block of outputs or two. */
INLINE void plain_blocks(const rows_product_bfloat16 *p, const bfloat16 *w, const bfloat16 *bias, const units *paired, long row,
                         long rows, long out, const int blocks) {
  const long steps = (p->ins + STEP - 1) / STEP, outs = p->outs < LANES ? p->outs : LANES;
  const long first = out + blocks * LANES <= p->outs ? out : p->outs - outs;
  const bfloat16 *from = w + first * p->stride;
  float sums[4 * HEIGHT * LANES] __attribute__((aligned(64)));
  bfloat16 last[2 * TILE] __attribute__((aligned(64)));
  if (p->ins % STEP) lay_step(from + (steps - 1) * STEP, p->stride, p->ins % STEP, outs, blocks, last);
  for (long at = 0; at < rows; at += 2 * HEIGHT) {
    const units *x = paired + at * steps;
    if (rows - at <= HEIGHT)
      multiply_plain(from, p->ins % STEP ? last : 0, p->stride, x, steps, sums, blocks, 1, rows <= HEIGHT);
    else if (!at)
      multiply_plain(from, p->ins % STEP ? last : 0, p->stride, x, steps, sums, blocks, 2, 1);
    else
      multiply_plain(from, p->ins % STEP ? last : 0, p->stride, x, steps, sums, blocks, 2, 0);
    for (long tile = 0; tile < 2 * HEIGHT && at + tile < rows; tile += HEIGHT)
      for (int b = 0; b < blocks; b++)
        write_plain(p, bias, sums + (tile / HEIGHT * 2 + b) * HEIGHT * LANES, row + at + tile,
                    rows - at - tile < HEIGHT ? rows - at - tile : HEIGHT, first + b * LANES, out + b * LANES);
  }
}

/* Some rows of a group with some blocks of outputs. The last block begins in the one before, where there is one. Few rows take
   one block at a time, since memory is read faster in few places at once. */
static void plain_rows(const rows_product_bfloat16 *p, const bfloat16 *w, const bfloat16 *bias, units *paired, long row,
                       long rows, long block, long stop) {
  const long steps = (p->ins + STEP - 1) / STEP;
  for (long tile = 0; tile < rows; tile += HEIGHT)
    for (long s = 0; s < steps; s++)
      pair_step(p->x + (row + tile) * p->ins, p->ins, rows - tile, s * STEP, paired + (tile * steps + s * HEIGHT));
  while (block < stop)
    if (rows > HEIGHT && block + 2 <= stop && (block + 2) * LANES <= p->outs) {
      plain_blocks(p, w, bias, paired, row, rows, block * LANES, 2);
      block += 2;
    } else {
      plain_blocks(p, w, bias, paired, row, rows, block * LANES, 1);
      block++;
    }
}

/* The same without memory for rows: each is paired again for each block. */
static void plain_rows_unpaired(const rows_product_bfloat16 *p, const bfloat16 *w, const bfloat16 *bias, long row, long rows,
                                long block, long stop) {
  const long outs = p->outs < LANES ? p->outs : LANES;
  for (; block < stop; block++)
    for (long at = 0; at < rows; at += HEIGHT) {
      const long out = block * LANES, first = out + LANES <= p->outs ? out : p->outs - outs;
      float sums[TILE] __attribute__((aligned(64)));
      bfloat16 laid[TILE] __attribute__((aligned(64)));
      units own[HEIGHT];
      _tile_zero(0);
      for (long k = 0; k < p->ins; k += STEP) {
        pair_step(p->x + (row + at) * p->ins, p->ins, rows - at, k, own);
        lay_step(w + first * p->stride + k, p->stride, p->ins - k, outs, 1, laid);
        LOAD_TILE(6, own, 64);
        LOAD_TILE(4, laid, 64);
        _tile_dpbf16ps(0, 4, 6);
      }
      _tile_stored(0, sums, 64);
      write_plain(p, bias, sums, row + at, rows - at < HEIGHT ? rows - at : HEIGHT, first, out);
    }
}

static void share_dots_bfloat16(void *given) {
  const rows_product_bfloat16 *p = given;
  const long blocks = (p->outs + LANES - 1) / LANES, all = p->count * blocks, steps = (p->ins + STEP - 1) / STEP;
  const long number = thread_number(), count = thread_count(), end = all * (number + 1) / count;
  const long fitting = PAIRED_BYTES / (long)sizeof(bfloat16) / (steps * STEP) / (2 * HEIGHT) * (2 * HEIGHT);
  const long most = fitting > 2 * HEIGHT ? fitting : 2 * HEIGHT;
  long widest = 0;
  for (const int64_t *group = p->groups; group < p->groups + 3 * p->count; group += 3)
    widest = group[2] > widest ? group[2] : widest;
  const long held = ((widest < most ? widest : most) + HEIGHT - 1) / HEIGHT;
  void *memory = malloc((size_t)(held * steps * HEIGHT + 1) * sizeof(units));
  units *paired = memory ? (units *)(((uintptr_t)memory + 63) / 64 * 64) : 0;
  shape_plain_tiles(p->outs < LANES ? p->outs : LANES);
  for (long item = all * number / count; item < end;) {
    const int64_t *group = p->groups + 3 * (item / blocks);
    const long block = item % blocks, stop = blocks - block < end - item ? blocks : block + end - item;
    const bfloat16 *w = p->w + group[0] * p->apart, *bias = p->bias ? p->bias + group[0] * p->outs : 0;
    if (!paired) plain_rows_unpaired(p, w, bias, group[1], group[2], block, stop);
    for (long row = 0; paired && row < group[2]; row += most)
      plain_rows(p, w, bias, paired, group[1] + row, group[2] - row < most ? group[2] - row : most, block, stop);
    item += stop - block;
  }
  free(memory);
  _tile_release();
}
