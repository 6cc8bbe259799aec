/* Numbers of 2, 4 or 8 bits in place of weights and inputs: what does not depend on the type of rows.

   A weight is offset + scale * number, with a scale and an offset for each group of an output's inputs. */

enum { MOST_GROUP = 128 };

typedef struct {
  int8_t *numbers; /* [rows, groups * group]; for weights of 8 bits of `byte_input` */
  float *scales;   /* [rows, groups] */
  float *sums;     /* [rows, groups], of the inputs as they were quantized */
  int32_t *starts; /* [rows, groups], of sums of products with bytes: BYTE_OFFSET times the sum of the numbers */
} quantized_inputs;

/* Where the quantized inputs of some rows lie in memory; quantized_inputs_size of structures.py is its size. */
static quantized_inputs inputs_in(void *memory, long rows, long groups) {
  const uintptr_t start = ((uintptr_t)memory + 63) / 64 * 64;
  quantized_inputs made;
  made.scales = (float *)start;
  made.sums = made.scales + rows * groups;
  made.starts = (int32_t *)(made.sums + rows * groups);
  made.numbers = (int8_t *)(made.starts + rows * groups);
  return made;
}

/* Bytes of an input that weights of so many bits are multiplied by. */
INLINE long input_size(const int bits) { return bits == 8 ? (long)sizeof(byte_input) : 1; }

/* Bytes before the pieces of a block, and of a whole block (quantized.h); Quantized.shape of tensors.py is the same. */
INLINE long quantized_head(long bits) { return bits < 8 ? 128 : 0; }
INLINE long groups_of_piece(long bits) { return bits < 8 ? 2 : 1; }
INLINE long quantized_block_size(long groups, long group, long bits) {
  const long together = groups_of_piece(bits);
  return quantized_head(bits) + (groups + together - 1) / together * (64 + together * 2 * bits * group);
}

/* Four bytes of each output from a line of 64: those of inputs 4 i to 4 i + 3. */
INLINE units quantized_unit(units line, const int bits, const int i) {
  return bits == 8 ? line : bits == 2 ? quarters(line, i) : i ? upper_halves(line) : lower_halves(line);
}

/* Whole numbers of steps that are near to values, at most `most` in size. */
INLINE floats steps_of(floats value, floats step, float most) {
  const floats by = where_below(zeros(), step, quotient(splat(1), step), zeros());
  return smaller(larger(nearest(mul(value, by)), splat(-most)), splat(most));
}

/* One over a scale, and what is added to weights times that: weights become numbers of steps. */
typedef struct {
  floats by, from;
} steps;
INLINE steps steps_for(floats scale, floats offset) {
  const floats by = where_below(zeros(), scale, quotient(splat(1), scale), zeros());
  return (steps){by, subtract_product(offset, by, zeros())};
}
INLINE floats number_of(floats w, steps s, floats most) {
  return smaller(larger(nearest(multiply_add(w, s.by, s.from)), zeros()), most);
}

/* Numbers of a group for given scales and offsets. */
INLINE void numbers_of(const floats *w, long count, floats scale, floats offset, floats most, floats *numbers) {
  const steps s = steps_for(scale, offset);
  for (long k = 0; k < count; k++) numbers[k] = number_of(w[k], s, most);
}

/* The sum of squared errors that they leave, each times the weight of its input. */
INLINE floats errors_of(const floats *w, const float *weights, long count, floats scale, floats offset, floats most) {
  const steps s = steps_for(scale, offset);
  floats errors = zeros();
  for (long k = 0; k < count; k++) {
    const floats off = sub(w[k], multiply_add(number_of(w[k], s, most), scale, offset));
    errors = multiply_add(mul(off, splat(weights[k])), off, errors);
  }
  return errors;
}

/* Sums of these numbers, of their products with weights, and of their squares, each times the weight of its input. */
typedef struct {
  floats numbers, products, squares;
} group_sums;
INLINE group_sums sums_of(const floats *w, const float *weights, long count, floats scale, floats offset, floats most) {
  const steps s = steps_for(scale, offset);
  group_sums sums = {zeros(), zeros(), zeros()};
  for (long k = 0; k < count; k++) {
    const floats number = number_of(w[k], s, most), weighted = mul(number, splat(weights[k]));
    sums.numbers = add(sums.numbers, weighted);
    sums.products = multiply_add(weighted, w[k], sums.products);
    sums.squares = multiply_add(weighted, number, sums.squares);
  }
  return sums;
}

