/* Sixteen lanes as several smaller vectors (lanes.h). */

#ifdef WITH_AVX2
enum { PART = 8, TILE_ROWS = 6, NARROW_ROWS = 1, TILE_ROWS_OF_TWO = 2, TILE_ROWS_OF_THREE = 0, TILE_ROWS_OF_FOUR = 1, QUANTIZED_ROWS = 5, QUANTIZED_BLOCKS = 2, ONE_SUM = 1, TOGETHER = 6, TOGETHER_OF_TWO = 3, WIDE = 2, TAKEN = 1, ROWS_TOGETHER = 2, OUTS_OF_ONE = 4, INPUTS_TOGETHER = 4 };
#define PRODUCT_TILES(DO) DO(1, 1) DO(2, 1) DO(3, 1) DO(4, 1) DO(5, 1) DO(6, 1) DO(1, 2) DO(2, 2) DO(1, 4)
#elif defined(WITH_NEON) /* 32 registers, of which a tile's sums take 24 at most */
enum { PART = 4, TILE_ROWS = 6, NARROW_ROWS = 1, TILE_ROWS_OF_TWO = 3, TILE_ROWS_OF_THREE = 0, TILE_ROWS_OF_FOUR = 1, QUANTIZED_ROWS = 5, QUANTIZED_BLOCKS = 2, ONE_SUM = 1, TOGETHER = 3, TOGETHER_OF_TWO = 3, WIDE = 2, TAKEN = 1, ROWS_TOGETHER = 2, OUTS_OF_ONE = 4, INPUTS_TOGETHER = 4 };
#define PRODUCT_TILES(DO) DO(1, 1) DO(2, 1) DO(3, 1) DO(4, 1) DO(5, 1) DO(6, 1) DO(1, 2) DO(2, 2) DO(3, 2) DO(1, 4)
#else
enum { PART = 4, TILE_ROWS = 4, TILE_ROWS_OF_TWO = 2, TILE_ROWS_OF_THREE = 0, TILE_ROWS_OF_FOUR = 0, QUANTIZED_ROWS = 5, QUANTIZED_BLOCKS = 2, ONE_SUM = 1, TOGETHER = 2, TOGETHER_OF_TWO = 2, WIDE = 2, TAKEN = 1, ROWS_TOGETHER = 2, OUTS_OF_ONE = 4, INPUTS_TOGETHER = 2 };
#define PRODUCT_TILES(DO) DO(1, 1) DO(2, 1) DO(3, 1) DO(4, 1) DO(1, 2) DO(2, 2) DO(1, 4)
#endif
#define QUANTIZED_TILES(DO, bits) DO(1, 1, bits) DO(2, 1, bits) DO(3, 1, bits) DO(4, 1, bits) DO(5, 1, bits) DO(1, 2, bits)
enum { PARTS = LANES / PART };

typedef float float_part __attribute__((vector_size(4 * PART)));
typedef int32_t int_part __attribute__((vector_size(4 * PART)));
typedef uint32_t bits_part __attribute__((vector_size(4 * PART)));
typedef uint16_t half_part __attribute__((vector_size(2 * PART)));
/* The same anywhere in memory: read part by part, since a struct that is copied whole goes through the stack. */
typedef float float_part_at __attribute__((vector_size(4 * PART), aligned(4), may_alias));
typedef uint32_t bits_part_at __attribute__((vector_size(4 * PART), aligned(1), may_alias));
typedef uint16_t half_part_at __attribute__((vector_size(2 * PART), aligned(2), may_alias));
typedef struct {
  float_part p[PARTS];
} floats;
typedef struct {
  bits_part p[PARTS];
} units;

#define UPPER 0xffff0000u /* the higher one of two bfloat16 numbers */
#define EACH_PART _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++)

INLINE float_part splat_part(float v) { /* not 0 + v, which is no -0, and so an addition */
#ifdef WITH_AVX2
  return _mm256_set1_ps(v);
#else
  return (float_part){v, v, v, v};
#endif
}
INLINE int_part number_part(int i) { /* the lanes' numbers */
#ifdef WITH_AVX2
  return (int_part){0, 1, 2, 3, 4, 5, 6, 7} + PART * i;
#else
  return (int_part){0, 1, 2, 3} + PART * i;
#endif
}
INLINE float_part choose(int_part which, float_part a, float_part b) { /* which: all bits of a lane, or none */
#ifdef WITH_AVX2
  return _mm256_blendv_ps(b, a, (float_part)which);
#else
  return (float_part)(((int_part)a & which) | ((int_part)b & ~which));
#endif
}

