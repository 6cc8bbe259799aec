/* AVX-512 intrinsics on processors that have none, for scripts/check_native.py: SIMDe (Debian's libsimde-dev), and the few
   that its version 0.7 lacks, by plain loops. */

#ifndef EMULATE_H
#define EMULATE_H

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#define WITH_AVX512
#ifdef EMULATE_BF16
#define WITH_BF16
#endif

#define LOADED(type, name, vector) \
  type name[16];                   \
  memcpy(name, &(vector), sizeof name)
#define EACH for (int i = 0; i < 16; i++)

#undef _mm512_madd_epi16
#define _mm512_madd_epi16 simde_mm512_madd_epi16 /* version 0.7 gives it the arguments of another one */

#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
static inline simde__m512i emulated_cvtepu16_epi32(simde__m256i v) {
  LOADED(uint16_t, from, v);
  uint32_t to[16];
  EACH to[i] = from[i];
  simde__m512i made;
  memcpy(&made, to, sizeof made);
  return made;
}

#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16 emulated_cvtepi32_epi16
static inline simde__m256i emulated_cvtepi32_epi16(simde__m512i v) {
  LOADED(uint32_t, from, v);
  uint16_t to[16];
  EACH to[i] = (uint16_t)from[i];
  simde__m256i made;
  memcpy(&made, to, sizeof made);
  return made;
}

#undef _mm512_cvtneps_pbh
#define _mm512_cvtneps_pbh emulated_cvtneps_pbh
static inline simde__m256i emulated_cvtneps_pbh(simde__m512 v) { /* subnormal numbers become zero, as on hardware */
  LOADED(uint32_t, from, v);
  uint16_t to[16];
  EACH {
    const uint32_t bits = from[i];
    if ((bits & 0x7fffffff) > 0x7f800000)
      to[i] = (uint16_t)(bits >> 16 | 0x40);
    else if ((bits & 0x7f800000) == 0)
      to[i] = (uint16_t)(bits >> 31 << 15);
    else
      to[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  simde__m256i made;
  memcpy(&made, to, sizeof made);
  return made;
}

#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps emulated_maskz_loadu_ps
static inline simde__m512 emulated_maskz_loadu_ps(uint16_t mask, const float *at) {
  float to[16] = {0};
  EACH if (mask >> i & 1) to[i] = at[i];
  simde__m512 made;
  memcpy(&made, to, sizeof made);
  return made;
}

#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps emulated_mask_storeu_ps
static inline void emulated_mask_storeu_ps(float *at, uint16_t mask, simde__m512 v) {
  LOADED(float, from, v);
  EACH if (mask >> i & 1) at[i] = from[i];
}

#undef _mm256_maskz_loadu_epi16
#define _mm256_maskz_loadu_epi16 emulated_maskz_loadu_epi16
static inline simde__m256i emulated_maskz_loadu_epi16(uint16_t mask, const void *at) {
  uint16_t to[16] = {0};
  EACH if (mask >> i & 1) to[i] = ((const uint16_t *)at)[i];
  simde__m256i made;
  memcpy(&made, to, sizeof made);
  return made;
}

#undef _mm256_mask_storeu_epi16
#define _mm256_mask_storeu_epi16 emulated_mask_storeu_epi16
static inline void emulated_mask_storeu_epi16(void *at, uint16_t mask, simde__m256i v) {
  LOADED(uint16_t, from, v);
  EACH if (mask >> i & 1)((uint16_t *)at)[i] = from[i];
}

#undef _mm512_reduce_add_ps
#define _mm512_reduce_add_ps emulated_reduce_add_ps
static inline float emulated_reduce_add_ps(simde__m512 v) {
  LOADED(float, sums, v);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) sums[i] += sums[i + half];
  return sums[0];
}

#undef _mm512_reduce_max_ps
#define _mm512_reduce_max_ps emulated_reduce_max_ps
static inline float emulated_reduce_max_ps(simde__m512 v) {
  LOADED(float, all, v);
  float top = all[0];
  EACH top = top > all[i] ? top : all[i];
  return top;
}

#undef _mm512_mask_cmp_ps_mask
#define _mm512_mask_cmp_ps_mask emulated_mask_cmp_ps_mask
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(a, b, op) emulated_mask_cmp_ps_mask(0xffff, a, b, op)
static inline uint16_t emulated_mask_cmp_ps_mask(uint16_t mask, simde__m512 a, simde__m512 b, int op) {
  LOADED(float, x, a);
  LOADED(float, y, b);
  uint16_t found = 0;
  EACH {
    int holds = 0;
    switch (op) {
      case _CMP_NLT_UQ: holds = !(x[i] < y[i]); break;
      case _CMP_NEQ_UQ: holds = !(x[i] == y[i]); break;
      case _CMP_UNORD_Q: holds = x[i] != x[i] || y[i] != y[i]; break;
      default: __builtin_trap();
    }
    found |= (uint16_t)(holds << i);
  }
  return found & mask;
}

#undef EACH
#undef LOADED

#endif
