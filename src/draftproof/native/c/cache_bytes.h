/* Keys and values of 8 bits. The numbers of a head's position are rounded alone: to whole numbers from -127 to 127 times a
   scale of their own. A key is multiplied by a Hadamard matrix before, and so are the queries, which leaves the scores: a few
   numbers of a key are far larger than the others, and the scale follows the largest one (QuaRot, arXiv 2404.00456).

   backends/cache/rounding.py says the same on tensors, to the last bit. */

/* The largest power of two that divides a head's size: that of the matrix, which is there for each block of so many numbers. */
INLINE long hadamard_size(long dim) { return dim & -dim; }

/* x times the matrix of ones and minus ones. */
static void hadamard(float *x, long dim) {
  const long size = hadamard_size(dim);
  for (long half = 1; half < size; half *= 2)
    for (long start = 0; start < dim; start += 2 * half)
      for (long i = start; i < start + half; i++) {
        const float one = x[i], other = x[i + half];
        x[i] = one + other;
        x[i + half] = one - other;
      }
}

/* The largest size of a head's numbers, which have zeros up to whole vectors; NaN where one of them is not finite. */
static float largest_size(const float *x, long dim) {
  floats top = zeros(), wrong = zeros();
  for (long i = 0; i < dim; i += LANES) {
    const floats v = load_float(x + i);
    top = larger(top, larger(v, sub(zeros(), v)));
    wrong = multiply_add(v, zeros(), wrong);
  }
  return largest_of(top) + sum_of(wrong);
}

/* The scale of numbers of a largest size as whole numbers up to `most`. */
INLINE float scale_for(float largest, float most) { return largest < 1e-30f ? 0 : largest / most; }
INLINE floats over_scale(float scale) { return splat(scale > 0 ? 1 / scale : 0); }

/* Round a head's numbers, with zeros up to whole vectors; returns their scale. */
static float round_to_bytes(const float *x, int8_t *to, long dim) {
  const float scale = scale_for(largest_size(x, dim), 127);
  const floats by = over_scale(scale);
  int8_t made[MOST_DIM];
  for (long i = 0; i < dim; i += LANES) store_bytes(made + i, nearest(mul(load_float(x + i), by)));
  memcpy(to, made, (size_t)dim);
  return scale;
}

/* So many bytes of the cache. Where they would reach beyond `end`, those of a copy, with zeros behind; elsewhere they may reach
   into the next position, whose numbers are not used. */
INLINE const int8_t *whole_bytes(const int8_t *at, const int8_t *end, const long size, int8_t *copied) {
  if (end - at >= size) return at;
  memset(copied, 0, (size_t)size);
  return memcpy(copied, at, (size_t)(end - at));
}

/* Sixteen keys (the last one again where there are fewer) with four numbers of each in a unit: [dim / 4][16][4], up to whole
   vectors; what is behind a head is not zero. The cache may be read up to `end`. */
static void exchange_bytes(const int8_t *keys, const int8_t *end, long dim, long count, units *out) {
  enum { BYTES = 4 * LANES };
  for (long d = 0; d < dim; d += BYTES, out += LANES) {
    for (long key = 0; key < LANES; key++) {
      const int8_t *at = keys + (key < count ? key : count - 1) * dim + d;
      int8_t copied[BYTES];
      out[key] = load_units(whole_bytes(at, end, BYTES, copied));
      __builtin_prefetch(at + 4 * LANES * dim);
    }
    exchange(out);
  }
}

#ifdef WITH_BYTE_DOTS
/* A query of bfloat16 numbers as whole numbers of 15 bits, 128 times one byte and another: sums of their products with keys are
   exact, and no key is widened. */
enum { DIGIT = 128, MOST_DIGITS = 127 * DIGIT + DIGIT / 2 - 1 };
typedef struct {
  float scale;
  int32_t starts[2];    /* of the sums of both bytes' products */
  int8_t numbers[][2][4];
} query_digits;

/* `x` has zeros up to whole vectors. */
static void digits_of(const float *x, long dim, query_digits *to) {
  int8_t made[2][MOST_DIM];
  int32_t sums[2] = {0};
  to->scale = scale_for(largest_size(x, dim), MOST_DIGITS);
  const floats by = over_scale(to->scale);
  for (long i = 0; i < dim; i += LANES) {
    const floats whole = nearest(mul(load_float(x + i), by)), upper = nearest(mul(whole, splat(1.0f / DIGIT)));
    store_bytes(made[0] + i, upper);
    store_bytes(made[1] + i, subtract_product(upper, splat(DIGIT), whole));
  }
  for (long i = 0; i < (dim + 3) / 4 * 4; i++)
    for (int which = 0; which < 2; which++) sums[which] += to->numbers[i / 4][which][i % 4] = made[which][i];
  for (int which = 0; which < 2; which++) to->starts[which] = -KEY_OFFSET * sums[which];
}

/* Products of some queries, `stride` bytes apart, with sixteen keys that lie as `exchange_bytes` leaves them. */
INLINE void dot_some(const units *block, const char *queries, long stride, float *to, long padded, long dim,
                     const int count) {
  const query_digits *of[6];
  units sum[6][2];
#pragma GCC unroll 6
  for (int m = 0; m < count; m++) {
    of[m] = (const query_digits *)(queries + m * stride);
    for (int which = 0; which < 2; which++) sum[m][which] = splat_unit(of[m]->starts + which);
  }
  for (long unit = 0; unit * 4 < dim; unit++) {
    const units keys = key_bytes(block[unit]);
#pragma GCC unroll 6
    for (int m = 0; m < count; m++)
      for (int which = 0; which < 2; which++)
        sum[m][which] = add_key_dot(sum[m][which], keys, splat_unit(of[m]->numbers[unit][which]));
  }
#pragma GCC unroll 6
  for (int m = 0; m < count; m++) {
    const floats whole = from_units(add_units(shifted_up(sum[m][0], 7), sum[m][1]));
    store_float(to + m * padded, mul(whole, splat(of[m]->scale)));
  }
}
#endif
