/* Products with weights as torch keeps them, included once for each type of rows (see typed.h): nothing is packed, so that
   weights stay one copy, where they are. For few rows; a product of many costs less where its weights are packed first.

   A weight is [outs, ins] (`stride` elements from one output to the next), or [ins, outs] (`stride` elements from one input
   to the next) where it is `across`. There may be several of one shape, `apart` elements from one to the next, as
   mixtures of experts keep them: a group is the number of a matrix, the first of the rows that it multiplies, and how many
   they are.

   Each output is one sum in an order that depends on the number of inputs only. So a row's product does not depend on the
   rows beside it, nor on how the work is divided. It is rounded once, at the end. */

typedef struct {
  const ELEM *x, *w, *bias, *onto;
  ELEM *y;
  float *sums; /* [rows, outs] where weights are across */
  const int64_t *groups;
  long count, outs, ins, stride, apart;
} NAME(rows_product);

/* The first `count` elements, then zeros. */
INLINE units NAME(load_some)(const ELEM *at, long count) {
  if (count >= NAME(WIDTH)) return load_units(at);
  ELEM all[NAME(WIDTH)] = {0};
  if (count > 0) memcpy(all, at, (size_t)count * sizeof *at);
  return load_units(all);
}

#if defined(WITH_AMX) && UNIT == 2
#include "matrix_rows.h"
#else

/* Vectors whose lanes add up to the outputs of some rows, for `outs` neighbouring outputs. */
INLINE void NAME(dots)(const NAME(rows_product) * p, const ELEM *x, const ELEM *w, floats (*into)[LANES], const int rows,
                       const int outs) {
  floats sum[ROWS_TOGETHER][OUTS_OF_ONE];
#pragma GCC unroll 8
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
    for (int n = 0; n < outs; n++) sum[m][n] = zeros();
  long k = 0;
  for (; k + NAME(WIDTH) <= p->ins; k += NAME(WIDTH)) {
    units weight[OUTS_OF_ONE];
#pragma GCC unroll 8
    for (int n = 0; n < outs; n++) {
      weight[n] = load_units(w + n * p->stride + k);
      __builtin_prefetch(w + (n + outs) * p->stride + k);
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++) {
      const units input = load_units(x + m * p->ins + k);
#pragma GCC unroll 8
      for (int n = 0; n < outs; n++) sum[m][n] = NAME(add_product)(sum[m][n], weight[n], input);
    }
  }
  if (k < p->ins)
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++) {
      const units input = NAME(load_some)(x + m * p->ins + k, p->ins - k);
#pragma GCC unroll 8
      for (int n = 0; n < outs; n++)
        sum[m][n] = NAME(add_product)(sum[m][n], NAME(load_some)(w + n * p->stride + k, p->ins - k), input);
    }
#pragma GCC unroll 8
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
    for (int n = 0; n < outs; n++) into[m][n] = sum[m][n];
}

/* Some rows' outputs of sixteen neighbours, or of fewer at the end of a weight. */
INLINE void NAME(dots_tile)(const NAME(rows_product) * p, const ELEM *w, const ELEM *bias, long row, long out,
                            const int rows, const int outs) {
  const long here = p->outs - out < LANES ? p->outs - out : LANES;
  const ELEM *x = p->x + row * p->ins, *from = w + out * p->stride;
  floats each[ROWS_TOGETHER][LANES];
  long n = 0;
  for (; n + outs <= here; n += outs) {
    floats made[ROWS_TOGETHER][LANES];
    NAME(dots)(p, x, from + n * p->stride, made, rows, outs);
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
      for (int i = 0; i < outs; i++) each[m][n + i] = made[m][i];
  }
  for (; n < LANES; n++) {
    floats made[ROWS_TOGETHER][LANES];
    if (n < here) NAME(dots)(p, x, from + n * p->stride, made, rows, 1);
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++) each[m][n] = n < here ? made[m][0] : zeros();
  }
