/* Products of bfloat16 rows on the matrix unit (AMX), in place of the vector code of typed.h.

   One instruction multiplies up to sixteen rows of 32 inputs by 32 inputs of sixteen outputs, and adds the products to
   sixteen sums of each row. The second operand is 1 KB of a block of weights as it lies in memory: [16][16][2]. Few rows
   are multiplied in the same way, so that each output stays one chain of sums in order, whatever the rows beside it. The
   unit's speed does not matter for few rows, because reading the weights takes longer; for a prompt it does. */

enum {
  STEP = 32,              /* inputs that one instruction multiplies */
  ROWS_BYTES = 512 * 1024 /* of x that are kept near while all weights pass by */
};

/* Registers 0 to 5 hold rows of x or their sums, 6 and 7 hold weights. */
static void shape_tiles(long rows) {
  tile_shapes shapes = {.palette = 1};
  for (int t = 0; t < 8; t++) shape_tile(&shapes, t, t < 6 ? rows : HEIGHT, LANES * sizeof(float));
  take_shapes(&shapes);
}

INLINE void prefetch_tile(const bfloat16 *w, long ahead) {
#pragma GCC unroll 16
  for (int line = 0; line < 16; line++) __builtin_prefetch((const char *)w + ahead + 64 * line);
}

/* Sums of one tile of rows with `blocks` neighbouring blocks of outputs: [blocks][HEIGHT][LANES]. */
INLINE void multiply_one(const bfloat16 *x, const bfloat16 *w, long ins, float *sums, const int blocks) {
  const long deep = deep_bfloat16(ins), next = deep * LANES, stride = ins * (long)sizeof *x, line = LANES * (long)sizeof *w;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long k = 0; k + STEP <= ins; k += STEP) {
    const bfloat16 *at = w + k * LANES;
    const long ahead = ahead_of((deep - k) * line, (blocks - 1) * deep * line);
    LOAD_TILE(4, x + k, stride);
    LOAD_TILE(6, at, 64);
    prefetch_tile(at, ahead);
    _tile_dpbf16ps(0, 4, 6);
    if (blocks > 1) {
      LOAD_TILE(7, at + next, 64);
      prefetch_tile(at + next, ahead);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (blocks > 2) {
      LOAD_TILE(6, at + 2 * next, 64);
      prefetch_tile(at + 2 * next, ahead);
      _tile_dpbf16ps(2, 4, 6);
    }
    if (blocks > 3) {
      LOAD_TILE(7, at + 3 * next, 64);
      prefetch_tile(at + 3 * next, ahead);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, sums, 64);
  if (blocks > 1) _tile_stored(1, sums + HEIGHT * LANES, 64);
  if (blocks > 2) _tile_stored(2, sums + 2 * HEIGHT * LANES, 64);
  if (blocks > 3) _tile_stored(3, sums + 3 * HEIGHT * LANES, 64);
}

/* Sums of two tiles of rows with one block or two: [2][blocks][HEIGHT][LANES]. */
INLINE void multiply_two(const bfloat16 *x, const bfloat16 *other, const bfloat16 *w, long ins, float *sums,
                         const int blocks, const int fetch) {
  const long deep = deep_bfloat16(ins), next = deep * LANES, stride = ins * (long)sizeof *x, line = LANES * (long)sizeof *w;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long k = 0; k + STEP <= ins; k += STEP) {
    const bfloat16 *at = w + k * LANES;
    const long ahead = ahead_of((deep - k) * line, (blocks - 1) * deep * line);
    LOAD_TILE(4, x + k, stride);
    LOAD_TILE(6, at, 64);
    LOAD_TILE(5, other + k, stride);
    if (fetch) prefetch_tile(at, ahead);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if (blocks > 1) {
      LOAD_TILE(7, at + next, 64);
      if (fetch) prefetch_tile(at + next, ahead);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 64);
  if (blocks > 1) _tile_stored(1, sums + HEIGHT * LANES, 64);
  _tile_stored(2, sums + blocks * HEIGHT * LANES, 64);
  if (blocks > 1) _tile_stored(3, sums + 3 * HEIGHT * LANES, 64);
}

/* Sums of a tile that begins at row `from` to y, for rows from `row` on: the last tile begins in the one before. Inputs
   beyond a multiple of STEP are added here. */
static void finish(const product_bfloat16 *p, const float *sums, long from, long row, long stop, long block) {
  const bfloat16 *w = p->w + block * deep_bfloat16(p->ins) * LANES;
  for (; row < stop; row++) {
    const bfloat16 *x = p->x + row * p->ins;
    floats sum = load_float(sums + (row - from) * LANES);
    for (long k = p->ins / STEP * STEP; k < p->ins; k += 2)
      sum = add_product_bfloat16(sum, load_units(w + k * LANES), k + 1 < p->ins ? splat_unit(x + k) : splat_one_bfloat16(x + k));
    write_bfloat16(sum, p->bias, p->onto, p->y, row, p->outs, block * LANES);
  }
}

/* Two tiles of rows, or the one that is left, with one block or two. The second tile, and one that is left after others,
   may reach back into rows that are done. */
static void tiles_of(const product_bfloat16 *p, long row, long stop, long block, const int blocks) {
  const bfloat16 *w = p->w + block * deep_bfloat16(p->ins) * LANES;
  float sums[4 * HEIGHT * LANES] __attribute__((aligned(64)));
  const long first = row;
  while (row < stop) {
    const long middle = row + HEIGHT < stop ? row + HEIGHT : stop, end = middle + HEIGHT < stop ? middle + HEIGHT : stop;
    const long one = middle - HEIGHT > 0 ? middle - HEIGHT : 0, two = end - HEIGHT;
    if (end > middle) {
      const bfloat16 *x = p->x + one * p->ins, *other = p->x + two * p->ins;
      if (blocks == 1)
        multiply_two(x, other, w, p->ins, sums, 1, 1);
      else if (row == first)
        multiply_two(x, other, w, p->ins, sums, 2, 1);
      else
        multiply_two(x, other, w, p->ins, sums, 2, 0);
    } else {
      if (blocks > 1)
        multiply_one(p->x + one * p->ins, w, p->ins, sums, 2);
      else
        multiply_one(p->x + one * p->ins, w, p->ins, sums, 1);
    }
    for (int b = 0; b < blocks; b++) {
      finish(p, sums + b * HEIGHT * LANES, one, row, middle, block + b);
      if (end > middle) finish(p, sums + (blocks + b) * HEIGHT * LANES, two, middle, end, block + b);
    }
    row = end;
  }
}

/* One tile of rows with four blocks. */
static void four_blocks(const product_bfloat16 *p, long block) {
  float sums[4 * HEIGHT * LANES] __attribute__((aligned(64)));
  multiply_one(p->x, p->w + block * deep_bfloat16(p->ins) * LANES, p->ins, sums, 4);
  for (int b = 0; b < 4; b++) finish(p, sums + b * HEIGHT * LANES, 0, 0, p->rows, block + b);
}

/* Some blocks of outputs for all rows. */
static void blocks_of_bfloat16(const product_bfloat16 *p, long start, long stop) {
  const long fitting = ROWS_BYTES / (long)sizeof *p->x / p->ins / (2 * HEIGHT) * (2 * HEIGHT);
  const long most = fitting > 4 * HEIGHT ? fitting : 4 * HEIGHT;
  shape_tiles(p->rows < HEIGHT ? p->rows : HEIGHT);
  for (long row = 0; row < p->rows; row += most) {
    const long end = row + most < p->rows ? row + most : p->rows;
    long block = start;
    if (p->rows <= HEIGHT)
      for (; block + 4 <= stop; block += 4) four_blocks(p, block);
    for (; block + 2 <= stop; block += 2) tiles_of(p, row, end, block, 2);
    if (block < stop) tiles_of(p, row, end, block, 1);
  }
  _tile_release();
}
