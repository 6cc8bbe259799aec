/* Products of bytes on the matrix unit (AMX), in place of `ggml_tile` (ggml.h) where there are many rows: prompts and batches.

   Sixteen outputs are opened once for all rows: their numbers become signed bytes, which are an operand of the unit as they
   lie, and their scales and least values float32. One instruction adds up a group of inputs of sixteen rows and sixteen
   outputs in whole numbers, exactly. The groups' sums are scaled and added in float32 as `ggml_tile` adds them, and in its
   order, so that a row has the same bits from both. */

enum {
  OPENED_LEAST = 2 * HEIGHT, /* rows from which on opening pays: measured */
  OPENED_INPUTS = 512,   /* of sixteen outputs, whole pieces of every form: what is opened stays in the first cache */
  OPENED_BLOCKS = 2,     /* whose inputs are read once */
  OPENED_ROWS = 256,     /* that take turns with what is opened */
  GROUPS_AHEAD = 4       /* of the group whose sums are scaled, a later one is multiplied */
};

/* Some inputs of sixteen outputs: numbers [groups, group / 4, 16, 4], and [groups, 16] of the others. */
typedef struct {
  int8_t numbers[LANES * OPENED_INPUTS];
  float scales[LANES * OPENED_INPUTS / (GGML_GROUP / 2)], leasts[LANES * OPENED_INPUTS / (GGML_GROUP / 2)];
  long groups;
} ggml_opened;

INLINE void ggml_open(const uint8_t *w, long pieces, ggml_opened *to, const ggml_form f) {
  float *scales = to->scales, *leasts = to->leasts;
  int8_t *numbers = to->numbers;
  to->groups = pieces * f.groups;
  for (long piece = 0; piece < pieces; piece++, w += ggml_piece_size(f)) {
    const ggml_piece_steps steps = ggml_steps_of(f, w);
    for (long g = 0; g < f.groups; g++, scales += LANES, leasts += LANES) {
      const uint8_t *body = w + ggml_steps(f) + g * ggml_numbers(f);
      const units higher = f.bits == 5 || f.bits == 6 ? load_units(body + 8 * f.group) : no_units();
#pragma GCC unroll 8
      for (int t = 0; t < f.group / 4; t++, numbers += 64) {
        const units taken = load_units(body + ggml_line(f, t));
        const units weights = f.bits == 8 ? taken : ggml_unit(f, taken, higher, t);
        store_units(numbers, f.offset ? less_in_bytes(weights, (uint8_t)f.offset) : weights);
      }
      store_float(scales, ggml_scale(f, w, steps, g));
      if (f.has_least) store_float(leasts, ggml_least(f, w, steps, g));
    }
  }
}

/* Registers 0 and 1 hold sums, 2 and 3 inputs, 4 and 5 weights: of a group and of the next one. */
static void shape_byte_tiles(long group) {
  tile_shapes shapes = {.palette = 1};
  for (int number = 0; number < 2; number++) {
    shape_tile(&shapes, number, HEIGHT, LANES * sizeof(int32_t));
    shape_tile(&shapes, 2 + number, HEIGHT, group);
    shape_tile(&shapes, 4 + number, group / 4, 4 * LANES);
  }
  take_shapes(&shapes);
}

#define MULTIPLY_GROUP(dots, input, weight, to, inputs, stride, weights) \
  do {                                                                   \
    LOAD_TILE(input, inputs, stride);                                    \
    LOAD_TILE(weight, weights, 64);                                      \
    _tile_zero(dots);                                                    \
    _tile_dpbssd(dots, input, weight);                                   \
    _tile_stored(dots, to, 64);                                          \
  } while (0)

/* The sums of a group of sixteen rows, scaled: `g` counts in what is opened, `of_row` in the row. */
INLINE void ggml_add_scaled(const ggml_inputs *x, const ggml_opened *w, long row, long g, long of_row, const int32_t *dots,
                            floats *sum, const int halves, const int has_least) {
  const float *scales = x->scales + of_row / halves * x->rows + row;
  const float *of_inputs = (halves > 1 ? x->half_sums : x->sums) + of_row * x->rows + row;
  const floats scale = load_float(w->scales + g * LANES);
  const floats least = has_least ? load_float(w->leasts + g * LANES) : zeros();
#pragma GCC unroll 16
  for (int m = 0; m < HEIGHT; m++) {
    const floats whole = mul(from_units(load_units(dots + m * LANES)), splat(scales[m]));
    sum[m] = multiply_add(whole, scale, sum[m]);
    if (has_least) sum[m] = multiply_add(least, splat(of_inputs[m]), sum[m]);
  }
}