#pragma GCC unroll 8
  for (int m = 0; m < rows; m++)
    NAME(write)(sums_of_each(each[m]), bias, p->onto, p->y, row + m, p->outs, out);
}

typedef void (*NAME(dots_fn))(const NAME(rows_product) *, const ELEM *, const ELEM *, long, long);
#define TILE(m, outs)                                                                                                 \
  static void NAME(dots_##m)(const NAME(rows_product) * p, const ELEM *w, const ELEM *bias, long row, long out) {     \
    NAME(dots_tile)(p, w, bias, row, out, m, outs);                                                                   \
  }
#ifdef WITH_AVX512
TILE(1, 8) TILE(2, 8) TILE(3, 4) TILE(4, 4) TILE(5, 4) TILE(6, 4)
static const NAME(dots_fn) NAME(dots_tiles)[] = {0,            NAME(dots_1), NAME(dots_2), NAME(dots_3),
                                                 NAME(dots_4), NAME(dots_5), NAME(dots_6)};
#else
TILE(1, 4) TILE(2, 2)
static const NAME(dots_fn) NAME(dots_tiles)[] = {0, NAME(dots_1), NAME(dots_2)};
#endif
#undef TILE

static void NAME(share_dots)(void *given) {
  const NAME(rows_product) *p = given;
  const long blocks = (p->outs + LANES - 1) / LANES, all = p->count * blocks;
  const long number = thread_number(), count = thread_count();
  for (long item = all * number / count; item < all * (number + 1) / count; item++) {
    const int64_t *group = p->groups + 3 * (item / blocks);
    const ELEM *w = p->w + group[0] * p->apart, *bias = p->bias ? p->bias + group[0] * p->outs : 0;
    const long tiles = (group[2] + ROWS_TOGETHER - 1) / ROWS_TOGETHER;
    for (long t = 0; t < tiles; t++) {
      const long row = group[2] * t / tiles, stop = group[2] * (t + 1) / tiles;
      NAME(dots_tiles)[stop - row](p, w, bias, group[1] + row, item % blocks * LANES);
    }
  }
}

#endif /* WITH_AMX */

/* One vector of outputs of a group's rows for INPUTS_TOGETHER units of inputs: added to what was there, or begun. */
INLINE void NAME(add_across)(const NAME(rows_product) * p, const ELEM *w, const int64_t *group, long out, long k) {
  const long here = p->outs - out < NAME(WIDTH) ? p->outs - out : NAME(WIDTH);
  const long left = (p->ins - k + UNIT - 1) / UNIT, deep = left < INPUTS_TOGETHER ? left : INPUTS_TOGETHER;
  units weight[INPUTS_TOGETHER][UNIT];
#pragma GCC unroll 8
  for (int i = 0; i < INPUTS_TOGETHER; i++) {
    const long one = k + UNIT * (i < deep ? i : deep - 1), two = one + UNIT - 1 < p->ins ? one + UNIT - 1 : one;
    const ELEM *first = w + one * p->stride + out, *second = w + two * p->stride + out;
    __builtin_prefetch(first + INPUTS_TOGETHER * UNIT * p->stride); /* what the next inputs need */
    __builtin_prefetch(second + INPUTS_TOGETHER * UNIT * p->stride);
    ELEM copies[2][NAME(WIDTH)];
    if (here < NAME(WIDTH)) {
      memset(copies, 0, sizeof copies);
      first = memcpy(copies[0], first, (size_t)here * sizeof(ELEM));
      second = memcpy(copies[1], second, (size_t)here * sizeof(ELEM));
    }
    NAME(take)(weight[i], first, second);
  }
  for (long row = group[1]; row < group[1] + group[2]; row++) {
    const ELEM *x = p->x + row * p->ins + k;
    float *sums = p->sums + row * p->outs + out;
    ELEM last[INPUTS_TOGETHER * UNIT] = {0};
    if (p->ins - k < INPUTS_TOGETHER * UNIT) x = memcpy(last, x, (size_t)(p->ins - k) * sizeof(ELEM));
    floats sum[UNIT];
#pragma GCC unroll 2
    for (int v = 0; v < UNIT; v++) sum[v] = k ? load_first_float(sums + v * LANES, here - v * LANES) : zeros();
#pragma GCC unroll 8
    for (int i = 0; i < INPUTS_TOGETHER; i++) {
      const units input = splat_unit(x + UNIT * i);
#pragma GCC unroll 2
      for (int v = 0; v < UNIT; v++) sum[v] = NAME(add_product)(sum[v], weight[i][v], input);
    }
#pragma GCC unroll 2
    for (int v = 0; v < UNIT; v++) store_first_float(sums + v * LANES, here - v * LANES, sum[v]);
  }
}

