/* Tile registers of the matrix unit (AMX): what its users share. */

enum { HEIGHT = 16 /* rows of a tile */ };

/* Shapes of the tile registers, as the processor wants them. */
typedef struct {
  uint8_t palette, first_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} tile_shapes;

/* What was written to memory is there, for instructions whose reading the compiler does not see. */
INLINE void written(const void *at) { __asm__ volatile("" : : "r"(at) : "memory"); }
#define LOAD_TILE(tile, at, row_bytes)   \
  do {                                   \
    written(at);                         \
    _tile_loadd(tile, at, row_bytes);    \
  } while (0)

INLINE void shape_tile(tile_shapes *shapes, int tile, long rows, long row_bytes) {
  shapes->rows[tile] = (uint8_t)rows;
  shapes->row_bytes[tile] = (uint16_t)row_bytes;
}
INLINE void take_shapes(const tile_shapes *shapes) {
  written(shapes);
  _tile_loadconfig(shapes);
}
