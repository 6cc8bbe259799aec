/* Products with weights of 4 or 8 bits, included once for each type of rows (see typed.h).

   Weights lie as [out / 16][group of inputs], and a group as

     16 scales and 16 offsets in bfloat16, for each output of the block: a weight is offset + scale * number
     4 bits: [group / 8][16][4], a byte with the number of input k in its lower half, of input k + 4 in its upper one
     8 bits: [group / 4][16][4], a byte for each number

   so that one pass reads all of it in order. Inputs are padded to whole groups with zeros.

   Inputs are quantized, too: to 8 bits, with a scale for each group of each row. Products inside a group are sums of whole
   numbers, and exact; the groups' sums are added in order in float32. So a row's output does not depend on the rows
   beside it. */

typedef struct {
  const uint8_t *w;
  const ELEM *bias, *onto;
  ELEM *y;
  quantized_inputs inputs;
  long rows, outs, groups, group, bits;
} NAME(quantized_product);

static void NAME(quantize_row)(const ELEM *x, long ins, const quantized_inputs * to, long row, long groups, long group) {
  for (long g = 0; g < groups; g++) {
    const long start = g * group, here = ins - start < group ? ins - start : group;
    int8_t *numbers = to->numbers + row * groups * group + start;
    floats top = zeros();
    for (long i = 0; i < here; i += LANES) {
      const floats v = NAME(load_first)(x + start + i, here - i);
      top = larger(top, larger(v, sub(zeros(), v)));
    }
    const float scale = largest_of(top) / 127, by = scale > 0 ? 1 / scale : 0;
    floats sum = zeros();
    for (long i = 0; i < group; i += LANES) {
      const floats v = nearest(mul(NAME(load_first)(x + start + i, here - i), splat(by)));
      store_bytes(numbers + i, v);
      sum = add(sum, v);
    }
    to->scales[row * groups + g] = scale;
    to->sums[row * groups + g] = scale * sum_of(sum);
  }
}

/* Some rows' outputs of neighbouring blocks. */
INLINE void NAME(quantized_tile)(const NAME(quantized_product) * p, long row, long block, const int rows,
                                 const int blocks, const int bits) {
  const long places = p->groups * p->group, size = 64 + 2 * p->group * bits, next = p->groups * size;
  const uint8_t *at = p->w + block * next;
  const int8_t *x = p->inputs.numbers + row * places;
  floats sum[4][2];
#pragma GCC unroll 4
  for (int m = 0; m < rows; m++) sum[m][0] = sum[m][1] = zeros();
  for (long g = 0; g < p->groups; g++, at += size) {
    units low[4][2], high[4][2];
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 2
      for (int b = 0; b < blocks; b++) low[m][b] = high[m][b] = no_units();
    for (long k = 0, line = 64; line < size; k += 32 / bits, line += 64) {
      const int8_t *here = x + g * p->group + k;
#pragma GCC unroll 2
      for (int b = 0; b < blocks; b++) {
        const units numbers = load_units(at + b * next + line);
        const units lower = lower_halves(numbers), upper = upper_halves(numbers);
        __builtin_prefetch(at + b * next + line + AHEAD);
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++) {
          low[m][b] = add_dot(low[m][b], lower, splat_unit(here + m * places));
          high[m][b] = add_dot(high[m][b], upper, splat_unit(here + m * places + (bits == 4 ? 4 : 0)));
        }
      }
    }
#pragma GCC unroll 2
    for (int b = 0; b < blocks; b++) {
      const bfloat16 *range = (const bfloat16 *)(at + b * next);
      const floats scale = load_bfloat16(range), offset = load_bfloat16(range + LANES);
      __builtin_prefetch((const char *)range + AHEAD);
#pragma GCC unroll 4
      for (int m = 0; m < rows; m++) {
        const long number = (row + m) * p->groups + g;
        const floats whole =
            from_units(add_units(low[m][b], bits == 4 ? high[m][b] : shifted_up(high[m][b], 4)));
        sum[m][b] = multiply_add(mul(whole, scale), splat(p->inputs.scales[number]), sum[m][b]);
        sum[m][b] = multiply_add(offset, splat(p->inputs.sums[number]), sum[m][b]);
      }
    }
  }
#pragma GCC unroll 2
  for (int b = 0; b < blocks; b++)
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++)
      NAME(write)(sum[m][b], p->bias, p->onto, p->y, row + m, p->outs, (block + b) * LANES);
}

typedef void (*NAME(quantized_fn))(const NAME(quantized_product) *, long, long);
#define TILE(m, blocks, bits)                                                                                       \
  static void NAME(quantized_##m##_##blocks##_##bits)(const NAME(quantized_product) * p, long row, long block) {    \
    NAME(quantized_tile)(p, row, block, m, blocks, bits);                                                           \
  }