INLINE floats splat(float v) {
  floats r;
  EACH_PART r.p[i] = splat_part(v);
  return r;
}
INLINE floats add(floats a, floats b) {
  EACH_PART a.p[i] = a.p[i] + b.p[i];
  return a;
}
INLINE floats sub(floats a, floats b) {
  EACH_PART a.p[i] = a.p[i] - b.p[i];
  return a;
}
INLINE floats mul(floats a, floats b) {
  EACH_PART a.p[i] = a.p[i] * b.p[i];
  return a;
}
INLINE floats quotient(floats a, floats b) {
  EACH_PART a.p[i] = a.p[i] / b.p[i];
  return a;
}
INLINE float_part multiply_add_part(float_part a, float_part b, float_part c) {
#ifdef WITH_AVX2
  return _mm256_fmadd_ps(a, b, c);
#elif defined(WITH_NEON)
  return vfmaq_f32(c, a, b);
#elif defined(__FP_FAST_FMAF)
  for (int lane = 0; lane < PART; lane++) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return c;
#else
  return a * b + c;
#endif
}
INLINE floats multiply_add(floats a, floats b, floats c) {
  EACH_PART c.p[i] = multiply_add_part(a.p[i], b.p[i], c.p[i]);
  return c;
}
INLINE floats subtract_product(floats a, floats b, floats c) {
  EACH_PART c.p[i] = multiply_add_part(-a.p[i], b.p[i], c.p[i]);
  return c;
}
INLINE floats larger(floats a, floats b) { /* b where they cannot be compared, as in _mm512_max_ps */
#ifdef WITH_AVX2
  EACH_PART a.p[i] = _mm256_max_ps(a.p[i], b.p[i]);
#else
  EACH_PART a.p[i] = choose(a.p[i] > b.p[i], a.p[i], b.p[i]);
#endif
  return a;
}
INLINE floats smaller(floats a, floats b) { /* b where they cannot be compared, as in _mm512_min_ps */
#ifdef WITH_AVX2
  EACH_PART a.p[i] = _mm256_min_ps(a.p[i], b.p[i]);
#else
  EACH_PART a.p[i] = choose(a.p[i] < b.p[i], a.p[i], b.p[i]);
#endif
  return a;
}
INLINE floats where_below(floats a, floats b, floats then, floats otherwise) {
  EACH_PART then.p[i] = choose(a.p[i] < b.p[i], then.p[i], otherwise.p[i]);
  return then;
}
enum { MAGIC_BITS = 0x4b400000 }; /* of 1.5 * 2^23: added to a float32 below 2^22 it leaves the nearest whole number */
INLINE floats nearest(floats v) {
#ifdef WITH_NEON
  EACH_PART v.p[i] = vrndnq_f32(v.p[i]);
#else
  EACH_PART v.p[i] = (v.p[i] + splat_part(12582912.0f)) - splat_part(12582912.0f);
#endif
  return v;
}
/* v 2^whole, |whole| below 2^22; in two steps, so that what float32 holds only as a subnormal number is rounded once. */
INLINE floats times_power(floats v, floats whole) {
  whole = smaller(larger(whole, splat(-252.0f)), splat(252.0f));
  EACH_PART {
    const int_part exponent = (int_part)(whole.p[i] + splat_part(12582912.0f)) - MAGIC_BITS;
    const int_part half = exponent >> 1;
    v.p[i] = v.p[i] * (float_part)((half + 127) << 23) * (float_part)((exponent - half + 127) << 23);
  }
  return v;
}
/* v bounded to where e^v can differ: below -110 it is 0 in float32, above 130 infinite. NaN stays NaN. */
INLINE floats bounded_exponent(floats v) { return smaller(splat(130.0f), larger(splat(-110.0f), v)); }
/* a in the first `count` lanes, b in the others. */
INLINE floats first_of(long count, floats a, floats b) {
  const int most = count < 0 ? 0 : count > LANES ? LANES : (int)count;
  EACH_PART a.p[i] = choose(number_part(i) < (int_part){0} + most, a.p[i], b.p[i]);
  return a;
}
INLINE float sum_of(floats v) {
  float_part part = v.p[0];
  for (int i = 1; i < PARTS; i++) part += v.p[i];
#ifdef WITH_NEON
  return vaddvq_f32(part);
#else
  float sum = 0;
  for (int lane = 0; lane < PART; lane++) sum += part[lane];
  return sum;
#endif
}
INLINE float largest_of(floats v) {
#ifdef WITH_NEON
  return vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(v.p[0], v.p[1]), vmaxnmq_f32(v.p[2], v.p[3])));
