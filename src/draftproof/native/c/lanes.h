/* Sixteen float32 lanes as one value, on whatever vectors the compiler may use.

   With AVX-512 a value is one register and every function is one instruction or two. Elsewhere it is a few smaller vectors
   (two with AVX2, four otherwise), written with the vector types that GCC and Clang share, so that the same source serves
   any processor. Code that uses these functions does not ask which of the two it got, except for the number of values
   that fit into registers (TILE_ROWS and the like, below). */

#ifndef DRAFTPROOF_LANES_H
#define DRAFTPROOF_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define WITH_AVX512
#endif
#ifdef __AVX512BF16__
#define WITH_BF16
#endif
#ifdef EMULATE_AVX512 /* scripts/check_native.py tests the code below on processors without AVX-512 */
#include "emulate.h"
#elif defined(WITH_AVX512) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif
#ifdef EMULATE_AMX
#include "emulate_tiles.h"
#elif defined(WITH_AVX512) && defined(WITH_BF16) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define WITH_AMX
#endif

#if defined(WITH_AVX512) && (defined(WIDE_PRODUCTS) || !defined(WITH_BF16))
#define WITH_WIDE /* products of bfloat16 numbers are made of float32 ones */
#endif

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };
typedef uint16_t bfloat16; /* the upper half of a float32 */

#ifdef WITH_AVX512

enum {
  TILE_ROWS = 12,         /* rows whose sums with one block of outputs stay in registers */
  TILE_ROWS_OF_TWO = 12,  /* the same with two blocks */
  TILE_ROWS_OF_THREE = 8, /* the same with three */
  TILE_ROWS_OF_FOUR = 6,  /* the same with four */
  QUANTIZED_BLOCKS = 4,   /* blocks of quantized weights beside one another, for one row */
  TOGETHER = 6,           /* queries that attend at once */
  ROWS_TOGETHER = 6,      /* rows that a plain weight multiplies at once */
  OUTS_OF_ONE = 8,        /* its outputs at once, for one row */
  INPUTS_TOGETHER = 8,    /* units of its inputs at once, where it is across */
  WIDE = 4                /* times sixteen dimensions of their outputs at once */
};

typedef __m512 floats;
typedef __m512i units; /* sixteen times four bytes: a float32, or two bfloat16 */

/* The first `count` lanes; none if it is 0 or less. */
INLINE __mmask16 first_lanes(long count) {
  return count >= LANES ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}

INLINE floats splat(float v) { return _mm512_set1_ps(v); }
INLINE floats add(floats a, floats b) { return _mm512_add_ps(a, b); }
INLINE floats sub(floats a, floats b) { return _mm512_sub_ps(a, b); }
INLINE floats mul(floats a, floats b) { return _mm512_mul_ps(a, b); }
INLINE floats quotient(floats a, floats b) { return _mm512_div_ps(a, b); }
INLINE floats multiply_add(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE floats subtract_product(floats a, floats b, floats c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE floats larger(floats a, floats b) { return _mm512_max_ps(a, b); }
INLINE floats smaller(floats a, floats b) { return _mm512_min_ps(a, b); }
INLINE floats where_below(floats a, floats b, floats then, floats otherwise) {
  return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), then);
}
INLINE floats nearest(floats v) {
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE floats times_power(floats v, floats whole) { return _mm512_scalef_ps(v, whole); }
/* v bounded to where e^v can differ: below -110 it is 0 in float32. NaN stays NaN. */
INLINE floats bounded_exponent(floats v) { return _mm512_max_ps(_mm512_set1_ps(-110.0f), v); }
INLINE floats first_of(long count, floats a, floats b) { return _mm512_mask_mov_ps(b, first_lanes(count), a); }
INLINE float sum_of(floats v) { return _mm512_reduce_add_ps(v); }
INLINE float largest_of(floats v) { return _mm512_reduce_max_ps(v); }
INLINE int any_not_below(long count, floats v, floats bound) {
  return _mm512_mask_cmp_ps_mask(first_lanes(count), v, bound, _CMP_NLT_UQ) != 0;
}
INLINE int any_not_zero(long count, floats v) {
  return _mm512_mask_cmp_ps_mask(first_lanes(count), v, _mm512_setzero_ps(), _CMP_NEQ_UQ) != 0;
}

INLINE floats load_float(const float *at) { return _mm512_loadu_ps(at); }
INLINE floats load_first_float(const float *at, long count) { return _mm512_maskz_loadu_ps(first_lanes(count), at); }
INLINE void store_float(float *at, floats v) { _mm512_storeu_ps(at, v); }
INLINE void store_first_float(float *at, long count, floats v) { _mm512_mask_storeu_ps(at, first_lanes(count), v); }

INLINE floats widened(__m256i given) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(given), 16));
}
#ifdef WITH_BF16
INLINE __m256i narrowed(floats v) { return (__m256i)_mm512_cvtneps_pbh(v); }
#else
INLINE __m256i narrowed(floats v) {
  const __m512i bits = _mm512_castps_si512(v), one = _mm512_set1_epi32(1);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  const __m512i up = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(up, is_nan, _mm512_set1_epi32(0x7fc0)));
}
#endif
INLINE floats load_bfloat16(const bfloat16 *at) { return widened(_mm256_loadu_si256((const __m256i *)at)); }
INLINE floats load_first_bfloat16(const bfloat16 *at, long count) {
  return widened(_mm256_maskz_loadu_epi16(first_lanes(count), at));
}
INLINE void store_bfloat16(bfloat16 *at, floats v) { _mm256_storeu_si256((__m256i *)at, narrowed(v)); }
INLINE void store_first_bfloat16(bfloat16 *at, long count, floats v) {
  _mm256_mask_storeu_epi16(at, first_lanes(count), narrowed(v));
}
INLINE floats rounded_bfloat16(floats v) { return widened(narrowed(v)); }