/* What the opened inputs, from group `first` of the rows on, add to the sums [HEIGHT, LANES] of sixteen rows. */
INLINE void ggml_add_opened(const ggml_inputs *x, const ggml_opened *w, long row, long first, float *sums, const int halves,
                            const int has_least) {
  const long group = GGML_GROUP / halves, groups = w->groups, stride = x->padded;
  const int8_t *inputs = x->numbers + row * stride + first * group, *weights = w->numbers;
  int32_t dots[2 * GROUPS_AHEAD][HEIGHT * LANES] __attribute__((aligned(64)));
  floats sum[HEIGHT];
#pragma GCC unroll 16
  for (int m = 0; m < HEIGHT; m++) sum[m] = load_float(sums + m * LANES);
  for (long g = -GROUPS_AHEAD; g < groups; g += 2) {
    const long ahead = g + GROUPS_AHEAD, place = ahead % (2 * GROUPS_AHEAD), own = g % (2 * GROUPS_AHEAD);
    if (ahead < groups) MULTIPLY_GROUP(0, 2, 4, dots[place], inputs + ahead * group, stride, weights + ahead * LANES * group);
    if (g >= 0) ggml_add_scaled(x, w, row, g, first + g, dots[own], sum, halves, has_least);
    if (ahead + 1 < groups)
      MULTIPLY_GROUP(1, 3, 5, dots[place + 1], inputs + (ahead + 1) * group, stride, weights + (ahead + 1) * LANES * group);
    if (g >= 0 && g + 1 < groups) ggml_add_scaled(x, w, row, g + 1, first + g + 1, dots[own + 1], sum, halves, has_least);
  }
#pragma GCC unroll 16
  for (int m = 0; m < HEIGHT; m++) store_float(sums + m * LANES, sum[m]);
}

typedef void (*ggml_open_fn)(const uint8_t *, long, ggml_opened *);
typedef void (*ggml_add_opened_fn)(const ggml_inputs *, const ggml_opened *, long, long, float *);
#define OF_FORM(form, ...)                                                                                         \
  static void ggml_open_##form(const uint8_t *w, long pieces, ggml_opened *to) {                                    \
    ggml_open(w, pieces, to, ggml_forms[form]);                                                                     \
  }                                                                                                                 \
  static void ggml_add_opened_##form(const ggml_inputs *x, const ggml_opened *w, long row, long first, float *sums) { \
    ggml_add_opened(x, w, row, first, sums, ggml_forms[form].group < GGML_GROUP ? 2 : 1, ggml_forms[form].has_least); \
  }
GGML_FORMS(OF_FORM)
#undef OF_FORM
#define NAMED(form, ...) ggml_open_##form,
static const ggml_open_fn ggml_opens[GGML_FORM_COUNT] = {GGML_FORMS(NAMED)};
#undef NAMED
#define NAMED(form, ...) ggml_add_opened_##form,
static const ggml_add_opened_fn ggml_adds_opened[GGML_FORM_COUNT] = {GGML_FORMS(NAMED)};
#undef NAMED

/* The first row of each of `tiles` tiles of sixteen rows, of which the last one begins in the one before. */
INLINE long ggml_start_of_tile(long row, long last, long tile) {
  const long start = row + tile * HEIGHT;
  return start + HEIGHT < last ? start : last - HEIGHT;
}

/* Sums [OPENED_ROWS / HEIGHT, blocks, HEIGHT, LANES] of some rows and one or two neighbouring blocks of outputs. */
static void ggml_opened_sums(const ggml_inputs *x, const uint8_t *w, long ins, int form, long row, long last, int blocks,
                             float *sums) {
  const ggml_form f = ggml_forms[form];
  const long next = ggml_block_size(f, ins), pieces = next / ggml_piece_size(f), together = OPENED_INPUTS / ggml_piece(f);
  const long tiles = (last - row + HEIGHT - 1) / HEIGHT;
  ggml_opened opened[OPENED_BLOCKS] __attribute__((aligned(64)));
  memset(sums, 0, (size_t)(tiles * blocks * HEIGHT * LANES) * sizeof *sums);
  shape_byte_tiles(f.group);
  for (long piece = 0; piece < pieces; piece += together) {
    const long count = pieces - piece < together ? pieces - piece : together;
    for (int b = 0; b < blocks; b++) ggml_opens[form](w + b * next + piece * ggml_piece_size(f), count, opened + b);
    for (long tile = 0; tile < tiles; tile++)
      for (int b = 0; b < blocks; b++)
        ggml_adds_opened[form](x, opened + b, ggml_start_of_tile(row, last, tile), piece * f.groups,
                               sums + (tile * blocks + b) * HEIGHT * LANES);
  }
  _tile_release();
}