#else
  float top = v.p[0][0];
  for (int i = 0; i < PARTS; i++)
    for (int lane = 0; lane < PART; lane++) top = top > v.p[i][lane] ? top : v.p[i][lane];
  return top;
#endif
}
INLINE int any_lane(floats v) { /* whether some bit is set */
  bits_part both = (bits_part)v.p[0];
  for (int i = 1; i < PARTS; i++) both |= (bits_part)v.p[i];
  uint32_t any = 0;
  for (int lane = 0; lane < PART; lane++) any |= both[lane];
  return any != 0;
}
INLINE int any_not_below(long count, floats v, floats bound) {
  floats wrong;
  EACH_PART wrong.p[i] = (float_part) ~(v.p[i] < bound.p[i]);
  return any_lane(first_of(count, wrong, splat(0)));
}
INLINE int any_not_zero(long count, floats v) {
  floats wrong;
  EACH_PART wrong.p[i] = (float_part) ~(v.p[i] == splat_part(0));
  return any_lane(first_of(count, wrong, splat(0)));
}

INLINE floats load_float(const float *at) {
  floats r;
  EACH_PART r.p[i] = *(const float_part_at *)(at + PART * i);
  return r;
}
INLINE floats load_first_float(const float *at, long count) {
  if (count >= LANES) return load_float(at);
  float all[LANES] = {0};
  if (count > 0) memcpy(all, at, (size_t)count * sizeof *at);
  return load_float(all);
}
INLINE void store_float(float *at, floats v) { EACH_PART *(float_part_at *)(at + PART * i) = v.p[i]; }
INLINE void store_first_float(float *at, long count, floats v) {
  if (count >= LANES) {
    store_float(at, v);
    return;
  }
  float all[LANES];
  store_float(all, v);
  if (count > 0) memcpy(at, all, (size_t)count * sizeof *at);
}

INLINE floats load_bfloat16(const bfloat16 *at) {
  floats r;
#ifdef WITH_AVX2 /* GCC widens each half of a part by itself */
  EACH_PART r.p[i] = (float_part)(bits_part)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(at + PART * i))), 16);
#else
  EACH_PART {
    const half_part half = *(const half_part_at *)(at + PART * i);
    r.p[i] = (float_part)(__builtin_convertvector(half, bits_part) << 16);
  }
#endif
  return r;
}
/* Sixteen numbers in another order, in which they take fewer instructions; and sums of such numbers in order. */
#ifdef WITH_AVX2 /* those at even places, then those at odd ones */
INLINE floats load_apart_bfloat16(const bfloat16 *at) {
  const bits_part both = *(const bits_part_at *)at;
  return (floats){{(float_part)(both << 16), (float_part)(both & UPPER)}};
}
INLINE floats in_order_bfloat16(floats v) {
  const __m256 low = _mm256_unpacklo_ps(v.p[0], v.p[1]), high = _mm256_unpackhi_ps(v.p[0], v.p[1]);
  return (floats){{_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)}};
}
#else
INLINE floats load_apart_bfloat16(const bfloat16 *at) { return load_bfloat16(at); }
INLINE floats in_order_bfloat16(floats v) { return v; }
#endif
INLINE floats load_first_bfloat16(const bfloat16 *at, long count) {
  if (count >= LANES) return load_bfloat16(at);
  bfloat16 all[LANES] = {0};
  if (count > 0) memcpy(all, at, (size_t)count * sizeof *at);
  return load_bfloat16(all);
}
INLINE bits_part narrowed_part(float_part v) { /* to the nearest, ties to even; NaN stays NaN */
#ifdef WITH_BF16
  return vmovl_u16(vreinterpret_u16_bf16(vcvt_bf16_f32(v)));
#else
  const bits_part bits = (bits_part)v, up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (bits_part)choose(v == v, (float_part)up, (float_part)((bits_part){0} + 0x7fc0));
#endif
}
INLINE void store_bfloat16(bfloat16 *at, floats v) {
  EACH_PART *(half_part_at *)(at + PART * i) = __builtin_convertvector(narrowed_part(v.p[i]), half_part);
}
INLINE void store_first_bfloat16(bfloat16 *at, long count, floats v) {
  if (count >= LANES) {
    store_bfloat16(at, v);
    return;
  }
  bfloat16 all[LANES];
  store_bfloat16(all, v);
  if (count > 0) memcpy(at, all, (size_t)count * sizeof *at);
}
INLINE floats rounded_bfloat16(floats v) {
  EACH_PART v.p[i] = (float_part)(narrowed_part(v.p[i]) << 16);
  return v;
}