/* In four chains, so that additions need not wait for one another. */
INLINE float total_of(const float *weights, long count) {
  float sums[4] = {0};
  for (long k = 0; k < count; k++) sums[k % 4] += weights[k];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/* In bfloat16 where scales and offsets are kept so, with 8 bits; with fewer they are kept in steps (rounded_range). */
INLINE floats kept_as(floats v, long bits) { return bits < 8 ? v : rounded_bfloat16(v); }

/* Scale and offset of one group of one block, by the best of several ranges, the weights' own and narrower ones, each fitted
   again by least squares. Two fits more are worth more than twice the ranges. Of weights less their mean m, of numbers n and
   weights of inputs d, the fitted scale is sum(d n w) / V, where V = sum(d n^2) - sum(d n)^2 / sum(d), and takes
   scale * sum(d n w) from the sum of squares. */
static void quantize_group(const floats *w, const float *weights, long count, long bits, floats *scale, floats *offset) {
  static const float SHARES[] = {1.0f, 0.9f, 0.8f};
  const floats most = splat((float)((1 << bits) - 1)), share = splat(1 / total_of(weights, count));
  floats mean = zeros(), low = splat(INFINITY), high = splat(-INFINITY), best = splat(-1), centred[MOST_GROUP];
  for (long k = 0; k < count; k++) mean = multiply_add(w[k], splat(weights[k]), mean);
  mean = mul(mean, share);
  for (long k = 0; k < count; k++) {
    centred[k] = sub(w[k], mean);
    low = smaller(low, centred[k]);
    high = larger(high, centred[k]);
  }
  floats middle = zeros(); /* mean number */
  *scale = zeros();
  for (int number = 0; number < (bits < 8 ? 3 : 1); number++) {
    const floats lost = mul(sub(high, low), splat((1 - SHARES[number]) / 2));
    floats step = quotient(sub(sub(high, low), add(lost, lost)), most), start = add(low, lost);
    for (int again = 0; again < (bits < 8 ? 3 : 1); again++) {
      const group_sums sums = sums_of(centred, weights, count, step, start, most);
      const floats at = mul(sums.numbers, share), spread = subtract_product(at, sums.numbers, sums.squares);
      const floats least = mul(sums.squares, splat(1e-5f)); /* below it all numbers are one, and the rest is rounding */
      step = where_below(least, spread, quotient(sums.products, spread), step);
      start = subtract_product(step, at, zeros());
      const floats taken = where_below(least, spread, mul(step, sums.products), zeros());
      *scale = where_below(best, taken, step, *scale);
      middle = where_below(best, taken, at, middle);
      best = larger(taken, best);
    }
  }
  *scale = kept_as(*scale, bits);
  *offset = kept_as(subtract_product(*scale, middle, mean), bits);
}

/* Scales and offsets of a group in steps of their outputs', and its numbers: of the scales beside the given ones, those with
   the least error, each with the offsets that fit it. */
static void rounded_range(const floats *w, const float *weights, long count, long bits, floats scale_step, floats offset_step,
                          floats *scale, floats *offset, floats *numbers) {
  const floats most = splat((float)((1 << bits) - 1)), near = steps_of(*scale, scale_step, 255);
  const floats share = splat(1 / total_of(weights, count));
  const floats mean_number = mul(sums_of(w, weights, count, *scale, *offset, most).numbers, share);
  floats mean = zeros(), least = splat(INFINITY), best_scale = zeros(), best_offset = zeros();
  for (long k = 0; k < count; k++) mean = multiply_add(w[k], splat(weights[k]), mean);
  mean = mul(mean, share);
  for (int beside = -1; beside < 2; beside++) {
    const floats scales = smaller(larger(add(near, splat((float)beside)), zeros()), splat(255));
    const floats offsets = steps_of(subtract_product(mul(scales, scale_step), mean_number, mean), offset_step, 127);
    const floats errors = errors_of(w, weights, count, mul(scales, scale_step), mul(offsets, offset_step), most);
    best_scale = where_below(errors, least, scales, best_scale);
    best_offset = where_below(errors, least, offsets, best_offset);
    least = smaller(errors, least);
  }
  numbers_of(w, count, mul(best_scale, scale_step), mul(best_offset, offset_step), most, numbers);
  *scale = best_scale;
  *offset = best_offset;
}
