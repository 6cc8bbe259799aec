/* Numbers of 2, 4 or 8 bits in place of weights and inputs: what does not depend on the type of rows.

   A weight is offset + scale * number, with a scale and an offset for each group of an output's inputs. */

enum { MOST_GROUP = 128 };

typedef struct {
  int8_t *numbers; /* [rows, groups * group] */
  float *scales;   /* [rows, groups] */
  float *sums;     /* [rows, groups], of the inputs as they were quantized */
} quantized_inputs;

/* Where the quantized inputs of some rows lie in memory; quantized_inputs_size of operations.py is its size. */
static quantized_inputs inputs_in(void *memory, long rows, long groups) {
  const uintptr_t start = ((uintptr_t)memory + 63) / 64 * 64;
  quantized_inputs made;
  made.scales = (float *)start;
  made.sums = made.scales + rows * groups;
  made.numbers = (int8_t *)(made.sums + rows * groups);
  return made;
}

/* Bytes before the pieces of a block, and of a whole block (quantized.h); Quantized.shape of operations.py is the same. */
INLINE long quantized_head(long bits) { return bits < 8 ? 128 : 0; }
INLINE long groups_of_piece(long bits) { return bits < 8 ? 2 : 1; }
INLINE long quantized_block_size(long groups, long group, long bits) {
  const long together = groups_of_piece(bits);
  return quantized_head(bits) + (groups + together - 1) / together * (64 + together * 2 * bits * group);
}

/* Whole numbers of steps that are near to values, at most `most` in size. */
INLINE floats steps_of(floats value, floats step, float most) {
  const floats by = where_below(zeros(), step, quotient(splat(1), step), zeros());
  return smaller(larger(nearest(mul(value, by)), splat(-most)), splat(most));
}

/* Numbers of a group for given scales and offsets, and the sum of squared errors that they leave, each times the weight of
   its input. */
INLINE floats errors_of(const floats *w, const float *weights, long count, floats scale, floats offset, floats most,
                        floats *numbers) {
  const floats by = where_below(zeros(), scale, quotient(splat(1), scale), zeros());
  floats errors = zeros();
  for (long k = 0; k < count; k++) {
    numbers[k] = smaller(larger(nearest(mul(sub(w[k], offset), by)), zeros()), most);
    const floats off = sub(w[k], multiply_add(numbers[k], scale, offset));
    errors = multiply_add(mul(off, splat(weights[k])), off, errors);
  }
  return errors;
}

/* In bfloat16 where scales and offsets are kept so, with 8 bits; with fewer they are kept in steps (rounded_range). */
INLINE floats kept_as(floats v, long bits) { return bits < 8 ? v : rounded_bfloat16(v); }

/* The scales and offsets with the least of these errors for given numbers. */
INLINE void fit(const floats *w, const float *weights, long count, long bits, const floats *numbers, floats *scale,
                floats *offset) {
  float total = 0;
  floats sum_w = zeros(), sum_n = zeros(), both = zeros(), squares = zeros();
  for (long k = 0; k < count; k++) {
    total += weights[k];
    sum_w = multiply_add(w[k], splat(weights[k]), sum_w);
    sum_n = multiply_add(numbers[k], splat(weights[k]), sum_n);
  }
  const floats mean_w = quotient(sum_w, splat(total)), mean_n = quotient(sum_n, splat(total));
  for (long k = 0; k < count; k++) {
    const floats n = sub(numbers[k], mean_n), weighted = mul(n, splat(weights[k]));
    both = multiply_add(weighted, sub(w[k], mean_w), both);
    squares = multiply_add(weighted, n, squares);
  }
  *scale = kept_as(where_below(zeros(), squares, quotient(both, squares), *scale), bits);
  *offset = kept_as(subtract_product(*scale, mean_n, mean_w), bits);
}

/* One group of one block: the best of several ranges, the weights' own and narrower ones, each fitted again. Two fits more
   are worth more than twice the ranges. */
static void quantize_group(const floats *w, const float *weights, long count, long bits, floats *numbers, floats *scale,
                           floats *offset) {
  static const float SHARES[] = {1.0f, 0.9f, 0.8f};
  const floats most = splat((float)((1 << bits) - 1));
  floats low = w[0], high = w[0], least = splat(INFINITY), tried[MOST_GROUP];
  for (long k = 1; k < count; k++) {
    low = smaller(low, w[k]);
    high = larger(high, w[k]);
  }
  *scale = *offset = zeros();
  for (int number = 0; number < (bits < 8 ? 3 : 1); number++) {
    const floats lost = mul(sub(high, low), splat((1 - SHARES[number]) / 2));
    floats step = kept_as(quotient(sub(sub(high, low), add(lost, lost)), most), bits), start = kept_as(add(low, lost), bits);
    for (int again = 0; again < (bits < 8 ? 4 : 2); again++) {
      const floats errors = errors_of(w, weights, count, step, start, most, tried);
      *scale = where_below(errors, least, step, *scale);
      *offset = where_below(errors, least, start, *offset);
      least = smaller(errors, least);
      fit(w, weights, count, bits, tried, &step, &start);
    }
  }
  errors_of(w, weights, count, *scale, *offset, most, numbers);
}

/* Scales and offsets of a group in steps of their outputs', and its numbers: of the scales beside the given ones, those with
   the least error, each with the offsets that fit it. */
static void rounded_range(const floats *w, const float *weights, long count, long bits, floats scale_step, floats offset_step,
                          floats *scale, floats *offset, floats *numbers) {
  const floats most = splat((float)((1 << bits) - 1)), near = steps_of(*scale, scale_step, 255);
  floats total_w = zeros(), total_n = zeros(), least = splat(INFINITY), best_scale = zeros(), best_offset = zeros();
  float total = 0;
  errors_of(w, weights, count, *scale, *offset, most, numbers);
  for (long k = 0; k < count; k++) {
    total += weights[k];
    total_w = multiply_add(w[k], splat(weights[k]), total_w);
    total_n = multiply_add(numbers[k], splat(weights[k]), total_n);
  }
  for (int beside = -1; beside < 2; beside++) {
    const floats scales = smaller(larger(add(near, splat((float)beside)), zeros()), splat(255));
    const floats fitted = quotient(subtract_product(mul(scales, scale_step), total_n, total_w), splat(total));
    const floats offsets = steps_of(fitted, offset_step, 127);
    const floats errors =
        errors_of(w, weights, count, mul(scales, scale_step), mul(offsets, offset_step), most, numbers);
    best_scale = where_below(errors, least, scales, best_scale);
    best_offset = where_below(errors, least, offsets, best_offset);
    least = smaller(errors, least);
  }
  errors_of(w, weights, count, mul(best_scale, scale_step), mul(best_offset, offset_step), most, numbers);
  *scale = best_scale;
  *offset = best_offset;
}