INLINE units load_units(const void *at) {
  units r;
  EACH_PART r.p[i] = *(const bits_part_at *)((const char *)at + 4 * PART * i);
  return r;
}
INLINE units splat_unit(const void *at) {
  units r;
#ifdef WITH_AVX2
  EACH_PART r.p[i] = (bits_part)_mm256_broadcast_ss(at); /* one instruction, where a number would be moved twice */
#else
  uint32_t unit;
  memcpy(&unit, at, sizeof unit);
  EACH_PART r.p[i] = (bits_part){0} + unit;
#endif
  return r;
}
INLINE floats add_product_float(floats sum, units w, units x) {
  EACH_PART sum.p[i] = multiply_add_part((float_part)w.p[i], (float_part)x.p[i], sum.p[i]);
  return sum;
}
INLINE floats add_product_bfloat16(floats sum, units w, units x) {
#ifdef WITH_BF16
  EACH_PART sum.p[i] = vbfdotq_f32(sum.p[i], vreinterpretq_bf16_u32(w.p[i]), vreinterpretq_bf16_u32(x.p[i]));
#elif defined(WITH_AVX2) /* halves of weights are made for each row: all of them, kept, would take registers from the sums */
  EACH_PART {
    float_part low, high;
    __asm__ volatile("vpslld $16, %1, %0" : "=x"(low) : "x"(w.p[i]));
    sum.p[i] = multiply_add_part(low, (float_part)(x.p[i] << 16), sum.p[i]);
    __asm__ volatile("vpand %2, %1, %0" : "=x"(high) : "x"(w.p[i]), "xm"((bits_part){0} + 0xffff0000u));
    sum.p[i] = multiply_add_part(high, (float_part)(x.p[i] & 0xffff0000u), sum.p[i]);
  }
#else
  EACH_PART {
    sum.p[i] = multiply_add_part((float_part)(w.p[i] << 16), (float_part)(x.p[i] << 16), sum.p[i]);
    sum.p[i] = multiply_add_part((float_part)(w.p[i] & 0xffff0000u), (float_part)(x.p[i] & 0xffff0000u), sum.p[i]);
  }
#endif
  return sum;
}