TILE(1, 1, 4) TILE(2, 1, 4) TILE(3, 1, 4) TILE(4, 1, 4) TILE(1, 2, 4)
TILE(1, 1, 8) TILE(2, 1, 8) TILE(3, 1, 8) TILE(4, 1, 8) TILE(1, 2, 8)
#undef TILE
static const NAME(quantized_fn) NAME(quantized_tiles)[2][5] = {
    {NAME(quantized_1_2_4), NAME(quantized_1_1_4), NAME(quantized_2_1_4), NAME(quantized_3_1_4), NAME(quantized_4_1_4)},
    {NAME(quantized_1_2_8), NAME(quantized_1_1_8), NAME(quantized_2_1_8), NAME(quantized_3_1_8), NAME(quantized_4_1_8)}};

static void NAME(share_quantized)(void *given) {
  const NAME(quantized_product) *p = given;
  const long blocks = (p->outs + LANES - 1) / LANES, number = thread_number(), count = thread_count();
  const NAME(quantized_fn) *tiles = NAME(quantized_tiles)[p->bits == 8];
  long block = blocks * number / count;
  const long stop = blocks * (number + 1) / count;
  if (p->rows == 1)
    for (; block + 2 <= stop; block += 2) tiles[0](p, 0, block);
  for (; block < stop; block++)
    for (long row = 0; row < p->rows; row += 4) tiles[p->rows - row < 4 ? p->rows - row : 4](p, row, block);
}

/* y [rows, outs] = x [rows, ins] w^T (+ bias), rounded (+ onto [rows, outs], rounded again); `memory` is for the
   quantized inputs. */
void NAME(draftproof_quantized_product)(const ELEM *x, const uint8_t *w, const ELEM *bias, const ELEM *onto, ELEM *y,
                                        long rows, long outs, long ins, long bits, long group, void *memory,
                                        long threads) {
  const long groups = (ins + group - 1) / group;
  NAME(quantized_product) p = {w, bias, onto, y, inputs_in(memory, rows, groups), rows, outs, groups,
                               group, bits};
  if (rows < 1) return;
  for (long row = 0; row < rows; row++) NAME(quantize_row)(x + row * ins, ins, &p.inputs, row, groups, group);
  if (threads > 1 && rows * outs * ins > SMALL)
    parallel(NAME(share_quantized), &p, (unsigned)threads, 0);
  else
    NAME(share_quantized)(&p);
}

/* --- quantizing weights ------------------------------------------------------------------------------------------ */

typedef struct {
  const ELEM *w;
  uint8_t *to;
  long blocks, ins, group, bits;
} NAME(quantizing);

static void NAME(share_quantizing)(void *given) {
  const NAME(quantizing) *q = given;
  const long number = thread_number(), count = thread_count(), groups = (q->ins + q->group - 1) / q->group;
  const long size = 64 + 2 * q->group * q->bits, each = 32 / q->bits; /* inputs in 64 bytes */
  floats w[MOST_GROUP], numbers[MOST_GROUP], scale, offset;
  for (long block = q->blocks * number / count; block < q->blocks * (number + 1) / count; block++)
    for (long g = 0; g < groups; g++) {
      const long start = g * q->group, here = q->ins - start < q->group ? q->ins - start : q->group;
      uint8_t *to = q->to + (block * groups + g) * size;
      for (long k = 0; k < here; k += UNIT) NAME(spread)(w + k, q->w + (block * q->ins + start + k) * LANES);
      quantize_group(w, here, q->bits, numbers, &scale, &offset);
      for (long k = here; k < q->group; k++) numbers[k] = zeros();
      store_bfloat16((bfloat16 *)to, scale);
      store_bfloat16((bfloat16 *)to + LANES, offset);
      for (long k = 0; k < q->group; k += each) {
        units made = no_units();
        for (long i = 0; i < each; i++) /* the byte of an input, and the half of it */
          made = add_units(made, shifted_up(to_units(numbers[k + i]), (int)(i % 4 * 8 + i / 4 * 4)));
        store_units(to + 64 + 64 * (k / each), made);
      }
    }
}

/* Quantize weights in the order in which products read them, [blocks][ins / UNIT][16][UNIT]. */
void NAME(draftproof_quantize)(const ELEM *w, uint8_t *to, long blocks, long ins, long bits, long group, long threads) {
  NAME(quantizing) q = {w, to, blocks, ins, group, bits};
  parallel(NAME(share_quantizing), &q, (unsigned)(threads > 1 ? threads : 1), 0);
}