INLINE units load_units(const void *at) { return _mm512_loadu_si512(at); }
INLINE units splat_unit(const void *at) {
  int32_t unit;
  memcpy(&unit, at, sizeof unit);
  return _mm512_set1_epi32(unit);
}
INLINE floats add_product_float(floats sum, units w, units x) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), sum);
}
#ifndef WITH_WIDE
INLINE floats add_product_bfloat16(floats sum, units w, units x) {
  return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
}
#else
INLINE floats add_product_bfloat16(floats sum, units w, units x) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
  sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                        sum);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(w, upper)),
                         _mm512_castsi512_ps(_mm512_and_si512(x, upper)), sum);
}
#endif

/* Whole numbers, as units. */
INLINE units no_units(void) { return _mm512_setzero_si512(); }
INLINE units add_units(units a, units b) { return _mm512_add_epi32(a, b); }
INLINE units shifted_up(units v, int bits) { return _mm512_sll_epi32(v, _mm_cvtsi32_si128(bits)); }
INLINE units to_units(floats v) { return _mm512_cvtps_epi32(v); }
INLINE floats from_units(units v) { return _mm512_cvtepi32_ps(v); }
INLINE void store_units(void *at, units v) { _mm512_storeu_si512(at, v); }
INLINE void store_bytes(int8_t *at, floats v) { _mm_storeu_si128((__m128i *)at, _mm512_cvtepi32_epi8(to_units(v))); }
INLINE floats load_signed_bytes(const int8_t *at) {
  return from_units(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
}
INLINE floats load_bytes(const uint8_t *at) {
  return from_units(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at)));
}
/* Each byte's lower and upper half. */
INLINE units lower_halves(units v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
INLINE units upper_halves(units v) { return lower_halves(_mm512_srli_epi32(v, 4)); }
/* A quarter of each byte, 0 being the lowest. */
INLINE units quarters(units v, const int number) {
  return _mm512_and_si512(_mm512_srli_epi32(v, 2 * number), _mm512_set1_epi8(3));
}
/* sum + the products of four bytes of w, from 0 to 15, and four signed bytes of x. */
INLINE units add_dot(units sum, units w, units x) {
#if defined(__AVX512VNNI__) && !defined(EMULATE_AVX512)
  return _mm512_dpbusd_epi32(sum, w, x);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)));
#endif
}
/* The same with any bytes of w. */
INLINE units add_byte_dot(units sum, units w, units x) {
#if defined(__AVX512VNNI__) && !defined(EMULATE_AVX512)
  return _mm512_dpbusd_epi32(sum, w, x);
#else
  return add_units(add_dot(sum, lower_halves(w), x), shifted_up(add_dot(no_units(), upper_halves(w), x), 4));
#endif
}
INLINE units or_units(units a, units b) { return _mm512_or_si512(a, b); }
/* Bits of each byte that a mask chooses after a shift up, or down where that is negative; none may cross bytes. */
INLINE units chosen_bits(units v, const int up, const uint8_t mask) {
  const units shifted = up < 0 ? _mm512_srli_epi32(v, (unsigned)-up) : _mm512_slli_epi32(v, (unsigned)up);
  return _mm512_and_si512(shifted, _mm512_set1_epi8((char)mask));
}
INLINE floats load_half(const void *at) { return _mm512_cvtph_ps(_mm256_loadu_si256(at)); }
/* One of the two bfloat16 numbers of each unit. */
INLINE floats one_of_two(units v, const int number) {
  return _mm512_castsi512_ps(number ? _mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)) : _mm512_slli_epi32(v, 16));
}
INLINE void spread_bfloat16(floats *into, const void *at) {
  const units v = load_units(at);
  into[0] = one_of_two(v, 0);
  into[1] = one_of_two(v, 1);
}