/* Whole numbers, as units. */
INLINE units no_units(void) {
  units r;
  EACH_PART r.p[i] = (bits_part){0};
  return r;
}
INLINE units add_units(units a, units b) {
  EACH_PART a.p[i] += b.p[i];
  return a;
}
INLINE units shifted_up(units v, int bits) {
  EACH_PART v.p[i] <<= bits;
  return v;
}
INLINE units shifted_down(units v, const int bits) { /* with the sign */
  EACH_PART v.p[i] = (bits_part)((int_part)v.p[i] >> bits);
  return v;
}
INLINE units to_units(floats v) { /* of whole numbers */
  units r;
  EACH_PART r.p[i] = (bits_part)__builtin_convertvector(v.p[i], int_part);
  return r;
}
INLINE floats from_units(units v) {
  floats r;
  EACH_PART r.p[i] = __builtin_convertvector((int_part)v.p[i], float_part);
  return r;
}
INLINE void store_units(void *at, units v) { EACH_PART *(bits_part_at *)((char *)at + 4 * PART * i) = v.p[i]; }
#ifdef WITH_NEON
INLINE void store_bytes(int8_t *at, floats v) {
  int16x8_t half[2];
  for (int i = 0; i < 2; i++)
    half[i] = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(v.p[2 * i])), vmovn_s32(vcvtnq_s32_f32(v.p[2 * i + 1])));
  vst1q_s8(at, vcombine_s8(vmovn_s16(half[0]), vmovn_s16(half[1])));
}
INLINE floats load_signed_bytes(const int8_t *at) {
  const int8x16_t all = vld1q_s8(at);
  const int16x8_t half[2] = {vmovl_s8(vget_low_s8(all)), vmovl_high_s8(all)};
  floats r;
  EACH_PART r.p[i] = vcvtq_f32_s32(i % 2 ? vmovl_high_s16(half[i / 2]) : vmovl_s16(vget_low_s16(half[i / 2])));
  return r;
}
INLINE floats load_bytes(const uint8_t *at) {
  const uint8x16_t all = vld1q_u8(at);
  const uint16x8_t half[2] = {vmovl_u8(vget_low_u8(all)), vmovl_high_u8(all)};
  floats r;
  EACH_PART r.p[i] = vcvtq_f32_u32(i % 2 ? vmovl_high_u16(half[i / 2]) : vmovl_u16(vget_low_u16(half[i / 2])));
  return r;
}
#elif defined(WITH_AVX2)
INLINE void store_bytes(int8_t *at, floats v) {
  const units made = to_units(v);
  const __m256i one = (__m256i)(made.p[0] & 255), two = (__m256i)(made.p[1] & 255);
  const __m256i all = _mm256_permute4x64_epi64(_mm256_packus_epi32(one, two), 0xd8); /* it packs each half of a register */
  _mm_storeu_si128((__m128i *)at, _mm_packus_epi16(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}
INLINE floats load_signed_bytes(const int8_t *at) {
  floats r;
  EACH_PART r.p[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(at + PART * i))));
  return r;
}
INLINE floats load_bytes(const uint8_t *at) {
  floats r;
  EACH_PART r.p[i] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(at + PART * i))));
  return r;
}
#else
INLINE void store_bytes(int8_t *at, floats v) {
  const units made = to_units(v);
  EACH_PART for (int lane = 0; lane < PART; lane++) at[PART * i + lane] = (int8_t)made.p[i][lane];
}
INLINE floats load_signed_bytes(const int8_t *at) {
  typedef int8_t byte_part __attribute__((vector_size(PART), aligned(1), may_alias));
  floats r;
  EACH_PART {
    const byte_part bytes = *(const byte_part *)(at + PART * i);
    r.p[i] = __builtin_convertvector(__builtin_convertvector(bytes, int_part), float_part);
  }
  return r;
}
INLINE floats load_bytes(const uint8_t *at) {
  floats r;
  EACH_PART for (int lane = 0; lane < PART; lane++) r.p[i][lane] = at[PART * i + lane];
  return r;
}
#endif
/* One of the four signed bytes of each unit, as float32. */
INLINE floats signed_byte(units v, const int number) {
  floats r;
  EACH_PART r.p[i] = __builtin_convertvector((int_part)(v.p[i] << (24 - 8 * number)) >> 24, float_part);
  return r;
}
/* Two bfloat16 numbers in each unit, of float32 ones that are no more. */
INLINE units paired_bfloat16(floats a, floats b) {
  units r;
  EACH_PART r.p[i] = ((bits_part)a.p[i] >> 16) | (bits_part)b.p[i];
  return r;
}
/* Each byte's lower and upper half. */
INLINE units lower_halves(units v) {
  EACH_PART v.p[i] &= 0x0f0f0f0fu;
  return v;
}
INLINE units upper_halves(units v) {
#ifdef WITH_NEON
  EACH_PART v.p[i] = (bits_part)vshrq_n_u8((uint8x16_t)v.p[i], 4);
#else
  EACH_PART v.p[i] = (v.p[i] >> 4) & 0x0f0f0f0fu;
#endif
  return v;
}
/* Of sixteen bytes the one whose place each byte is. */
INLINE units looked_up(const uint8_t *table, units places) {
#if defined(WITH_AVX2)
  const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
  EACH_PART places.p[i] = (bits_part)_mm256_shuffle_epi8(both, (__m256i)places.p[i]);
#elif defined(WITH_NEON)
  const uint8x16_t all = vld1q_u8(table);
  EACH_PART places.p[i] = (bits_part)vqtbl1q_u8(all, (uint8x16_t)places.p[i]);
#else
  uint8_t bytes[sizeof places];
  memcpy(bytes, &places, sizeof places);
  for (unsigned i = 0; i < sizeof places; i++) bytes[i] = table[bytes[i]];
  memcpy(&places, bytes, sizeof places);
#endif
  return places;
}
/* A quarter of each byte, 0 being the lowest. */
INLINE units quarters(units v, const int number) {
  EACH_PART v.p[i] = (v.p[i] >> (2 * number)) & 0x03030303u;
  return v;
}
/* Sixteen floats, of which each unit's four bits from some bit on choose one. */
#ifdef WITH_AVX2
typedef struct {
  float_part half[2];
} levels;
INLINE levels load_levels(const float *at) {
  return (levels){{*(const float_part_at *)at, *(const float_part_at *)(at + PART)}};
}
INLINE floats level_of(levels table, units v, const int bit) {
  floats r;
  EACH_PART {
    const __m256i place = (__m256i)(v.p[i] >> bit); /* three bits choose in a half, and the fourth between them */
    const float_part lower = _mm256_permutevar8x32_ps(table.half[0], place);
    const float_part upper = _mm256_permutevar8x32_ps(table.half[1], place);
    r.p[i] = _mm256_blendv_ps(lower, upper, (float_part)(v.p[i] << (28 - bit)));
  }
  return r;
}
#elif defined(WITH_NEON)
typedef uint8x16x4_t levels;
INLINE levels load_levels(const float *at) {
  levels table;
  memcpy(&table, at, sizeof table);
  return table;
}
INLINE floats level_of(levels table, units v, const int bit) {
  floats r;
  EACH_PART { /* four bytes each */
    const bits_part bytes = ((v.p[i] >> bit) & 15) * 0x04040404u + 0x03020100u;
    r.p[i] = (float_part)vqtbl4q_u8(table, (uint8x16_t)bytes);
  }
  return r;
}
#else
typedef const float *levels;
INLINE levels load_levels(const float *at) { return at; }
INLINE floats level_of(levels table, units v, const int bit) {
  floats r;
  EACH_PART for (int lane = 0; lane < PART; lane++) r.p[i][lane] = table[(v.p[i][lane] >> bit) & 15];
  return r;
}
#endif
#ifdef WITH_NEON
/* sum + the products of four signed bytes of w and four of x. */
INLINE units add_signed_dot(units sum, units w, units x) {
  EACH_PART {
    const int8x16_t a = (int8x16_t)w.p[i], b = (int8x16_t)x.p[i];
#ifdef __ARM_FEATURE_DOTPROD
    sum.p[i] = (bits_part)vdotq_s32((int32x4_t)sum.p[i], a, b);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
    sum.p[i] += (bits_part)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
  }
  return sum;
}
#endif
/* sum + the products of four bytes of w, below 64, and four signed bytes of x; with WITH_HALVES two of them in each half of a
   unit (`steps_of_halves`). */