static void NAME(share_across)(void *given) {
  const NAME(rows_product) *p = given;
  const long vectors = (p->outs + NAME(WIDTH) - 1) / NAME(WIDTH), number = thread_number(), count = thread_count();
  const long start = vectors * number / count * NAME(WIDTH), end = vectors * (number + 1) / count * NAME(WIDTH);
  const long stop = end < p->outs ? end : p->outs;
  for (const int64_t *group = p->groups; group < p->groups + 3 * p->count; group += 3) {
    const ELEM *w = p->w + group[0] * p->apart, *bias = p->bias ? p->bias + group[0] * p->outs : 0;
    for (long k = 0; k < p->ins; k += INPUTS_TOGETHER * UNIT)
      for (long out = start; out < stop; out += NAME(WIDTH)) NAME(add_across)(p, w, group, out, k);
    for (long row = group[1]; row < group[1] + group[2]; row++)
      for (long out = start; out < stop; out += LANES)
        NAME(write)(load_first_float(p->sums + row * p->outs + out, stop - out), bias, 0, p->y, row, p->outs, out);
  }
}

static void NAME(multiply_rows)(const NAME(rows_product) * p, long threads) {
  void (*share)(void *) = p->sums ? NAME(share_across) : NAME(share_dots);
  if (threads > 1 && p->count * p->outs * p->ins > SMALL)
    parallel(share, (void *)p, (unsigned)threads, 0);
  else
    share((void *)p);
}

/* y [rows, outs] = x [rows, ins] with each group's weight (+ bias [matrices, outs]), rounded; `groups` is [count, 3]. `sums`
   is working memory of rows * outs numbers where weights are across, else 0. */
void NAME(draftproof_rows_product)(const ELEM *x, const ELEM *w, const ELEM *bias, ELEM *y, float *sums,
                                   const int64_t *groups, long count, long outs, long ins, long stride, long apart,
                                   long threads) {
  const NAME(rows_product) p = {x, w, bias, 0, y, sums, groups, count, outs, ins, stride, apart};
  NAME(multiply_rows)(&p, threads);
}

/* The same with one weight [outs, ins] for all rows (+ onto [rows, outs], rounded again). */
static void NAME(plain_product)(const ELEM *x, const ELEM *w, const ELEM *bias, const ELEM *onto, ELEM *y, long rows, long outs,
                                long ins, long threads) {
  const int64_t all[] = {0, 0, rows};
  const NAME(rows_product) p = {x, w, bias, onto, y, 0, all, 1, outs, ins, ins, 0};
  NAME(multiply_rows)(&p, threads);
}

/* The same with weights of 4 or 8 bits (quantized.h), `apart` bytes from one to the next; `memory` is for the inputs of all
   rows. */
void NAME(draftproof_quantized_rows_product)(const ELEM *x, const uint8_t *w, const ELEM *bias, ELEM *y,
                                             const int64_t *groups, long count, long outs, long ins, long bits,
                                             long group, long apart, void *memory, long threads) {
  for (const int64_t *each = groups; each < groups + 3 * count; each += 3)
    NAME(draftproof_quantized_product)(x + each[1] * ins, w + each[0] * apart, bias ? bias + each[0] * outs : 0, 0,
                                       y + each[1] * outs, each[2], outs, ins, bits, group, memory, threads);
}