/* Sixteen values of sixteen units, their rows and columns exchanged. */
static inline void exchange(units *r) {
  units t[LANES];
  for (int i = 0; i < LANES; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    const units even = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), odd = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    const units even_too = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    const units odd_too = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    t[i] = _mm512_shuffle_i32x4(even, even_too, 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(odd, odd_too, 0x88);
    t[8 + i] = _mm512_shuffle_i32x4(even, even_too, 0xdd);
    t[12 + i] = _mm512_shuffle_i32x4(odd, odd_too, 0xdd);
  }
  for (int i = 0; i < LANES; i++) r[i] = t[i];
}

/* Two rows of 32 bfloat16 numbers, the two of one column side by side in a unit: the first sixteen columns, and the
   others. */
INLINE void pair_up(units *into, const bfloat16 *one, const bfloat16 *two) {
  const units low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                     36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const units high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const units even = _mm512_loadu_si512(one), odd = _mm512_loadu_si512(two);
  into[0] = _mm512_permutex2var_epi16(even, low, odd);
  into[1] = _mm512_permutex2var_epi16(even, high, odd);
}

#else /* smaller vectors */

#if defined(__AVX2__) && defined(__FMA__)
enum { PART = 8, TILE_ROWS = 4, TILE_ROWS_OF_TWO = 2, TILE_ROWS_OF_THREE = 0, TILE_ROWS_OF_FOUR = 1, QUANTIZED_BLOCKS = 2, TOGETHER = 3, WIDE = 2, ROWS_TOGETHER = 2, OUTS_OF_ONE = 4, INPUTS_TOGETHER = 4 };
#else
enum { PART = 4, TILE_ROWS = 4, TILE_ROWS_OF_TWO = 2, TILE_ROWS_OF_THREE = 0, TILE_ROWS_OF_FOUR = 0, QUANTIZED_BLOCKS = 2, TOGETHER = 2, WIDE = 2, ROWS_TOGETHER = 2, OUTS_OF_ONE = 4, INPUTS_TOGETHER = 2 };
#endif
enum { PARTS = LANES / PART };

typedef float float_part __attribute__((vector_size(4 * PART)));
typedef int32_t int_part __attribute__((vector_size(4 * PART)));
typedef uint32_t bits_part __attribute__((vector_size(4 * PART)));
typedef uint16_t half_part __attribute__((vector_size(2 * PART)));
/* The same anywhere in memory: read part by part, since a struct that is copied whole goes through the stack. */
typedef float float_part_at __attribute__((vector_size(4 * PART), aligned(4), may_alias));
typedef uint32_t bits_part_at __attribute__((vector_size(4 * PART), aligned(2), may_alias));
typedef uint16_t half_part_at __attribute__((vector_size(2 * PART), aligned(2), may_alias));
typedef struct {
  float_part p[PARTS];
} floats;
typedef struct {
  bits_part p[PARTS];
} units;

#define EACH_PART _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++)

