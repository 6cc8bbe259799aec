/* Products with weights of 2, 4 or 8 bits, included once for each type of rows (see typed.h).

   A weight is offset + scale * number. Weights lie as [out / 16][piece], so that one pass reads all of them in order; below
   8 bits, 16 steps of scales and 16 steps of offsets in float32 stand before a block's pieces. A piece is

     4 bits: [2 groups][16 scales, 0 to 255, and 16 offsets, -127 to 127], in bytes, of the block's outputs, times their
             steps; then [2 groups][group / 8][16][4], a byte with the number of input k in its lower half, of input k + 4
             in its upper one
     2 bits: the same, but [2 groups][group / 16][16][4]: inputs k, k + 4, k + 8 and k + 12 in the quarters of a byte
     8 bits: 16 scales and 16 offsets in bfloat16; then [group / 4][16][4], a byte for each number

   that is 64 bytes and then 2 * bits * group for each group. Inputs are padded to whole groups with zeros.

   Inputs are quantized, too: to 8 bits, with a scale for each group of each row. Products inside a group are sums of whole
   numbers, and exact; the groups' sums are added in order in float32. So a row's output does not depend on the rows
   beside it. */

typedef struct {
  const uint8_t *w;
  const ELEM *bias, *onto;
  ELEM *y;
  quantized_inputs inputs;
  long rows, outs, groups, group, bits;
  shares *shared;
} NAME(quantized_product);

static void NAME(quantize_row)(const ELEM *x, long ins, const quantized_inputs * to, long row, long groups, long group,
                               long bits) {
  for (long g = 0; g < groups; g++) {
    const long start = g * group, here = ins - start < group ? ins - start : group;
    const long place = row * groups * group + start;
    floats top = zeros();
    for (long i = 0; i < here; i += LANES) {
      const floats v = NAME(load_first)(x + start + i, here - i);
      top = larger(top, larger(v, sub(zeros(), v)));
    }
    const float scale = largest_of(top) / 127, by = scale > 0 ? 1 / scale : 0;
    floats made = zeros();
    for (long i = 0; i < group; i += LANES) {
      const floats v = nearest(mul(NAME(load_first)(x + start + i, here - i), splat(by)));
      if (bits == 8)
        store_byte_inputs((byte_input *)to->numbers + place + i, v);
      else
        store_bytes(to->numbers + place + i, v);
      made = add(made, v);
    }
    const float sum = sum_of(made);
    to->scales[row * groups + g] = scale;
    to->sums[row * groups + g] = scale * sum;
    to->starts[row * groups + g] = BYTE_OFFSET * (int32_t)sum;
  }
}

/* Products of a group's lines from `start` to `stop`, of which `here` are the first one's inputs, and those of the line behind
   them. They are added to `dots`; of 8 bits to `total`. */
INLINE const int8_t *NAME(add_lines)(const uint8_t *body, long next, long ahead, const int near, const int8_t *here,
                                     long places, long start, long stop, const int rows, const int blocks, const int bits,
                                     const int chains, units (*total)[QUANTIZED_BLOCKS],
                                     units (*dots)[QUANTIZED_BLOCKS][2]) {
  const long size = input_size(bits);
  for (long line = start; line < stop; line += 64, here += 32 / bits * size)
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++) {
      const units numbers = load_units(body + b * next + line);
      fetch_ahead(body + b * next + line + ahead, near);
#pragma GCC unroll 4
      for (int i = 0; i < 8 / bits; i++) {
        const units weights = quantized_unit(numbers, bits, i);
        if (bits < 8)
#pragma GCC unroll 8
          for (int m = 0; m < rows; m++)
            dots[m][b][i % chains] = add_dot(dots[m][b][i % chains], weights, splat_unit(here + m * places + 4 * i));
        else
#pragma GCC unroll 2
          for (int step = 0; step < BYTE_STEPS; step++) {
            if (step) READ_AGAIN;
            const units bytes = bytes_of_step(weights, step);
#pragma GCC unroll 8
            for (int m = 0; m < rows; m++)
              total[m][b] = add_byte_dot(total[m][b], bytes, splat_unit(here + m * places * size + 4 * step));
          }
      }
    }
  return here;
}

