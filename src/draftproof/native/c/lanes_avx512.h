/* Sixteen lanes as one register (lanes.h). */

enum {
  TILE_ROWS = 12,         /* rows whose sums with one block of outputs stay in registers */
  TILE_ROWS_OF_TWO = 12,  /* the same with two blocks */
  TILE_ROWS_OF_THREE = 8, /* the same with three */
  TILE_ROWS_OF_FOUR = 6,  /* the same with four */
  NARROW_ROWS = 0,        /* rows of bfloat16 that are not widened first (wide_products.h) */
  QUANTIZED_ROWS = 8,     /* rows that a quantized weight multiplies at once */
  QUANTIZED_BLOCKS = 4,   /* blocks of quantized weights beside one another, for one row */
  ONE_SUM = 0,            /* whether several rows have one sum for each output, for want of registers */
  TOGETHER = 6,           /* queries that attend at once */
  TOGETHER_OF_TWO = 6,    /* the same with two vectors of sums, or WIDE, for each */
  ROWS_TOGETHER = 6,      /* rows that a plain weight multiplies at once */
  OUTS_OF_ONE = 8,        /* its outputs at once, for one row */
  INPUTS_TOGETHER = 8,    /* units of its inputs at once, where it is across */
  WIDE = 4,               /* times sixteen dimensions of their outputs at once */
  TAKEN = 4               /* times sixteen values, widened to float32, that are in registers at once */
};

/* Tiles of a product, by rows and by blocks of outputs. */
#define TILES_OF(DO, m) DO(m, 1) DO(m, 2)
#define PRODUCT_TILES(DO) \
  TILES_OF(DO, 1) TILES_OF(DO, 2) TILES_OF(DO, 3) TILES_OF(DO, 4) TILES_OF(DO, 5) TILES_OF(DO, 6) TILES_OF(DO, 7) \
  TILES_OF(DO, 8) TILES_OF(DO, 9) TILES_OF(DO, 10) TILES_OF(DO, 11) TILES_OF(DO, 12) DO(6, 3) DO(7, 3) DO(8, 3) \
  DO(1, 4) DO(2, 4) DO(3, 4) DO(4, 4) DO(5, 4) DO(6, 4)
#define QUANTIZED_TILES(DO, bits) \
  DO(1, 1, bits) DO(2, 1, bits) DO(3, 1, bits) DO(4, 1, bits) DO(5, 1, bits) DO(6, 1, bits) DO(7, 1, bits) DO(8, 1, bits) \
  DO(1, 2, bits) DO(1, 4, bits)

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
INLINE floats load_apart_bfloat16(const bfloat16 *at) { return load_bfloat16(at); } /* as in lanes_parts.h */
INLINE floats in_order_bfloat16(floats v) { return v; }
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
INLINE units shifted_down(units v, const int bits) { return bits ? _mm512_srai_epi32(v, (unsigned)bits) : v; } /* with the sign */
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
/* One of the four signed bytes of each unit, as float32. */
INLINE floats signed_byte(units v, const int number) {
  return from_units(_mm512_srai_epi32(_mm512_slli_epi32(v, (unsigned)(24 - 8 * number)), 24));
}
/* Two bfloat16 numbers in each unit, of float32 ones that are no more. */
INLINE units paired_bfloat16(floats a, floats b) {
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(a), 16), _mm512_castps_si512(b));
}
/* Each byte's lower and upper half. */
INLINE units lower_halves(units v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
INLINE units less_in_bytes(units v, uint8_t less) { return _mm512_sub_epi8(v, _mm512_set1_epi8((char)less)); }
INLINE units upper_halves(units v) { return lower_halves(_mm512_srli_epi32(v, 4)); }
/* Of sixteen bytes the one whose place each byte is. */
INLINE units looked_up(const uint8_t *table, units places) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), places);
}
/* A quarter of each byte, 0 being the lowest. */
INLINE units quarters(units v, const int number) {
  return _mm512_and_si512(_mm512_srli_epi32(v, 2 * number), _mm512_set1_epi8(3));
}
/* Sixteen floats, of which each unit's four bits from some bit on choose one. */
typedef __m512 levels;
INLINE levels load_levels(const float *at) { return _mm512_loadu_ps(at); }
INLINE floats level_of(levels table, units v, const int bit) {
  return _mm512_permutexvar_ps(_mm512_srli_epi32(v, (unsigned)bit), table);
}
/* sum + the products of four bytes of w, below 64, and four signed bytes of x; with WITH_HALVES two of them in each half of a
   unit (`steps_of_halves`). And those of any four bytes of w, less BYTE_OFFSET, and of four inputs (`store_byte_inputs`), in
   BYTE_STEPS: of what `bytes_of_step` makes of w, and of a unit of the inputs. */
enum { BYTE_OFFSET = 0 };
#ifndef WITH_HALVES
INLINE units add_dot(units sum, units w, units x) { return _mm512_dpbusd_epi32(sum, w, x); }
INLINE units bytes_of_step(units w, const int step) { return (void)step, w; }
INLINE units add_byte_dot(units sum, units w, units x) { return add_dot(sum, w, x); }
INLINE void store_byte_inputs(byte_input *at, floats v) { store_bytes(at, v); }
#else
INLINE units add_dot(units sum, units w, units x) {
  sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(w, x));
  ADDED_NOW(sum);
  return sum;
}
INLINE units add_halves(units sum, units halves) {
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(halves, _mm512_set1_epi16(1)));
  ADDED_NOW(sum);
  return sum;
}
INLINE units bytes_of_step(units w, const int step) {
  return step ? _mm512_srli_epi16(w, 8) : _mm512_and_si512(w, _mm512_set1_epi16(255));
}
INLINE units add_byte_dot(units sum, units w, units x) {
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(w, x));
  ADDED_NOW(sum);
  return sum;
}
INLINE void store_byte_inputs(byte_input *at, floats v) {
  const units made = _mm512_shuffle_epi32(_mm512_cvtps_epi32(v), 0xd8);
  _mm256_storeu_si256((__m256i *)at, _mm512_cvtepi32_epi16(made));
}
#endif
#ifdef WITH_BYTE_DOTS
/* sum + the products of four signed bytes of keys, as `key_bytes` makes them, and of x; and KEY_OFFSET times the bytes of x. */
enum { KEY_OFFSET = 128 };
INLINE units key_bytes(units v) { return _mm512_xor_si512(v, _mm512_set1_epi8(-128)); }
INLINE units add_key_dot(units sum, units keys, units x) { return _mm512_dpbusd_epi32(sum, keys, x); }
#endif
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