INLINE float_part splat_part(float v) { return (float_part){0} + v; }
INLINE int_part number_part(int i) { /* the lanes' numbers */
#if defined(__AVX2__) && defined(__FMA__)
  return (int_part){0, 1, 2, 3, 4, 5, 6, 7} + PART * i;
#else
  return (int_part){0, 1, 2, 3} + PART * i;
#endif
}
INLINE float_part choose(int_part which, float_part a, float_part b) {
  return (float_part)(((int_part)a & which) | ((int_part)b & ~which));
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
#if defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
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
#if defined(__AVX2__) && defined(__FMA__)
  EACH_PART a.p[i] = _mm256_max_ps(a.p[i], b.p[i]);
#else
  EACH_PART a.p[i] = choose(a.p[i] > b.p[i], a.p[i], b.p[i]);
#endif
  return a;
}
INLINE floats smaller(floats a, floats b) { /* b where they cannot be compared, as in _mm512_min_ps */
  EACH_PART a.p[i] = choose(a.p[i] < b.p[i], a.p[i], b.p[i]);
  return a;
}
INLINE floats where_below(floats a, floats b, floats then, floats otherwise) {
  EACH_PART then.p[i] = choose(a.p[i] < b.p[i], then.p[i], otherwise.p[i]);
  return then;
}
enum { MAGIC_BITS = 0x4b400000 }; /* of 1.5 * 2^23: added to a float32 below 2^22 it leaves the nearest whole number */
INLINE floats nearest(floats v) {
  EACH_PART v.p[i] = (v.p[i] + splat_part(12582912.0f)) - splat_part(12582912.0f);
  return v;
}
/* v 2^whole, |whole| below 2^22; in two steps, so that what float32 holds only as a subnormal number is rounded once. */
INLINE floats times_power(floats v, floats whole) {
  EACH_PART {
    float_part bounded = choose(whole.p[i] > splat_part(-252.0f), whole.p[i], splat_part(-252.0f));
    bounded = choose(bounded < splat_part(252.0f), bounded, splat_part(252.0f));
    const int_part exponent = (int_part)(bounded + splat_part(12582912.0f)) - MAGIC_BITS;
    const int_part half = exponent >> 1;
    v.p[i] = v.p[i] * (float_part)((half + 127) << 23) * (float_part)((exponent - half + 127) << 23);
  }
  return v;
}
/* v bounded to where e^v can differ: below -110 it is 0 in float32, above 130 infinite. NaN stays NaN. */
INLINE floats bounded_exponent(floats v) {
  EACH_PART {
    v.p[i] = choose(v.p[i] < splat_part(-110.0f), splat_part(-110.0f), v.p[i]);
    v.p[i] = choose(v.p[i] > splat_part(130.0f), splat_part(130.0f), v.p[i]);
  }
  return v;
}
/* a in the first `count` lanes, b in the others. */
INLINE floats first_of(long count, floats a, floats b) {
  const int most = count < 0 ? 0 : count > LANES ? LANES : (int)count;
  EACH_PART a.p[i] = choose(number_part(i) < (int_part){0} + most, a.p[i], b.p[i]);
  return a;
}
INLINE float sum_of(floats v) {
  float_part part = v.p[0];
  for (int i = 1; i < PARTS; i++) part += v.p[i];
  float sum = 0;
  for (int lane = 0; lane < PART; lane++) sum += part[lane];
  return sum;
}
INLINE float largest_of(floats v) {
  float top = v.p[0][0];
  for (int i = 0; i < PARTS; i++)
    for (int lane = 0; lane < PART; lane++) top = top > v.p[i][lane] ? top : v.p[i][lane];
  return top;
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
  EACH_PART {
    const half_part half = *(const half_part_at *)(at + PART * i);
    r.p[i] = (float_part)(__builtin_convertvector(half, bits_part) << 16);
  }
  return r;
}
INLINE floats load_first_bfloat16(const bfloat16 *at, long count) {
  if (count >= LANES) return load_bfloat16(at);
  bfloat16 all[LANES] = {0};
  if (count > 0) memcpy(all, at, (size_t)count * sizeof *at);
  return load_bfloat16(all);
}
INLINE bits_part narrowed_part(float_part v) { /* to the nearest, ties to even; NaN stays NaN */
  const bits_part bits = (bits_part)v, up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (bits_part)choose(v == v, (float_part)up, (float_part)((bits_part){0} + 0x7fc0));
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
#if defined(__AVX2__) && defined(__FMA__)
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
  EACH_PART {
    sum.p[i] = multiply_add_part((float_part)(w.p[i] << 16), (float_part)(x.p[i] << 16), sum.p[i]);
    sum.p[i] = multiply_add_part((float_part)(w.p[i] & 0xffff0000u), (float_part)(x.p[i] & 0xffff0000u), sum.p[i]);
  }
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
INLINE void store_bytes(int8_t *at, floats v) {
  const units made = to_units(v);
  EACH_PART for (int lane = 0; lane < PART; lane++) at[PART * i + lane] = (int8_t)made.p[i][lane];
}
INLINE floats load_signed_bytes(const int8_t *at) {
  floats r;
  EACH_PART for (int lane = 0; lane < PART; lane++) r.p[i][lane] = at[PART * i + lane];
  return r;
}
INLINE floats load_bytes(const uint8_t *at) {
  floats r;
  EACH_PART for (int lane = 0; lane < PART; lane++) r.p[i][lane] = at[PART * i + lane];
  return r;
}
/* Each byte's lower and upper half. */
INLINE units lower_halves(units v) {
  EACH_PART v.p[i] &= 0x0f0f0f0fu;
  return v;
}
INLINE units upper_halves(units v) {
  EACH_PART v.p[i] = (v.p[i] >> 4) & 0x0f0f0f0fu;
  return v;
}
/* A quarter of each byte, 0 being the lowest. */
INLINE units quarters(units v, const int number) {
  EACH_PART v.p[i] = (v.p[i] >> (2 * number)) & 0x03030303u;
  return v;
}
/* sum + the products of four bytes of w, from 0 to 15, and four signed bytes of x. */
INLINE units add_dot(units sum, units w, units x) {
#if defined(__AVX2__) && defined(__FMA__)
  EACH_PART {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)w.p[i], (__m256i)x.p[i]);
    sum.p[i] += (bits_part)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
#else
  EACH_PART for (int byte = 0; byte < 4; byte++) {
    const int_part number = (int_part)((w.p[i] >> (8 * byte)) & 255), other = (int_part)(x.p[i] << (24 - 8 * byte)) >> 24;
    sum.p[i] += (bits_part)(number * other);
  }
#endif
  return sum;
}
/* The same with any bytes of w. */
INLINE units add_byte_dot(units sum, units w, units x) {
  return add_units(add_dot(sum, lower_halves(w), x), shifted_up(add_dot(no_units(), upper_halves(w), x), 4));
}
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
#if defined(__AVX2__) && defined(__F16C__)
  EACH_PART r.p[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const char *)at + 2 * PART * i)));