/* Some rows' outputs of neighbouring blocks; memory is read faster in more places at once. */
INLINE void NAME(quantized_tile)(const NAME(quantized_product) * p, long row, long block, const int rows,
                                 const int blocks, const int bits) {
  const int together = (int)groups_of_piece(bits), chains = HALVES || bits == 8 || rows > (ONE_SUM ? 1 : 3) ? 1 : 2;
  const int near = blocks == 1 && bits < 8; /* into the first cache: with few bits two and five rows were slower otherwise */
  const long places = p->groups * p->group, size = 2 * p->group * bits;
  const long most = HALVES && bits < 8 ? steps_of_halves(bits) * bits / 8 * 64 : size, part = most < size ? most : size;
  const long next = quantized_block_size(p->groups, p->group, bits);
  const uint8_t *start = p->w + block * next, *at = start + quantized_head(bits);
  const int8_t *x = p->inputs.numbers + row * places * input_size(bits);
  floats sum[QUANTIZED_ROWS][QUANTIZED_BLOCKS];
  floats offsets[QUANTIZED_ROWS][QUANTIZED_BLOCKS]; /* with 8 bits, `sum` takes both */
#pragma GCC unroll 8
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++) sum[m][b] = offsets[m][b] = zeros();
  for (long g = 0; g < p->groups; g++) {
    const int half = (int)(g % together);
    const uint8_t *range = at + 32 * half, *body = at + 64 + size * half;
    const long left = start + next - body - size;
    const long ahead = near ? ahead_of(left, (blocks - 1) * next) : ahead_of_blocks(left, next, blocks);
    units total[QUANTIZED_ROWS][QUANTIZED_BLOCKS], dots[QUANTIZED_ROWS][QUANTIZED_BLOCKS][2];
    const int8_t *here = x + g * p->group * input_size(bits);
    if (HALVES && bits < 8 && part == size) { /* nothing to add these sums to */
#pragma GCC unroll 8
      for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++) dots[m][b][0] = no_units();
      NAME(add_lines)(body, next, ahead, near, here, places, 0, size, rows, blocks, bits, 1, total, dots);
#pragma GCC unroll 8
      for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++) total[m][b] = closed_dots(no_units(), dots[m][b][0]);
    } else {
#pragma GCC unroll 8
      for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++)
          total[m][b] = bits == 8 && BYTE_OFFSET ? splat_unit(p->inputs.starts + (row + m) * p->groups + g) : no_units();
      for (long stop = part; stop <= size; stop += part) {
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
          for (int b = 0; b < blocks; b++) {
            dots[m][b][0] = opened_dots(total[m][b]);
            dots[m][b][1] = no_units();
          }
        here = NAME(add_lines)(body, next, ahead, near, here, places, stop - part, stop, rows, blocks, bits, chains, total,
                               dots);
        if (bits < 8)
#pragma GCC unroll 8
          for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
            for (int b = 0; b < blocks; b++) {
              total[m][b] = closed_dots(total[m][b], dots[m][b][0]);
              if (chains > 1) total[m][b] = add_units(total[m][b], dots[m][b][1]);
            }
      }
    }
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++) {
      const uint8_t *of_block = range + b * next;
      const floats scale = bits < 8 ? load_bytes(of_block) : load_bfloat16((const bfloat16 *)of_block);
      const floats offset = bits < 8 ? load_signed_bytes((const int8_t *)of_block + LANES)
                                      : load_bfloat16((const bfloat16 *)of_block + LANES);
      fetch_ahead(of_block + ahead, near);
#pragma GCC unroll 8
      for (int m = 0; m < rows; m++) {
        const long number = (row + m) * p->groups + g;
        floats *to = bits < 8 ? &offsets[m][b] : &sum[m][b];
        sum[m][b] = multiply_add(mul(from_units(total[m][b]), scale), splat(p->inputs.scales[number]), sum[m][b]);
        *to = multiply_add(offset, splat(p->inputs.sums[number]), *to);
      }
    }
    if (half == together - 1) at += 64 + size * together;
  }
#pragma GCC unroll 4
  for (int b = 0; b < blocks; b++) {
    const float *steps = (const float *)(start + b * next);
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++) {
      floats made = sum[m][b];
      if (bits < 8)
        made = multiply_add(made, load_float(steps), mul(offsets[m][b], load_float(steps + LANES)));
      NAME(write)(made, p->bias, p->onto, p->y, row + m, p->outs, (block + b) * LANES);
    }
  }
}