INLINE units add_dot(units sum, units w, units x) {
#ifdef __AVXVNNI__
  EACH_PART sum.p[i] = (bits_part)_mm256_dpbusd_avx_epi32((__m256i)sum.p[i], (__m256i)w.p[i], (__m256i)x.p[i]);
#elif defined(WITH_HALVES)
  EACH_PART {
    const __m256i two = _mm256_maddubs_epi16((__m256i)w.p[i], (__m256i)x.p[i]);
    sum.p[i] = (bits_part)_mm256_add_epi16((__m256i)sum.p[i], two);
    ADDED_NOW(sum.p[i]);
  }
#elif defined(__ARM_FEATURE_DOTPROD) && defined(WITH_NEON)
  sum = add_signed_dot(sum, w, x);
#elif defined(WITH_NEON)
  EACH_PART {
    const int8x16_t a = (int8x16_t)w.p[i], b = (int8x16_t)x.p[i]; /* two products fit into 16 bits */
    const int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b));
    sum.p[i] = (bits_part)vpadalq_s16((int32x4_t)sum.p[i], pairs);
  }
#else
  EACH_PART for (int byte = 0; byte < 4; byte++) {
    const int_part number = (int_part)((w.p[i] >> (8 * byte)) & 255), other = (int_part)(x.p[i] << (24 - 8 * byte)) >> 24;
    sum.p[i] += (bits_part)(number * other);
  }
#endif
  return sum;
}
#ifdef WITH_HALVES
INLINE units add_halves(units sum, units halves) {
  EACH_PART sum.p[i] += (bits_part)_mm256_madd_epi16((__m256i)halves.p[i], _mm256_set1_epi16(1));
  return sum;
}
#endif
/* sum + the products of any four bytes of w, less BYTE_OFFSET, and of four inputs (`store_byte_inputs`), in BYTE_STEPS: of what
   `bytes_of_step` makes of w, and of a unit of the inputs. */