#else
  EACH_PART {
    const bits_part half = __builtin_convertvector(*(const half_part_at *)((const char *)at + 2 * PART * i), bits_part);
    const float_part size = (float_part)((half & 0x7fff) << 13) * splat_part(0x1p112f);
    r.p[i] = (float_part)((bits_part)size | (half & 0x8000) << 16);
  }
#endif
  return r;
}
/* Two bfloat16 numbers of each unit. */
INLINE void spread_bfloat16(floats *into, const void *at) {
  const units v = load_units(at);
  EACH_PART into[0].p[i] = (float_part)(v.p[i] << 16);
  EACH_PART into[1].p[i] = (float_part)(v.p[i] & 0xffff0000u);
}

/* Sixteen values of sixteen units, their rows and columns exchanged: four by four units at a time. */
static inline void exchange(units *r) {
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
}

/* Two rows of 32 bfloat16 numbers, the two of one column side by side in a unit: the first sixteen columns, and the
   others. */
INLINE void pair_up(units *into, const bfloat16 *one, const bfloat16 *two) {
  for (int half = 0; half < 2; half++)
    EACH_PART {
      const half_part low = *(const half_part_at *)(one + LANES * half + PART * i);
      const half_part high = *(const half_part_at *)(two + LANES * half + PART * i);
      into[half].p[i] = __builtin_convertvector(low, bits_part) | (__builtin_convertvector(high, bits_part) << 16);
    }
}

#endif

INLINE floats zeros(void) { return splat(0); }
/* A float16 number, not infinite. */
INLINE float half_value(uint16_t half) {
  const uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
  float size;
  memcpy(&size, &bits, sizeof size);
  return half & 0x8000 ? -(size * 0x1p112f) : size * 0x1p112f;
}
INLINE float bfloat16_value(bfloat16 upper) {
  const uint32_t bits = (uint32_t)upper << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
INLINE void spread_float(floats *into, const void *at) { into[0] = load_float(at); }

/* Sixteen lanes' sums of sixteen vectors. */
INLINE floats sums_of_each(const floats *each) {
  units turned[LANES];
  floats made[LANES];
  memcpy(turned, each, sizeof turned);
  exchange(turned);
  memcpy(made, turned, sizeof made);
#pragma GCC unroll 4
  for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; i++) made[i] = add(made[i], made[i + half]);
  return made[0];
}

/* e^v, to two units in the last place; 0 below what float32 holds, and NaN stays NaN. */
INLINE floats exponential(floats v) {
  v = bounded_exponent(v);
  const floats whole = nearest(mul(v, splat(1.44269504f)));
  floats part = subtract_product(whole, splat(0.693145752f), v);
  part = subtract_product(whole, splat(1.42860677e-6f), part);
  floats sum = splat(1.0f / 720);
  sum = multiply_add(sum, part, splat(1.0f / 120));
  sum = multiply_add(sum, part, splat(1.0f / 24));
  sum = multiply_add(sum, part, splat(1.0f / 6));
  sum = multiply_add(sum, part, splat(0.5f));
  sum = multiply_add(sum, part, splat(1.0f));
  sum = multiply_add(sum, part, splat(1.0f));
  return times_power(sum, whole);
}

#endif
