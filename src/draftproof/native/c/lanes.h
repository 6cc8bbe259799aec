/* Sixteen float32 lanes as one value, on whatever vectors the compiler may use.

   With AVX-512 a value is one register and every function is one instruction or two (lanes_avx512.h). Elsewhere it is a few
   smaller vectors (two with AVX2, four otherwise), written with the vector types that GCC and Clang share, and with
   intrinsics of AVX2 or of Arm's Neon where these take fewer instructions (lanes_parts.h). So the same source serves any
   processor. Code that uses these functions does not ask which of them it got, except for the number of values that fit
   into registers (TILE_ROWS and the like). */

#ifndef DRAFTPROOF_LANES_H
#define DRAFTPROOF_LANES_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define WITH_AVX512
#endif
#if defined(__AVX512BF16__) || (defined(WITH_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define WITH_BF16
#endif
#if defined(__AVX2__) && defined(__FMA__)
#define WITH_AVX2
#endif
#ifdef EMULATE_AVX512 /* scripts/check_native.py tests the code below on processors without AVX-512 */
#include "emulate.h"
#elif defined(WITH_AVX512) || defined(WITH_AVX2)
#include <immintrin.h>
#elif defined(WITH_NEON) /* defined by build.py */
#include <arm_neon.h>
#endif
#ifdef EMULATE_AMX
#include "emulate_tiles.h"
#elif defined(WITH_AVX512) && defined(WITH_BF16) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define WITH_AMX
#endif

#if defined(WITH_AVX512) ? defined(WIDE_PRODUCTS) || !defined(WITH_BF16) \
                         : defined(WITH_AVX2) || (defined(WITH_NEON) && !defined(WITH_BF16))
#define WITH_WIDE /* products of bfloat16 numbers are made of float32 ones */
#endif

#ifdef _WIN32
#define long long long /* sizes: its own `long` has 32 bits */
#endif
#if (defined(WITH_AVX512) && defined(__AVX512VNNI__) && !defined(EMULATE_AVX512)) || \
    (defined(WITH_NEON) && defined(__ARM_FEATURE_DOTPROD)) || (!defined(WITH_AVX512) && defined(__AVXVNNI__))
#define WITH_BYTE_DOTS /* one instruction adds four products of bytes to each unit */
#elif defined(WITH_AVX512) || defined(WITH_AVX2)
#define WITH_HALVES /* one adds two in 16 bits, and another one the two halves of a unit */
/* A sum is added up before the next product is made: else GCC makes all products first, more than registers hold. */
#ifdef EMULATE_AVX512
#define ADDED_NOW(sum)
#else
#define ADDED_NOW(sum) __asm__("" : "+v"(sum))
#endif
#endif

/* What was read is read once more: GCC would keep it in registers that sums need. */
#ifdef WITH_AVX512
#define READ_AGAIN (void)0
#else
#define READ_AGAIN __asm__ volatile("" ::: "memory")
#endif

/* What was written to an array is in memory, and is read from there: GCC would keep all of it in registers that sums need. */
#define KEPT(array) __asm__ volatile("" : : "r"(array) : "memory")

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };
typedef uint16_t bfloat16; /* the upper half of a float32 */
/* An input that weights of 8 bits are multiplied by, and in how many steps they are. */
#ifdef WITH_HALVES
typedef int16_t byte_input; /* of each four inputs the first and the third, then the others */
enum { BYTE_STEPS = 2 };
#else
typedef int8_t byte_input;
enum { BYTE_STEPS = 1 };
#endif

#ifdef WITH_AVX512
#include "lanes_avx512.h"
#else
#include "lanes_parts.h"
#endif

#ifdef WITH_HALVES
enum { HALVES = 1 };
#else
enum { HALVES = 0 };
#endif
/* What `add_dot` adds to, for a sum that is in units; and that sum with what was added. With WITH_HALVES at most so many times,
   for numbers of so many bits. */
INLINE int steps_of_halves(const int bits) { return 32767 / (2 * 127 * ((1 << bits) - 1)); }
INLINE units opened_dots(units sum) {
#ifdef WITH_HALVES
  (void)sum;
  return no_units();
#else
  return sum;
#endif
}
INLINE units closed_dots(units sum, units dots) {
#ifdef WITH_HALVES
  return add_halves(sum, dots);
#else
  (void)sum;
  return dots;
#endif
}

INLINE floats load_apart_float(const float *at) { return load_float(at); }
INLINE floats in_order_float(floats v) { return v; }
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
INLINE void spread_bfloat16(floats *into, const void *at) {
  const units v = load_units(at);
  for (int number = 0; number < 2; number++) into[number] = one_of_two(v, number);
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