#if defined(WITH_NEON) && !defined(__ARM_FEATURE_MATMUL_INT8)
enum { BYTE_OFFSET = 128 };
#else
enum { BYTE_OFFSET = 0 };
#endif
INLINE units bytes_of_step(units w, const int step) {
#ifdef WITH_HALVES /* the first and the third in 16 bits each, or the others */
  EACH_PART w.p[i] = step ? (bits_part)_mm256_srli_epi16((__m256i)w.p[i], 8) : w.p[i] & 0x00ff00ffu;
#elif defined(WITH_NEON) && !defined(__ARM_FEATURE_MATMUL_INT8)
  EACH_PART w.p[i] ^= 0x80808080u;
#endif
  (void)step;
  return w;
}
INLINE units add_byte_dot(units sum, units w, units x) {
#ifdef WITH_HALVES
  EACH_PART {
    sum.p[i] += (bits_part)_mm256_madd_epi16((__m256i)w.p[i], (__m256i)x.p[i]);
    ADDED_NOW(sum.p[i]);
  }
  return sum;
#elif !defined(WITH_NEON)
  return add_dot(sum, w, x);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  EACH_PART sum.p[i] = (bits_part)vusdotq_s32((int32x4_t)sum.p[i], (uint8x16_t)w.p[i], (int8x16_t)x.p[i]);
  return sum;
#else
  return add_signed_dot(sum, w, x);
#endif
}
INLINE void store_byte_inputs(byte_input *at, floats v) {
#ifdef WITH_HALVES
  const units made = to_units(v);
  const __m256i one = _mm256_shuffle_epi32((__m256i)made.p[0], 0xd8), two = _mm256_shuffle_epi32((__m256i)made.p[1], 0xd8);
  const __m256i all = _mm256_packs_epi32(one, two); /* it packs each half of a register */
  _mm256_storeu_si256((__m256i *)at, _mm256_permute4x64_epi64(all, 0xd8));
#else
  store_bytes(at, v);
#endif
}
#ifdef WITH_BYTE_DOTS
/* sum + the products of four signed bytes of keys, as `key_bytes` makes them, and of x; and KEY_OFFSET times the bytes of x. */
#ifdef WITH_NEON
enum { KEY_OFFSET = 0 };
INLINE units key_bytes(units v) { return v; }
INLINE units add_key_dot(units sum, units keys, units x) { return add_signed_dot(sum, keys, x); }
#else
enum { KEY_OFFSET = 128 };
INLINE units key_bytes(units v) {
  EACH_PART v.p[i] ^= 0x80808080u;
  return v;
}
INLINE units add_key_dot(units sum, units keys, units x) { return add_dot(sum, keys, x); }
#endif
#endif
INLINE units or_units(units a, units b) {
  EACH_PART a.p[i] |= b.p[i];
  return a;
}
/* Bits of each byte that a mask chooses after a shift up, or down where that is negative; none may cross bytes. */
INLINE units chosen_bits(units v, const int up, const uint8_t mask) {
  EACH_PART v.p[i] = (up < 0 ? v.p[i] >> -up : v.p[i] << up) & (0x01010101u * mask);
  return v;
}
/* Sixteen float16 numbers, none infinite. */
INLINE floats load_half(const void *at) {
  floats r;
#if defined(WITH_AVX2) && defined(__F16C__)
  EACH_PART r.p[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const char *)at + 2 * PART * i)));
#elif defined(WITH_NEON)
  EACH_PART r.p[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)at + PART * i)));
#else
  EACH_PART {
    const bits_part half = __builtin_convertvector(*(const half_part_at *)((const char *)at + 2 * PART * i), bits_part);
    const float_part size = (float_part)((half & 0x7fff) << 13) * splat_part(0x1p112f);
    r.p[i] = (float_part)((bits_part)size | (half & 0x8000) << 16);
  }
#endif
  return r;
}
/* One of the two bfloat16 numbers of each unit. */
INLINE floats one_of_two(units v, const int number) {
  floats r;
#ifdef WITH_AVX2 /* the mask is read from memory, since sums need registers */
  static const uint32_t upper[PART] __attribute__((aligned(4 * PART))) = {UPPER, UPPER, UPPER, UPPER, UPPER, UPPER, UPPER, UPPER};
  if (number) {
    EACH_PART __asm__("vpand %2, %1, %0" : "=x"(r.p[i]) : "x"(v.p[i]), "m"(upper));
    return r;
  }
#endif
  EACH_PART r.p[i] = (float_part)(number ? v.p[i] & UPPER : v.p[i] << 16);
  return r;
}

#ifdef WITH_AVX2
/* The columns of a part of eight values: halves of rows four apart beside one another, then pairs, then pairs of pairs. */
INLINE void exchange_square(const units *from, const int part, bits_part *to) {
  __m256 pair[PART];
#pragma GCC unroll 4
  for (int row = 0; row < 4; row++)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const float *upper = (const float *)(from + row) + PART * part + 4 * half, *lower = upper + 4 * LANES;
      pair[2 * row + half] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(upper)), _mm_loadu_ps(lower), 1);
    }
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    const __m256d ab = (__m256d)_mm256_unpacklo_ps(pair[half], pair[2 + half]);
    const __m256d ba = (__m256d)_mm256_unpackhi_ps(pair[half], pair[2 + half]);
    const __m256d cd = (__m256d)_mm256_unpacklo_ps(pair[4 + half], pair[6 + half]);
    const __m256d dc = (__m256d)_mm256_unpackhi_ps(pair[4 + half], pair[6 + half]);
    to[4 * half] = (bits_part)_mm256_unpacklo_pd(ab, cd);
    to[4 * half + 1] = (bits_part)_mm256_unpackhi_pd(ab, cd);
    to[4 * half + 2] = (bits_part)_mm256_unpacklo_pd(ba, dc);
    to[4 * half + 3] = (bits_part)_mm256_unpackhi_pd(ba, dc);
  }
}
#endif

