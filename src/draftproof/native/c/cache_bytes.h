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

/* Round a head's numbers, with zeros up to whole vectors; returns their scale. It is NaN where one of them is not finite. */
static float round_to_bytes(const float *x, int8_t *to, long dim) {
  floats top = zeros(), wrong = zeros();
  for (long i = 0; i < dim; i += LANES) {
    const floats v = load_float(x + i);
    top = larger(top, larger(v, sub(zeros(), v)));
    wrong = multiply_add(v, zeros(), wrong);
  }
  const float largest = largest_of(top), scale = largest < 1e-30f ? 0 : largest / 127;
  const floats by = splat(scale > 0 ? 1 / scale : 0);
  int8_t made[MOST_DIM];
  for (long i = 0; i < dim; i += LANES) store_bytes(made + i, nearest(mul(load_float(x + i), by)));
  memcpy(to, made, (size_t)dim);
  return scale + sum_of(wrong);
}

/* So many bytes of the cache. Where they would reach beyond `end`, those of a copy, with zeros behind; elsewhere they may reach
   into the next position, whose numbers are not used. */
INLINE const int8_t *whole_bytes(const int8_t *at, const int8_t *end, const long size, int8_t *copied) {
  if (end - at >= size) return at;
  memset(copied, 0, (size_t)size);
  return memcpy(copied, at, (size_t)(end - at));
}
