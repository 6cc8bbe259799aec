/* The matrix unit (AMX) by plain loops, for scripts/check_native.py: on processors that have none, and where sanitizers
   are to see what it reads and writes. */

#ifndef EMULATE_TILES_H
#define EMULATE_TILES_H

#include <stdint.h>
#include <string.h>

#define WITH_AMX

/* Tile registers of a thread, and the instructions on them that are used. Sums of floats are made as the processor makes them:
   those of even and of odd inputs apart, over one instruction's inputs, then both added to what was there. */
static __thread struct {
  uint16_t row_bytes[8];
  uint8_t rows[8];
  unsigned char data[8][16][64];
} tiles;

long draftproof_tile_products; /* how many instructions have multiplied tiles: so a test knows that the unit was used */
static inline void emulated_count(void) { __atomic_fetch_add(&draftproof_tile_products, 1, __ATOMIC_RELAXED); }

static inline void emulated_tile_loadconfig(const void *shapes) {
  memset(&tiles, 0, sizeof tiles);
  memcpy(tiles.row_bytes, (const char *)shapes + 16, sizeof tiles.row_bytes);
  memcpy(tiles.rows, (const char *)shapes + 48, sizeof tiles.rows);
}
static inline void emulated_tile_release(void) { memset(&tiles, 0, sizeof tiles); }
static inline void emulated_tile_zero(int tile) { memset(tiles.data[tile], 0, sizeof tiles.data[tile]); }
static inline void emulated_tile_loadd(int tile, const void *from, long stride) {
  emulated_tile_zero(tile);
  for (int row = 0; row < tiles.rows[tile]; row++)
    memcpy(tiles.data[tile][row], (const char *)from + row * stride, tiles.row_bytes[tile]);
}
static inline void emulated_tile_stored(int tile, void *to, long stride) {
  for (int row = 0; row < tiles.rows[tile]; row++)
    memcpy((char *)to + row * stride, tiles.data[tile][row], tiles.row_bytes[tile]);
}
static inline float emulated_wide(const unsigned char *at) {
  uint16_t half;
  memcpy(&half, at, sizeof half);
  const uint32_t bits = (uint32_t)half << 16;
  float made;
  memcpy(&made, &bits, sizeof made);
  return made;
}
static inline void emulated_tile_dpbf16ps(int sums, int rows, int weights) {
  emulated_count();
  for (int row = 0; row < tiles.rows[sums]; row++)
    for (int out = 0; out < tiles.row_bytes[sums] / 4; out++) {
      float parts[2] = {0}, sum;
      for (int pair = 0; pair < tiles.row_bytes[rows] / 4; pair++)
        for (int odd = 0; odd < 2; odd++)
          parts[odd] = __builtin_fmaf(emulated_wide(tiles.data[rows][row] + 4 * pair + 2 * odd),
                                      emulated_wide(tiles.data[weights][pair] + 4 * out + 2 * odd), parts[odd]);
      unsigned char *at = tiles.data[sums][row] + 4 * out;
      memcpy(&sum, at, sizeof sum);
      sum += parts[0] + parts[1];
      memcpy(at, &sum, sizeof sum);
    }
}

static inline void emulated_tile_dpbssd(int sums, int rows, int weights) {
  emulated_count();
  for (int row = 0; row < tiles.rows[sums]; row++)
    for (int out = 0; out < tiles.row_bytes[sums] / 4; out++) {
      int32_t sum;
      unsigned char *at = tiles.data[sums][row] + 4 * out;
      memcpy(&sum, at, sizeof sum);
      for (int k = 0; k < tiles.row_bytes[rows]; k++)
        sum += (int8_t)tiles.data[rows][row][k] * (int8_t)tiles.data[weights][k / 4][4 * out + k % 4];
      memcpy(at, &sum, sizeof sum);
    }
}

#undef _tile_loadconfig
#define _tile_loadconfig emulated_tile_loadconfig
#undef _tile_release
#define _tile_release emulated_tile_release
#undef _tile_zero
#define _tile_zero emulated_tile_zero
#undef _tile_loadd
#define _tile_loadd emulated_tile_loadd
#undef _tile_stored
#define _tile_stored emulated_tile_stored
#undef _tile_dpbf16ps
#define _tile_dpbf16ps emulated_tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_dpbssd emulated_tile_dpbssd

#endif