typedef void (*NAME(quantized_fn))(const NAME(quantized_product) *, long, long);
#define TILE(m, blocks, bits)                                                                                       \
  static void NAME(quantized_##m##_##blocks##_##bits)(const NAME(quantized_product) * p, long row, long block) {    \
    NAME(quantized_tile)(p, row, block, m, blocks, bits);                                                           \
  }
QUANTIZED_TILES(TILE, 2) QUANTIZED_TILES(TILE, 4) QUANTIZED_TILES(TILE, 8)
#undef TILE
#define NAMED(m, blocks, bits) [bits / 4][m][blocks] = NAME(quantized_##m##_##blocks##_##bits),
static const NAME(quantized_fn) NAME(quantized_tiles)[3][QUANTIZED_ROWS + 1][QUANTIZED_BLOCKS + 1] = {
    QUANTIZED_TILES(NAMED, 2) QUANTIZED_TILES(NAMED, 4) QUANTIZED_TILES(NAMED, 8)};
#undef NAMED

static void NAME(share_quantized)(void *given) {
  const NAME(quantized_product) *p = given;
  const NAME(quantized_fn)(*tiles)[QUANTIZED_BLOCKS + 1] = NAME(quantized_tiles)[p->bits / 4]; /* of 2, 4 and 8 bits */
  const long count = (p->rows + QUANTIZED_ROWS - 1) / QUANTIZED_ROWS;
  long at = thread_number(), block, stop;
  while (next_share(p->shared, &at, &block, &stop)) {
    if (p->rows == 1) {
      if (QUANTIZED_BLOCKS == 4)
        for (; block + 4 <= stop; block += 4) tiles[1][QUANTIZED_BLOCKS](p, 0, block);
      for (; block + 2 <= stop; block += 2) tiles[1][2](p, 0, block);
    }
    for (; block < stop; block++)
      for (long t = 0, row = 0; t < count; t++) {
        const long end = p->rows * (t + 1) / count;
        tiles[end - row][1](p, row, block);
        row = end;
      }
  }
}

/* y [rows, outs] = x [rows, ins] w^T (+ bias), rounded (+ onto [rows, outs], rounded again); `memory` is for the
   quantized inputs. */
void NAME(draftproof_quantized_product)(const ELEM *x, const uint8_t *w, const ELEM *bias, const ELEM *onto, ELEM *y,
                                        long rows, long outs, long ins, long bits, long group, void *memory,
                                        long threads) {
  const long groups = (ins + group - 1) / group;
  const int alone = threads < 2 || rows * outs * ins <= SMALL;
  shares shared;
  share_out(&shared, (outs + LANES - 1) / LANES, quantized_block_size(groups, group, bits), alone ? 1 : threads);
  NAME(quantized_product) p = {w, bias, onto, y, inputs_in(memory, rows, groups), rows, outs, groups,
                               group, bits, &shared};
  if (rows < 1) return;
  for (long row = 0; row < rows; row++) NAME(quantize_row)(x + row * ins, ins, &p.inputs, row, groups, group, bits);
  if (alone)
    NAME(share_quantized)(&p);
  else
    parallel(NAME(share_quantized), &p, (unsigned)threads, 0);
}

/* --- quantizing weights ------------------------------------------------------------------------------------------ */

typedef struct {
  const ELEM *w;
  uint8_t *to;
  long blocks, ins, group, bits;
  float *memory;        /* [threads, groups, 2, 16] */
  const float *weights; /* [ins], positive: how much the error of an input's weights counts; 0 where all count alike */
  const float *mean;    /* [ins], of the inputs; 0 where that is not known */
  float *lost;          /* [blocks, 16]: mean of what the quantized outputs lack, where the inputs' is known */
} NAME(quantizing);

static long NAME(weights_of_group)(const NAME(quantizing) * q, long block, long g, floats *w) {
  const long start = g * q->group, here = q->ins - start < q->group ? q->ins - start : q->group;
  const ELEM *at = q->w + (block * NAME(deep)(q->ins) + start) * LANES;
  for (long k = 0; k < here; k += UNIT) NAME(spread)(w + k, at + k * LANES);
  return here;
}