/* Sixteen values of sixteen units, their rows and columns exchanged: four by four units at a time. */
static inline void exchange(units *r) {
#ifdef WITH_NEON
  units t[LANES];
  for (int i = 0; i < PARTS; i++)
    for (int j = 0; j < PARTS; j++) {
      const uint32x4_t a = r[4 * i].p[j], b = r[4 * i + 1].p[j], c = r[4 * i + 2].p[j], d = r[4 * i + 3].p[j];
      const uint64x2_t ab = (uint64x2_t)vtrn1q_u32(a, b), ba = (uint64x2_t)vtrn2q_u32(a, b);
      const uint64x2_t cd = (uint64x2_t)vtrn1q_u32(c, d), dc = (uint64x2_t)vtrn2q_u32(c, d);
      t[4 * j].p[i] = (bits_part)vtrn1q_u64(ab, cd);
      t[4 * j + 1].p[i] = (bits_part)vtrn1q_u64(ba, dc);
      t[4 * j + 2].p[i] = (bits_part)vtrn2q_u64(ab, cd);
      t[4 * j + 3].p[i] = (bits_part)vtrn2q_u64(ba, dc);
    }
  memcpy(r, t, sizeof t);
#elif defined(WITH_AVX2) /* four squares of 8 x 8, of which two change places */
  bits_part first[PART], other[PART];
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    exchange_square(r + PART * i, i, first);
#pragma GCC unroll 8
    for (int row = 0; row < PART; row++) r[PART * i + row].p[i] = first[row];
  }
  exchange_square(r, 1, first);
  KEPT(first); /* sixteen are more than registers hold */
  exchange_square(r + PART, 0, other);
#pragma GCC unroll 8
  for (int row = 0; row < PART; row++) r[row].p[1] = other[row];
#pragma GCC unroll 8
  for (int row = 0; row < PART; row++) r[PART + row].p[0] = first[row];
#else
  typedef uint32_t four __attribute__((vector_size(16)));
  uint32_t from[LANES][LANES], to[LANES][LANES];
  memcpy(from, r, sizeof from);
  for (int i = 0; i < LANES; i += 4)
    for (int j = 0; j < LANES; j += 4) {
      four a, b, c, d;
      memcpy(&a, &from[i][j], sizeof a);
      memcpy(&b, &from[i + 1][j], sizeof b);
      memcpy(&c, &from[i + 2][j], sizeof c);
      memcpy(&d, &from[i + 3][j], sizeof d);
      const four ab = {a[0], b[0], a[1], b[1]}, ba = {a[2], b[2], a[3], b[3]};
      const four cd = {c[0], d[0], c[1], d[1]}, dc = {c[2], d[2], c[3], d[3]};
      const four w = {ab[0], ab[1], cd[0], cd[1]}, x = {ab[2], ab[3], cd[2], cd[3]};
      const four y = {ba[0], ba[1], dc[0], dc[1]}, z = {ba[2], ba[3], dc[2], dc[3]};
      memcpy(&to[j][i], &w, sizeof w);
      memcpy(&to[j + 1][i], &x, sizeof x);
      memcpy(&to[j + 2][i], &y, sizeof y);
      memcpy(&to[j + 3][i], &z, sizeof z);
    }
  memcpy(r, to, sizeof to);
#endif
}

/* Two rows of 32 bfloat16 numbers, the two of one column side by side in a unit: the first sixteen columns, and the
   others. */
INLINE void pair_up(units *into, const bfloat16 *one, const bfloat16 *two) {
#ifdef WITH_NEON
  for (int i = 0; i < PARTS; i++) {
    const uint16x8_t even = vld1q_u16(one + 2 * PART * i), odd = vld1q_u16(two + 2 * PART * i);
    into[i / 2].p[i % 2 * 2] = (bits_part)vzip1q_u16(even, odd);
    into[i / 2].p[i % 2 * 2 + 1] = (bits_part)vzip2q_u16(even, odd);
  }
#else
  for (int half = 0; half < 2; half++)
    EACH_PART {
      const half_part low = *(const half_part_at *)(one + LANES * half + PART * i);
      const half_part high = *(const half_part_at *)(two + LANES * half + PART * i);
      into[half].p[i] = __builtin_convertvector(low, bits_part) | (__builtin_convertvector(high, bits_part) << 16);
    }
#endif
}
