/* Products of bfloat16 rows by float32 multiplications, in place of the dot products of typed.h.

   Intel's processors without a free matrix unit multiply pairs of bfloat16 numbers slowly: one such instruction takes as
   long as four on float32 numbers, which do twice its work. AVX2, and Neon without bf16, have no such instruction. So inputs
   are widened once, into memory of the thread, and weights after they are loaded, once for all rows of a tile. Sums are
   those of `add_product_bfloat16`, in its order. With few rows (NARROW_ROWS) nothing would be widened twice, and the tile
   of typed.h serves. */

enum { WIDE_BYTES = 1 << 20 }; /* of widened rows that are kept near while all weights pass by */

INLINE void tile_of_wide(const product_bfloat16 *p, const float *x, long row, long block, const int rows,
                         const int blocks) {
  const long deep = deep_bfloat16(p->ins);
  const bfloat16 *w = p->w + block * deep * LANES;
  floats sum[TILE_ROWS][4];
#pragma GCC unroll 12
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++) sum[m][b] = zeros();
  const long line = LANES * (long)sizeof *w;
  for (long k = 0; k < deep; k += 2) {
    const long ahead = ahead_of((deep - k) * line, (blocks - 1) * deep * line);
#ifdef WITH_AVX512 /* weights of all blocks at once */
#pragma GCC unroll 2
    for (int number = 0; number < 2; number++) {
      floats weight[4];
#pragma GCC unroll 4
      for (int b = 0; b < blocks; b++) {
        const bfloat16 *at = w + b * deep * LANES + k * LANES;
        if (!number) __builtin_prefetch((const char *)at + ahead);
        __asm__("" : "+r"(at)); /* loaded again for the second number: 24 sums leave no register to keep it in */
        weight[b] = one_of_two(load_units(at), number);
      }
#pragma GCC unroll 12
      for (int m = 0; m < rows; m++) {
        const floats input = splat(x[m * deep + k + number]);
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++) sum[m][b] = multiply_add(weight[b], input, sum[m][b]);
      }
    }
#else /* one weight at a time: it has several registers */
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++) {
      const bfloat16 *at = w + b * deep * LANES + k * LANES;
      __builtin_prefetch((const char *)at + ahead);
#pragma GCC unroll 2
      for (int number = 0; number < 2; number++) {
        if (PART == 8 && rows > 4) __asm__("" : "+r"(at)); /* loaded again for the second number, as above */
        const floats weight = one_of_two(load_units(at), number);
#pragma GCC unroll 12
        for (int m = 0; m < rows; m++) sum[m][b] = multiply_add(weight, splat(x[m * deep + k + number]), sum[m][b]);
      }
    }
#endif
  }
#pragma GCC unroll 4
  for (int b = 0; b < blocks; b++)
#pragma GCC unroll 12
    for (int m = 0; m < rows; m++)
      write_bfloat16(sum[m][b], p->bias, p->onto, p->y, row + m, p->outs, (block + b) * LANES);
}

/* A function for each number of rows and blocks, so that sums stay in registers. */
typedef void (*wide_fn)(const product_bfloat16 *, const float *, long, long);
#define TILE(m, b)                                                                             \
  static void wide_##m##_##b(const product_bfloat16 *p, const float *x, long row, long block) { \
    if (m > NARROW_ROWS)                                                                       \
      tile_of_wide(p, x, row, block, m, b);                                                    \
    else                                                                                       \
      tile_bfloat16(p, row, block, m, b);                                                      \
  }
#define NAMED(m, b) [b][m] = wide_##m##_##b,
PRODUCT_TILES(TILE)
static const wide_fn wide_tiles[5][TILE_ROWS + 1] = {PRODUCT_TILES(NAMED)};
#undef NAMED
#undef TILE

/* Some blocks of outputs for some tiles of rows, whose inputs are in `wide`. */
static void wide_blocks_of(const product_bfloat16 *p, const float *wide, long first, long last, long tiles, long start,
                           long stop) {
  const long top = p->rows * first / tiles, most = (p->rows + tiles - 1) / tiles;
  while (start < stop) {
    const long blocks = blocks_beside(most, stop - start);
    for (long t = first; t < last; t++) {
      const long row = p->rows * t / tiles, end = p->rows * (t + 1) / tiles;
      wide_tiles[blocks][end - row](p, wide + (row - top) * deep_bfloat16(p->ins), row, start);
    }
    start += blocks;
  }
}

/* The same sums without memory for widened rows. */
static void narrow_blocks_of(const product_bfloat16 *p, long start, long stop) {
  for (long block = start; block < stop; block++)
    for (long row = 0; row < p->rows; row++) {
      const bfloat16 *x = p->x + row * p->ins, *w = p->w + block * deep_bfloat16(p->ins) * LANES;
      floats sum = zeros();
      for (long k = 0; k < p->ins; k += 2)
        sum = add_product_bfloat16(sum, load_units(w + k * LANES), k + 1 < p->ins ? splat_unit(x + k) : splat_one_bfloat16(x + k));
      write_bfloat16(sum, p->bias, p->onto, p->y, row, p->outs, block * LANES);
    }
}

/* Some blocks of outputs for all rows. */
static void blocks_of_bfloat16(const product_bfloat16 *p, long start, long stop) {
  const long tiles = (p->rows + TILE_ROWS - 1) / TILE_ROWS, most = (p->rows + tiles - 1) / tiles;
  const long deep = deep_bfloat16(p->ins);
  if (most <= NARROW_ROWS) {
    const float none = 0;
    wide_blocks_of(p, &none, 0, tiles, tiles, start, stop);
    return;
  }
  const long fitting = WIDE_BYTES / (long)sizeof(float) / (most * deep), near = fitting > 1 ? fitting : 1;
  float *wide = malloc((size_t)((near < tiles ? near : tiles) * most * deep) * sizeof *wide);
  if (!wide) {
    narrow_blocks_of(p, start, stop);
    return;
  }
  for (long t = 0; t < tiles; t += near) {
    const long last = t + near < tiles ? t + near : tiles, row = p->rows * t / tiles, end = p->rows * last / tiles;
    const bfloat16 *x = p->x + row * p->ins;
    const long whole = deep == p->ins ? end - row : 1; /* rows that have no padding between them */
    for (long part = 0; part < end - row; part += whole)
      for (long i = 0; i < whole * deep; i += LANES)
        store_first_float(wide + part * deep + i, whole * deep - i,
                          load_first_bfloat16(x + part * p->ins + i, whole * p->ins - i));
    wide_blocks_of(p, wide, t, last, tiles, start, stop);
  }
  free(wide);
}