static void NAME(share_quantizing)(void *given) {
  const NAME(quantizing) *q = given;
  const long number = thread_number(), count = thread_count(), groups = (q->ins + q->group - 1) / q->group;
  const long together = groups_of_piece(q->bits), size = 2 * q->group * q->bits, next = quantized_block_size(groups, q->group, q->bits);
  const floats most = splat((float)((1 << q->bits) - 1));
  floats w[MOST_GROUP], numbers[MOST_GROUP], scale, offset;
  float alike[MOST_GROUP];
  for (long k = 0; k < MOST_GROUP; k++) alike[k] = 1;
  float *ranges = q->memory + number * groups * 2 * LANES;
  for (long block = q->blocks * number / count; block < q->blocks * (number + 1) / count; block++) {
    uint8_t *to = q->to + block * next;
    memset(to, 0, next);
    floats largest_scale = zeros(), largest_offset = zeros(), lost = zeros();
    for (long g = 0; g < groups; g++) {
      const long here = NAME(weights_of_group)(q, block, g, w);
      quantize_group(w, q->weights ? q->weights + g * q->group : alike, here, q->bits, &scale, &offset);
      largest_scale = larger(largest_scale, scale);
      largest_offset = larger(largest_offset, larger(offset, sub(zeros(), offset)));
      store_float(ranges + g * 2 * LANES, scale);
      store_float(ranges + g * 2 * LANES + LANES, offset);
    }
    const floats scale_step = mul(largest_scale, splat(1.0f / 255)), offset_step = mul(largest_offset, splat(1.0f / 127));
    if (q->bits < 8) {
      store_float((float *)to, scale_step);
      store_float((float *)to + LANES, offset_step);
    }
    for (long g = 0; g < groups; g++) {
      uint8_t *piece = to + quantized_head(q->bits) + g / together * (64 + size * together);
      uint8_t *range = piece + g % together * 32, *body = piece + 64 + g % together * size;
      const long here = NAME(weights_of_group)(q, block, g, w);
      scale = load_float(ranges + g * 2 * LANES);
      offset = load_float(ranges + g * 2 * LANES + LANES);
      const float *weights = q->weights ? q->weights + g * q->group : alike;
      if (q->bits < 8) {
        rounded_range(w, weights, here, q->bits, scale_step, offset_step, &scale, &offset, numbers);
        store_bytes((int8_t *)range, scale);
        store_bytes((int8_t *)range + LANES, offset);
      } else {
        store_bfloat16((bfloat16 *)range, scale);
        store_bfloat16((bfloat16 *)range + LANES, offset);
        numbers_of(w, here, scale, offset, most, numbers);
      }
      if (q->mean) {
        const floats by = q->bits < 8 ? mul(scale, scale_step) : scale, from = q->bits < 8 ? mul(offset, offset_step) : offset;
        for (long k = 0; k < here; k++)
          lost = multiply_add(sub(w[k], multiply_add(numbers[k], by, from)), splat(q->mean[g * q->group + k]), lost);
      }
      for (long k = here; k < q->group; k++) numbers[k] = zeros();
      for (long k = 0, line = 0; line < size; line += 64) {
        units made = no_units();
        for (long i = 0; i < 32 / q->bits; i++, k++) /* the byte of an input, and the half of it */
          made = add_units(made, shifted_up(to_units(numbers[k]), (int)(i % 4 * 8 + i / 4 * q->bits)));
        store_units(body + line, made);
      }
    }
    if (q->mean) store_float(q->lost + block * LANES, lost);
  }
}

/* Quantize weights in the order in which products read them, [blocks][ins / UNIT][16][UNIT]; `memory` is for 32 float32
   numbers for each thread and group. */
void NAME(draftproof_quantize)(const ELEM *w, uint8_t *to, float *memory, const float *weights, const float *mean,
                               float *lost, long blocks, long ins, long bits, long group, long threads) {
  NAME(quantizing) q = {w, to, blocks, ins, group, bits, memory, weights, mean, lost};
  parallel(NAME(share_quantizing), &q, (unsigned)(threads > 1 ? threads : 1), 0);
}
