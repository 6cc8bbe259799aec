/* Weights of GGUF files, in their own numbers: what does not depend on the type of rows.

   A file keeps a row of a matrix in blocks, by one of ggml's types. Here sixteen rows lie side by side, in the order in which
   products read them, and no number is rounded again: scales stay float16, or whole numbers times one. Source of the types:
   ggml-common.h and ggml-quants.c of ggml.

   A weight is scale * (number - offset), or scale * number + least. A matrix lies as [outs / 16][pieces]; a piece has the
   `groups` groups of PIECE inputs of sixteen outputs:

     steps    16 float16 for each group, then as many of least values where the form has these; or, with `by_byte`, 16 float16
              and 16 more of least values, then 16 bytes for each group (times the float16), and so for least values; or,
              with `is_wide`, 16 bfloat16 for each group, whose exponents are those of float32; or, with `is_whole`, 16 float32
              for all groups of the piece
     numbers  for each group, lines of 64 bytes, [16][4]: with 4, 5 and 6 bits input k of an output in the lower half of a
              byte and input k + 4 in the upper one; behind them the higher bits, those of input k + 4 t in the bits t, or 2 t
              and 2 t + 1, of a byte; with 2 bits input k + 4 t in those; with 8 bits a byte for each input

   With `places`, 4 bits are the place of a number in a table of sixteen. With `levels`, they are the place of a float, which the
   step multiplies. With 16 bits a number is a float16, or
   with `is_wide` a bfloat16; sixteen outputs of an input are neighbours, and there are no steps. Steps are filled up to whole lines.
   Inputs are padded to whole pieces: with steps of zero. */

enum { GGML_SEGMENTS = 4, GGML_GROUP = 32 /* inputs that share a scale when they are rounded to 8 bits */, GGML_PAD = 256 };

typedef struct {
  int bits, group, groups, by_byte, is_signed, has_least, offset, is_wide, is_whole, levels, places;
} ggml_form;

/* Forms, and the type of file blocks that becomes each: numbers of GGMLQuantizationType. */
#define GGML_FORMS(DO) \
  DO(0, 4, 32, 2, 0, 0, 0, 8, 0, 0, 0, 0)    /* Q4_0 */ \
  DO(1, 4, 32, 2, 0, 0, 1, 0, 0, 0, 0, 0)    /* Q4_1 */ \
  DO(2, 5, 32, 2, 0, 0, 0, 16, 0, 0, 0, 0)   /* Q5_0 */ \
  DO(3, 5, 32, 2, 0, 0, 1, 0, 0, 0, 0, 0)    /* Q5_1 */ \
  DO(4, 8, 32, 2, 0, 0, 0, 128, 0, 0, 0, 0)  /* Q8_0 */ \
  DO(5, 4, 32, 8, 1, 0, 1, 0, 0, 0, 0, 0)    /* Q4_K */ \
  DO(6, 5, 32, 8, 1, 0, 1, 0, 0, 0, 0, 0)    /* Q5_K */ \
  DO(7, 6, 16, 16, 1, 1, 0, 32, 0, 0, 0, 0)  /* Q6_K */ \
  DO(8, 2, 16, 16, 1, 0, 1, 0, 0, 0, 0, 0)   /* Q2_K */ \
  DO(9, 4, 32, 8, 1, 1, 0, 128, 0, 0, 0, 1)  /* IQ4_XS */ \
  DO(10, 4, 32, 4, 1, 0, 1, 0, 0, 0, 0, 0)   /* WORDS_128 */ \
  DO(11, 4, 32, 2, 1, 0, 1, 0, 0, 0, 0, 0)   /* WORDS_64 */ \
  DO(12, 4, 32, 1, 1, 0, 1, 0, 0, 0, 0, 0)   /* WORDS_32 */ \
  DO(13, 4, 32, 2, 0, 0, 0, 16, 1, 0, 0, 2)  /* MXFP4 */ \
  DO(14, 8, 32, 4, 0, 0, 0, 128, 0, 1, 0, 0)  /* INT8, INT8_BY_ROW */ \
  DO(15, 4, 64, 1, 0, 0, 0, 0, 0, 1, 1, 0)    /* NF4 */ \
  DO(16, 4, 64, 1, 0, 0, 0, 0, 0, 1, 2, 0)    /* FP4 */ \
  DO(17, 16, 32, 1, 0, 0, 0, 0, 0, 0, 0, 0)   /* F16 */ \
  DO(18, 16, 32, 1, 0, 0, 0, 0, 1, 0, 0, 0)   /* BF16 */ \
  DO(19, 4, 32, 2, 0, 0, 0, 128, 0, 0, 0, 1)  /* IQ4_NL */ \
  DO(20, 4, 16, 16, 1, 1, 0, 4, 0, 0, 0, 0)   /* Q3_K */
enum { GGML_FORM_COUNT = 21 };

#define FORM(number, bits, group, groups, by_byte, is_signed, has_least, offset, is_wide, is_whole, levels, places) \
  {bits, group, groups, by_byte, is_signed, has_least, offset, is_wide, is_whole, levels, places},
static const ggml_form ggml_forms[GGML_FORM_COUNT] = {GGML_FORMS(FORM)};
#undef FORM

INLINE long ggml_piece(ggml_form f) { return (long)f.group * f.groups; }
/* Bytes of a piece's steps, and of a group's numbers. */
INLINE long ggml_steps(ggml_form f) {
  const long sets = 1 + f.has_least, bytes = f.by_byte ? 32 * sets + LANES * f.groups * sets : 32 * f.groups * sets;
  if (f.is_whole) return 64;
  if (f.bits == 16) return 0;
  return (bytes + 63) / 64 * 64;
}
INLINE long ggml_numbers(ggml_form f) { return 2L * f.bits * f.group; }
INLINE long ggml_piece_size(ggml_form f) { return ggml_steps(f) + f.groups * ggml_numbers(f); }
INLINE long ggml_block_size(ggml_form f, long ins) {
  return (ins + ggml_piece(f) - 1) / ggml_piece(f) * ggml_piece_size(f);
}

/* --- blocks of a file ---------------------------------------------------------------------------------------------- */

/* How products read inputs: in 8 bits with a scale for each GGML_GROUP of a row or for the whole row, or as they are. */
enum { BY_GROUP, BY_ROW, AS_FLOATS };

typedef struct {
  int type, form, elements, bytes, inputs;
} ggml_type;

enum { F16 = 1, BF16 = 30, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20,
       IQ4_XS = 23, MXFP4 = 39,
       /* None of ggml's: groups of GPTQ, AWQ and compressed-tensors (packed_checkpoint.py), a float16 scale, the number that
          stands for 0, and 4 bits for each input, two neighbours in a byte. */
       WORDS_32 = 1032, WORDS_64 = 1064, WORDS_128 = 1128,
       /* A float32 scale, and 32 signed bytes of compressed-tensors or bitsandbytes; or 64 places of bitsandbytes' levels, the
          first of two in the higher bits of a byte. */
       INT8 = 1208, INT8_BY_ROW = 1209, NF4 = 1304, FP4 = 1305 };
static const ggml_type ggml_types[] = {
    {Q4_0, 0, 32, 18},   {Q4_1, 1, 32, 20},   {Q5_0, 2, 32, 22},   {Q5_1, 3, 32, 24},   {Q8_0, 4, 32, 34},  {IQ4_NL, 19, 32, 18},
    {Q4_K, 5, 256, 144}, {Q5_K, 6, 256, 176}, {Q6_K, 7, 256, 210}, {Q3_K, 20, 256, 110}, {Q2_K, 8, 256, 84}, {IQ4_XS, 9, 256, 136},
    {WORDS_128, 10, 128, 67}, {WORDS_64, 11, 64, 35}, {WORDS_32, 12, 32, 19}, {MXFP4, 13, 32, 17},
    {F16, 17, 1, 2, AS_FLOATS}, {BF16, 18, 1, 2, AS_FLOATS},
    {INT8, 14, 32, 36}, {INT8_BY_ROW, 14, 32, 36, BY_ROW}, {NF4, 15, 64, 36, AS_FLOATS}, {FP4, 16, 64, 36, AS_FLOATS}};

static const ggml_type *ggml_type_of(long type) {
  for (unsigned i = 0; i < sizeof ggml_types / sizeof *ggml_types; i++)
    if (ggml_types[i].type == type) return ggml_types + i;
  return 0;
}

/* Bytes of sixteen outputs of a type. */
static long ggml_size_of(long type, long ins) { return ggml_block_size(ggml_forms[ggml_type_of(type)->form], ins); }

/* A block of a file as its form has it. `step` and `least` are float16 (`step` with `is_wide` bfloat16); with `by_byte` scales
   are these times bytes; with `is_whole` the scale is `whole`. */
typedef struct {
  uint8_t numbers[256], steps[16], leasts[16];
  uint16_t step, least;
  float whole;
} ggml_decoded;

INLINE uint16_t two_bytes(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }
INLINE uint16_t negated(uint16_t half) { return half ^ 0x8000; }

/* Tables of `places`, with the form's offset added: IQ4_NL's and IQ4_XS's, and floats of four bits (a sign, two bits of exponent,
   one of mantissa), twice, so that they are whole; the scale of these is a power of two, of which half is taken here, as
   bfloat16. */
static const uint8_t GGML_PLACES[2][16] = {{1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
                                           {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4}};
INLINE uint16_t half_of_power(uint8_t exponent) {
  return (uint16_t)(exponent < 2 ? 0x20 << exponent : (exponent - 1) << 7);
}

/* bitsandbytes' tables of 4 bits, in the order of their places: NF4 (QLoRA, arXiv 2305.14314, appendix E) and FP4. */
static const float GGML_LEVELS[2][16] = {
    {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
     -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
     0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f},
    {0.0f, 0.005208333333f, 0.66666667f, 1.0f, 0.33333333f, 0.5f, 0.16666667f, 0.25f, 0.0f, -0.005208333333f, -0.66666667f,
     -1.0f, -0.33333333f, -0.5f, -0.16666667f, -0.25f}};

static void halves_of(const uint8_t *from, uint8_t *numbers) { /* 16 bytes: the lower halves, then the upper ones */
  for (int i = 0; i < 16; i++) {
    numbers[i] = from[i] & 15;
    numbers[i + 16] = from[i] >> 4;
  }
}

static void ggml_decode(int type, const uint8_t *b, ggml_decoded *to) {
  uint8_t *numbers = to->numbers;
  to->least = 0;
  switch (type) {
    case Q4_0:
    case IQ4_NL:
      to->step = two_bytes(b);
      halves_of(b + 2, numbers);
      break;
    case MXFP4:
      to->step = half_of_power(b[0]);
      halves_of(b + 1, numbers);
      break;
    case Q4_1:
      to->step = two_bytes(b);
      to->least = two_bytes(b + 2);
      halves_of(b + 4, numbers);
      break;
    case Q5_0:
    case Q5_1: {
      const uint8_t *high = b + (type == Q5_0 ? 2 : 4);
      const uint32_t bits = two_bytes(high) | (uint32_t)two_bytes(high + 2) << 16;
      to->step = two_bytes(b);
      if (type == Q5_1) to->least = two_bytes(b + 2);
      halves_of(high + 4, numbers);
      for (int i = 0; i < 32; i++) numbers[i] |= (uint8_t)((bits >> i & 1) << 4);
      break;
    }
    case Q8_0:
      to->step = two_bytes(b);
      for (int i = 0; i < 32; i++) numbers[i] = (uint8_t)(b[2 + i] ^ 128);
      break;
    case Q4_K:
    case Q5_K: {
      const uint8_t *s = b + 4, *high = b + 16, *low = b + (type == Q4_K ? 16 : 48);
      to->step = two_bytes(b);
      to->least = negated(two_bytes(b + 2));
      for (int j = 0; j < 4; j++) {
        to->steps[j] = s[j] & 63;
        to->leasts[j] = s[j + 4] & 63;
        to->steps[j + 4] = (uint8_t)((s[j + 8] & 15) | s[j] >> 6 << 4);
        to->leasts[j + 4] = (uint8_t)(s[j + 8] >> 4 | s[j + 4] >> 6 << 4);
      }
      for (int c = 0; c < 4; c++)
        for (int i = 0; i < 32; i++) {
          numbers[64 * c + i] = low[32 * c + i] & 15;
          numbers[64 * c + 32 + i] = low[32 * c + i] >> 4;
        }
      if (type == Q5_K)
        for (int c = 0; c < 8; c++)
          for (int i = 0; i < 32; i++) numbers[32 * c + i] |= (uint8_t)((high[i] >> c & 1) << 4);
      break;
    }
    case Q6_K:
      for (int c = 0; c < 8; c++) {
        const uint8_t *low = b + 64 * (c / 4) + 32 * (c % 2), *high = b + 128 + 32 * (c / 4);
        const int up = 4 * (c / 2 % 2), of_high = 2 * (c % 4);
        for (int i = 0; i < 32; i++) numbers[32 * c + i] = (uint8_t)((low[i] >> up & 15) | (high[i] >> of_high & 3) << 4);
      }
      memcpy(to->steps, b + 192, 16);
      to->step = two_bytes(b + 208);
      break;
    case Q3_K:
      for (int c = 0; c < 8; c++) {
        const uint8_t *two = b + 32 + 32 * (c / 4);
        const int of_two = 2 * (c % 4);
        for (int i = 0; i < 32; i++) numbers[32 * c + i] = (uint8_t)((two[i] >> of_two & 3) | (b[i] >> c & 1) << 2);
      }
      for (int j = 0; j < 16; j++) {
        const uint8_t *s = b + 96;
        const int low = j < 8 ? s[j] & 15 : s[j - 8] >> 4, high = s[8 + j % 4] >> 2 * (j / 4) & 3;
        to->steps[j] = (uint8_t)(int8_t)((low | high << 4) - 32);
      }
      to->step = two_bytes(b + 108);
      break;
    case Q2_K:
      for (int c = 0; c < 8; c++) {
        const uint8_t *two = b + 16 + 32 * (c / 4);
        const int of_two = 2 * (c % 4);
        for (int i = 0; i < 32; i++) numbers[32 * c + i] = two[i] >> of_two & 3;
      }
      for (int j = 0; j < 16; j++) {
        to->steps[j] = b[j] & 15;
        to->leasts[j] = b[j] >> 4;
      }
      to->step = two_bytes(b + 80);
      to->least = negated(two_bytes(b + 82));
      break;
    case WORDS_32:
    case WORDS_64:
    case WORDS_128:
      to->step = two_bytes(b);
      to->least = negated(to->step);
      for (int g = 0; g < 4; g++) {
        to->steps[g] = 1;
        to->leasts[g] = b[2];
      }
      for (int i = 0; i < type - 1000; i++) numbers[i] = b[3 + i / 2] >> 4 * (i % 2) & 15;
      break;
    case INT8:
    case INT8_BY_ROW:
      memcpy(&to->whole, b, sizeof to->whole);
      for (int i = 0; i < 32; i++) numbers[i] = (uint8_t)(b[4 + i] ^ 128);
      break;
    case NF4:
    case FP4:
      memcpy(&to->whole, b, sizeof to->whole);
      for (int i = 0; i < 64; i++) numbers[i] = b[4 + i / 2] >> (i % 2 ? 0 : 4) & 15;
      break;
    case IQ4_XS: {
      const uint16_t high = two_bytes(b + 2);
      to->step = two_bytes(b);
      for (int k = 0; k < 8; k++) {
        const int low = b[4 + k / 2] >> 4 * (k % 2) & 15;
        to->steps[k] = (uint8_t)(int8_t)((low | (high >> 2 * k & 3) << 4) - 32);
        halves_of(b + 8 + 16 * k, numbers + 32 * k);
      }
      break;
    }
  }
}

/* The scale and the least value of a group of a decoded block, in float32: exact. */
static void ggml_range(const ggml_decoded *b, ggml_form f, int group, float *scale, float *least) {
  const float step = f.is_wide ? bfloat16_value(b->step) : half_value(b->step), lowest = half_value(b->least);
  const float byte = f.is_signed ? (float)(int8_t)b->steps[group] : (float)b->steps[group];
  *scale = f.is_whole ? b->whole : f.by_byte ? step * byte : step;
  *least = f.by_byte ? lowest * (float)b->leasts[group] : lowest;
}

/* A number of a matrix of floats in a file. */
INLINE uint16_t ggml_sixteen_bits(const uint8_t *row, long k) {
  uint16_t number;
  memcpy(&number, row + 2 * k, sizeof number);
  return number;
}

/* The numbers of a decoded block without their scales: less the offset, or what their places stand for. */
static void ggml_values(const ggml_decoded *b, ggml_form f, int count, float *to) {
  if (f.levels)
    for (int k = 0; k < count; k++) to[k] = GGML_LEVELS[f.levels - 1][b->numbers[k]];
  else if (f.places)
    for (int k = 0; k < count; k++) to[k] = (float)(GGML_PLACES[f.places - 1][b->numbers[k]] - f.offset);
  else
    for (int k = 0; k < count; k++) to[k] = (float)(b->numbers[k] - f.offset);
}

/* How many numbers of a row `ggml_part_of_row` makes at `start`: those of a block of the file. */
INLINE int ggml_part(const ggml_type *t, long ins, long start) {
  return t->elements > 1 ? t->elements : ins - start < 256 ? (int)(ins - start) : 256;
}

/* Numbers of a row of a matrix in a file, as the file's numbers stand for. */
static void ggml_part_of_row(const ggml_type *t, const uint8_t *row, long ins, long start, float *to) {
  const ggml_form f = ggml_forms[t->form];
  const int count = ggml_part(t, ins, start);
  ggml_decoded b;
  if (f.bits == 16) {
    for (int k = 0; k < count; k++) {
      const uint16_t number = ggml_sixteen_bits(row, start + k);
      to[k] = f.is_wide ? bfloat16_value(number) : half_value(number);
    }
    return;
  }
  ggml_decode(t->type, row + start / t->elements * t->bytes, &b);
  ggml_values(&b, f, count, to);
  for (int g = 0; g < count / f.group; g++) {
    float scale, least;
    ggml_range(&b, f, g, &scale, &least);
    for (int k = g * f.group; k < (g + 1) * f.group; k++) to[k] = scale * to[k] + (f.has_least ? least : 0);
  }
}

INLINE long ggml_row_size(const ggml_type *t, long ins) { return ins / t->elements * t->bytes; }

/* y [count, ins]: rows of a matrix in a file. */
void draftproof_ggml_rows(const uint8_t *from, const int64_t *ids, float *y, long count, long ins, long type) {
  const ggml_type *t = ggml_type_of(type);
  for (long i = 0; i < count; i++)
    for (long start = 0; start < ins; start += ggml_part(t, ins, start))
      ggml_part_of_row(t, from + ids[i] * ggml_row_size(t, ins), ins, start, y + i * ins + start);
}

typedef struct {
  const uint8_t *from;
  float *to;
  long outs, ins;
  const ggml_type *type;
} ggml_interleaving;

static void share_interleaving(void *given) {
  const ggml_interleaving *r = given;
  const ggml_type *t = r->type;
  const long blocks = (r->outs + LANES - 1) / LANES, number = thread_number(), count = thread_count();
  float each[LANES][256];
  memset(each, 0, sizeof each);
  for (long block = blocks * number / count; block < blocks * (number + 1) / count; block++)
    for (long start = 0; start < r->ins; start += ggml_part(t, r->ins, start)) {
      const long part = ggml_part(t, r->ins, start), rows = r->outs - block * LANES;
      float *to = r->to + (block * r->ins + start) * LANES;
      for (long lane = 0; lane < LANES && lane < rows; lane++)
        ggml_part_of_row(t, r->from + (block * LANES + lane) * ggml_row_size(t, r->ins), r->ins, start, each[lane]);
      for (long lane = rows; lane < LANES; lane++) memset(each[lane], 0, sizeof each[lane]);
      for (long k = 0; k < part; k += LANES) {
        units turned[LANES];
        for (int lane = 0; lane < LANES; lane++) turned[lane] = load_units(each[lane] + k);
        exchange(turned);
        for (long i = 0; i < LANES && k + i < part; i++) store_units(to + (k + i) * LANES, turned[i]);
      }
    }
}

/* Rows of a matrix in a file in the order of `product`, in float32: [outs / 16][ins][16], with zeros beyond the last one. */
void draftproof_ggml_interleave(const uint8_t *from, float *to, long outs, long ins, long type, long threads) {
  ggml_interleaving r = {from, to, outs, ins, ggml_type_of(type)};
  parallel(share_interleaving, &r, (unsigned)(threads > 1 ? threads : 1), 0);
}

typedef struct {
  const uint8_t *from;
  const int64_t *rows; /* which row of the file each output is; 0 where they are in order */
  uint8_t *to;
  long outs, ins;
  const ggml_type *type;
} ggml_repacking;

static void share_repacking(void *given) {
  const ggml_repacking *r = given;
  const ggml_type *t = r->type;
  const ggml_form f = ggml_forms[t->form];
  const long blocks = (r->outs + LANES - 1) / LANES, number = thread_number(), count = thread_count();
  const long size = r->ins / t->elements * t->bytes, next = ggml_block_size(f, r->ins), piece = ggml_piece(f);
  const long of_block = t->elements / f.group; /* groups of a file's block */
  ggml_decoded b;
  for (long block = blocks * number / count; block < blocks * (number + 1) / count; block++) {
    memset(r->to + block * next, 0, next);
    for (long lane = 0; lane < LANES && block * LANES + lane < r->outs; lane++) {
      const long out = block * LANES + lane;
      const uint8_t *row = r->from + (r->rows ? r->rows[out] : out) * size;
      for (long k = 0; k < r->ins && f.bits == 16; k++)
        ((uint16_t *)(r->to + block * next))[k * LANES + lane] = ggml_sixteen_bits(row, k);
      for (long start = 0; start < r->ins && f.bits < 16; start += t->elements, row += t->bytes) {
        uint8_t *at = r->to + block * next + start / piece * ggml_piece_size(f);
        uint16_t *halves = (uint16_t *)at + lane;
        ggml_decode(t->type, row, &b);
        const long first = start % piece / f.group; /* group in the piece */
        if (f.is_whole) {
          memcpy(at + 4 * lane, &b.whole, sizeof b.whole);
        } else if (f.by_byte) {
          uint8_t *bytes = at + 32 * (1 + f.has_least) + lane;
          halves[0] = b.step;
          if (f.has_least) halves[LANES] = b.least;
          for (int g = 0; g < f.groups; g++) {
            bytes[LANES * g] = b.steps[g];
            if (f.has_least) bytes[LANES * (f.groups + g)] = b.leasts[g];
          }
        } else {
          halves[LANES * first] = b.step;
          if (f.has_least) halves[LANES * (f.groups + first)] = b.least;
        }
        for (long g = 0; g < of_block; g++) {
          uint32_t *body = (uint32_t *)(at + ggml_steps(f) + (first + g) * ggml_numbers(f)) + lane, lower = 0, higher = 0;
          for (int t = 0; t < f.group / 4; t++) { /* four numbers at once */
            uint32_t four;
            memcpy(&four, b.numbers + g * f.group + 4 * t, sizeof four);
            if (f.bits == 8) {
              body[LANES * t] = four;
            } else if (f.bits == 2) {
              lower |= four << 2 * t;
            } else {
              lower = t % 2 ? lower | (four & 0x0f0f0f0f) << 4 : four & 0x0f0f0f0f;
              if (t % 2) body[LANES * (t / 2)] = lower;
              higher |= f.bits == 5 ? (four >> 4 & 0x01010101) << t : f.bits == 6 ? (four >> 4 & 0x03030303) << 2 * t : 0;
            }
          }
          if (f.bits == 2) *body = lower;
          if (f.bits == 5 || f.bits == 6) body[2 * f.group] = higher;
        }
      }
    }
  }
}

/* A matrix of a file in the order in which products read it; `to` has ggml_block_size bytes for each 16 outputs. */
void draftproof_ggml_repack(const uint8_t *from, const int64_t *rows, uint8_t *to, long outs, long ins, long type,
                            long threads) {
  ggml_repacking r = {from, rows, to, outs, ins, ggml_type_of(type)};
  parallel(share_repacking, &r, (unsigned)(threads > 1 ? threads : 1), 0);
}

/* Elements and bytes of a block of a type in a file, inputs of a piece here and its bytes, and how products read inputs; 0 where
   the type is not known. */
int draftproof_ggml_sizes(long type, int64_t *made) {
  const ggml_type *t = ggml_type_of(type);
  if (!t) return 0;
  const ggml_form f = ggml_forms[t->form];
  made[0] = t->elements;
  made[1] = t->bytes;
  made[2] = ggml_piece(f);
  made[3] = ggml_piece_size(f);
  made[4] = t->inputs;
  return 1;
}

/* --- products ------------------------------------------------------------------------------------------------------ */

/* A matrix, or several whose outputs follow one another and whose products read inputs alike. Fields as `GGMLArguments` in
   native/structures.py. */
typedef struct {
  long count;
  struct {
    const uint8_t *w;
    long outs, type; /* all outs but the last are multiples of 16 */
  } of[GGML_SEGMENTS];
} ggml_matrix;

/* Rows of a tile by the rows that are left: where there is no tile of so many, of more. */
#ifdef WITH_AVX512
#define GGML_TILES(DO, form) DO(form, 1, 1) DO(form, 1, 4) DO(form, 2, 1) DO(form, 2, 2) DO(form, 3, 1) DO(form, 4, 1) \
  DO(form, 5, 1) DO(form, 6, 1) DO(form, 7, 1) DO(form, 8, 1)
enum { GGML_ROWS = 8, GGML_BLOCKS_OF_ONE = 4, GGML_BLOCKS_OF_TWO = 2, GGML_CHAINS = 2, GGML_ROWS_OF_KEPT_LEVELS = 9 };
#elif defined(WITH_AVX2)
#define GGML_TILES(DO, form) DO(form, 1, 1) DO(form, 1, 2) DO(form, 2, 1) DO(form, 3, 1) DO(form, 4, 1) DO(form, 5, 1)
enum { GGML_ROWS = 5, GGML_BLOCKS_OF_ONE = 2, GGML_BLOCKS_OF_TWO = 1, GGML_CHAINS = 1, GGML_ROWS_OF_KEPT_LEVELS = 4 };
#else
#define GGML_TILES(DO, form) DO(form, 1, 1) DO(form, 1, 2) DO(form, 2, 1) DO(form, 4, 1)
enum { GGML_ROWS = 4, GGML_BLOCKS_OF_ONE = 2, GGML_BLOCKS_OF_TWO = 1, GGML_CHAINS = 1, GGML_ROWS_OF_KEPT_LEVELS = 9 };
#endif
static int ggml_tile_rows(long left) {
#if defined(WITH_AVX512) || defined(WITH_AVX2)
  return left > 2 * GGML_ROWS - 1 ? GGML_ROWS : left > GGML_ROWS ? (int)(left + 1) / 2 : (int)left;
#else
  return left > 2 ? GGML_ROWS : (int)left;
#endif
}

/* What sums of inputs are multiplied by before products begin with them: the offset of most forms with groups of 32 that have one,
   and of Q6_K with groups of 16, so that these take one instruction for it. Other offsets are a power of two less. */
enum { LESS_TIMES = 128, HALF_LESS_TIMES = 32 };

/* Inputs in 8 bits: numbers [rows, padded], and the same in the order in which weights of 8 bits are multiplied by them;
   [groups, rows] scales for each 32 of a row, and for each 32 and each 16 the sum of the numbers, negated, LESS_TIMES and
   HALF_LESS_TIMES, and the sum times the scale; or, AS_FLOATS, [rows, padded]. There are rows for a whole tile; ggml_inputs_size
   of structures.py is the size of their memory. */
typedef struct {
  int kind;
  float *whole;
  int8_t *numbers;
  byte_input *of_bytes;
  float *scales, *sums, *half_sums;
  int32_t *less, *half_less;
  long rows, padded;
} ggml_inputs;

static ggml_inputs ggml_inputs_in(void *memory, long rows, long ins, int kind) {
  const long padded = (ins + GGML_PAD - 1) / GGML_PAD * GGML_PAD, groups = padded / GGML_GROUP;
  ggml_inputs made;
  made.kind = kind;
  made.rows = rows > ggml_tile_rows(rows) ? rows : ggml_tile_rows(rows);
  made.padded = padded;
  made.numbers = (int8_t *)(((uintptr_t)memory + 63) / 64 * 64);
  made.whole = (float *)made.numbers;
  made.scales = (float *)(made.numbers + made.rows * padded);
  made.sums = made.scales + made.rows * groups;
  made.half_sums = made.sums + made.rows * groups;
  made.less = (int32_t *)(made.half_sums + made.rows * 2 * groups);
  made.half_less = made.less + made.rows * groups;
  made.of_bytes = HALVES ? (byte_input *)(made.half_less + made.rows * 2 * groups) : (byte_input *)made.numbers;
  return made;
}

static void ggml_clear_beyond(const ggml_inputs *x, long rows) {
  const size_t more = (size_t)(x->rows - rows), groups = (size_t)x->padded / GGML_GROUP;
  if (x->kind == AS_FLOATS) {
    memset(x->whole + rows * x->padded, 0, more * (size_t)x->padded * sizeof(float));
    return;
  }
  memset(x->numbers + rows * x->padded, 0, more * (size_t)x->padded);
  if (HALVES) memset(x->of_bytes + rows * x->padded, 0, more * (size_t)x->padded * sizeof(byte_input));
  for (size_t g = 0; g < groups; g++) {
    const long at = (long)g * x->rows + rows;
    memset(x->scales + at, 0, more * sizeof(float));
    memset(x->sums + at, 0, more * sizeof(float));
    memset(x->less + at, 0, more * sizeof(int32_t));
  }
  for (size_t g = 0; g < 2 * groups; g++) {
    const long at = (long)g * x->rows + rows;
    memset(x->half_sums + at, 0, more * sizeof(float));
    memset(x->half_less + at, 0, more * sizeof(int32_t));
  }
}

/* Bits that the numbers of a form need once places are looked up: products of 8 bits are other ones. */
INLINE int ggml_bits(ggml_form f) { return f.places == 1 ? 8 : f.places == 2 ? 5 : f.bits; }

/* The line of a group that numbers 4 t to 4 t + 3 begin in; and these numbers of each output, from its lines. */
INLINE long ggml_line(ggml_form f, const int t) { return 64 * (f.bits == 8 ? t : f.bits == 2 ? 0 : t / 2); }
INLINE units ggml_unit(ggml_form f, units halves, units higher, const int t) {
  if (f.bits == 2) return quarters(halves, t);
  const units lower = t % 2 ? upper_halves(halves) : lower_halves(halves);
  if (f.places) return looked_up(GGML_PLACES[f.places - 1], lower);
  if (f.bits == 5) return or_units(lower, chosen_bits(higher, 4 - t, 0x10));
  if (f.bits == 6) return or_units(lower, chosen_bits(higher, 4 - 2 * t, 0x30));
  return lower;
}

INLINE floats ggml_sixteen_steps(ggml_form f, const uint8_t *steps, long g) {
  if (f.is_whole) return load_float((const float *)steps);
  return f.is_wide ? load_bfloat16((const bfloat16 *)(steps + 32 * g)) : load_half(steps + 32 * g);
}

/* What a piece's steps have in common where bytes multiply them. */
typedef struct {
  floats step, lowest;
} ggml_piece_steps;
INLINE ggml_piece_steps ggml_steps_of(ggml_form f, const uint8_t *steps) {
  ggml_piece_steps made = {zeros(), zeros()};
  if (f.by_byte) made.step = load_half(steps);
  if (f.by_byte && f.has_least) made.lowest = load_half(steps + 32);
  return made;
}
/* The scales and the least values of a group of a piece. */
INLINE floats ggml_scale(ggml_form f, const uint8_t *steps, ggml_piece_steps piece, long g) {
  const uint8_t *bytes = steps + 32 * (1 + f.has_least) + LANES * g;
  if (!f.by_byte) return ggml_sixteen_steps(f, steps, g);
  return mul(piece.step, f.is_signed ? load_signed_bytes((const int8_t *)bytes) : load_bytes(bytes));
}
INLINE floats ggml_least(ggml_form f, const uint8_t *steps, ggml_piece_steps piece, long g) {
  if (!f.by_byte) return load_half(steps + 32 * (f.groups + g));
  return mul(piece.lowest, load_bytes(steps + 64 + LANES * (f.groups + g)));
}

/* `ggml_tile` with levels, and with inputs as they are. Inputs of a group take turns among sums, so that additions need not wait
   for one another, and these are multiplied by its scale. */
INLINE void ggml_levels_tile(const ggml_inputs *x, const uint8_t *w, long ins, long row, floats *sums, const int rows,
                             const int blocks, const ggml_form f) {
  const long next = ggml_block_size(f, ins), pieces = next / ggml_piece_size(f);
  const levels table = load_levels(GGML_LEVELS[f.levels - 1]);
  floats sum[8][4];
#pragma GCC unroll 8
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++) sum[m][b] = zeros();
  for (long piece = 0; piece < pieces; piece++) {
    const uint8_t *steps = w + piece * ggml_piece_size(f), *body = steps + ggml_steps(f);
    const float *inputs = x->whole + row * x->padded + piece * f.group;
    const long ahead = ahead_of(w + next - body - ggml_numbers(f), (blocks - 1) * next);
    floats part[8][4][GGML_CHAINS];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
      for (int b = 0; b < blocks; b++)
#pragma GCC unroll 2
        for (int chain = 0; chain < GGML_CHAINS; chain++) part[m][b][chain] = zeros();
    for (long line = 0; line < f.group / 8; line++, inputs += 8) {
      units places[4];
      floats made[8][4];
#pragma GCC unroll 4
      for (int b = 0; b < blocks; b++) {
        places[b] = load_units(body + b * next + 64 * line);
        __builtin_prefetch(body + b * next + 64 * line + ahead);
      }
      if (rows >= GGML_ROWS_OF_KEPT_LEVELS) {
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++)
#pragma GCC unroll 4
          for (int b = 0; b < blocks; b++) made[k][b] = level_of(table, places[b], 8 * (k % 4) + 4 * (k / 4));
        KEPT(made);
      }
#pragma GCC unroll 8
      for (int k = 0; k < 8; k++) {
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++) {
          const floats level = rows >= GGML_ROWS_OF_KEPT_LEVELS ? made[k][b]
                                                                : level_of(table, places[b], 8 * (k % 4) + 4 * (k / 4));
#pragma GCC unroll 8
          for (int m = 0; m < rows; m++)
            part[m][b][k % GGML_CHAINS] =
                multiply_add(level, splat(inputs[m * x->padded + k]), part[m][b][k % GGML_CHAINS]);
        }
      }
    }
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++) {
      const floats scale = ggml_sixteen_steps(f, steps + b * next, 0);
      __builtin_prefetch(steps + b * next + ahead);
#pragma GCC unroll 8
      for (int m = 0; m < rows; m++) {
        const floats whole = GGML_CHAINS > 1 ? add(part[m][b][0], part[m][b][GGML_CHAINS - 1]) : part[m][b][0];
        sum[m][b] = multiply_add(whole, scale, sum[m][b]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++) sums[m * blocks + b] = sum[m][b];
}

/* `ggml_tile` with weights that are floats, and with inputs as they are; inputs take turns among sums. */
INLINE void ggml_floats_tile(const ggml_inputs *x, const uint8_t *w, long ins, long row, floats *sums, const int rows,
                             const int blocks, const ggml_form f) {
  const long next = ggml_block_size(f, ins);
  const float *inputs[8];
  floats sum[8][4][GGML_CHAINS];
#pragma GCC unroll 8
  for (int m = 0; m < rows; m++) {
    inputs[m] = x->whole + (row + m) * x->padded;
    __asm__("" : "+r"(inputs[m])); /* as in ggml_tile */
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++)
#pragma GCC unroll 2
      for (int chain = 0; chain < GGML_CHAINS; chain++) sum[m][b][chain] = zeros();
  }
  for (long start = 0; start < next / 32; start += 8) {
    const uint8_t *body = w + 32 * start;
    const long ahead = ahead_of(w + next - body, (blocks - 1) * next);
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) {
#pragma GCC unroll 4
      for (int b = 0; b < blocks; b++) {
        const uint8_t *at = body + b * next + 32 * k;
        if (k % 2 == 0) __builtin_prefetch(at + ahead);
        const floats weights = f.is_wide ? load_bfloat16((const bfloat16 *)at) : load_half(at);
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++)
          sum[m][b][k % GGML_CHAINS] = multiply_add(weights, splat(inputs[m][start + k]), sum[m][b][k % GGML_CHAINS]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++)
      sums[m * blocks + b] = GGML_CHAINS > 1 ? add(sum[m][b][0], sum[m][b][GGML_CHAINS - 1]) : sum[m][b][0];
}

/* Outputs of some rows of inputs and some neighbouring blocks of 16 outputs: sums [rows, blocks]. */
INLINE void ggml_tile(const ggml_inputs *x, const uint8_t *w, long ins, long row, floats *sums, const int rows,
                      const int blocks, const ggml_form f) {
  const long next = ggml_block_size(f, ins), pieces = next / ggml_piece_size(f);
  const long halves = f.group < GGML_GROUP ? 2 : 1;
  const int bits = ggml_bits(f), offset = bits < 8 ? f.offset : f.offset - BYTE_OFFSET;
  floats sum[8][4];
#pragma GCC unroll 8
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++) sum[m][b] = zeros();
  for (long piece = 0; piece < pieces; piece++) {
    const uint8_t *steps = w + piece * ggml_piece_size(f);
    for (long ahead = 0; ahead < ggml_steps(f); ahead += 64)
#pragma GCC unroll 4
      for (int b = 0; b < blocks; b++)
        fetch_ahead(steps + b * next + ahead + ahead_of_blocks(w + next - steps - ahead, next, blocks), 0);
    ggml_piece_steps in_common[4];
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++) in_common[b] = ggml_steps_of(f, steps + b * next);
    for (long g = 0; g < f.groups; g++) {
      const uint8_t *body = steps + ggml_steps(f) + g * ggml_numbers(f);
      const long first_input = row * x->padded + piece * ggml_piece(f) + g * f.group;
      const long ahead = ahead_of_blocks(w + next - body - ggml_numbers(f), next, blocks);
      const long of_row = piece * ggml_piece(f) / f.group + g;
      units total[8][4], dots[8][4]; /* totals begin with minus the offset times the sum of the inputs */
      const int8_t *inputs[8];
#pragma GCC unroll 8
      for (int m = 0; m < rows; m++) {
        const long place = first_input + m * x->padded;
        inputs[m] = bits == 8 ? (const int8_t *)(x->of_bytes + place) : x->numbers + place;
        __asm__("" : "+r"(inputs[m])); /* one register for each row; else GCC computes an address for each unit of each */
        units first = no_units();
        if (offset) {
          const int32_t *less = halves > 1 ? x->half_less : x->less;
          const int times = halves > 1 ? HALF_LESS_TIMES : LESS_TIMES;
          first = shifted_down(splat_unit(less + of_row * x->rows + row + m), __builtin_ctz((unsigned)(times / offset)));
        }
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++) {
          total[m][b] = first;
          dots[m][b] = opened_dots(first);
        }
      }
      units higher[4];
      if (f.bits == 5 || f.bits == 6)
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++) {
          higher[b] = load_units(body + b * next + 8 * f.group);
          fetch_ahead(body + b * next + 8 * f.group + ahead, 0);
        }
#pragma GCC unroll 8
      for (int t = 0; t < f.group / 4; t++) {
        const long line = ggml_line(f, t);
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++) {
          const units taken = load_units(body + b * next + line);
          if (t == 0 || line != ggml_line(f, t - 1)) fetch_ahead(body + b * next + line + ahead, 0);
          const units weights = f.bits == 8 ? taken : ggml_unit(f, taken, higher[b], t);
          if (bits == 8) {
#pragma GCC unroll 2
            for (int step = 0; step < BYTE_STEPS; step++) {
              if (step) READ_AGAIN;
              const units bytes = bytes_of_step(weights, step);
#pragma GCC unroll 8
              for (int m = 0; m < rows; m++)
                total[m][b] = add_byte_dot(total[m][b], bytes, splat_unit(inputs[m] + 4 * (BYTE_STEPS * t + step)));
            }
            continue;
          }
#pragma GCC unroll 8
          for (int m = 0; m < rows; m++) {
            dots[m][b] = add_dot(dots[m][b], weights, splat_unit(inputs[m] + 4 * t));
            if ((t + 1) % steps_of_halves(bits) == 0 || t == f.group / 4 - 1) {
              total[m][b] = closed_dots(total[m][b], dots[m][b]);
              dots[m][b] = opened_dots(total[m][b]);
            }
          }
        }
      }
#pragma GCC unroll 4
      for (int b = 0; b < blocks; b++) {
        const floats scale = ggml_scale(f, steps + b * next, in_common[b], g);
        const floats least = f.has_least ? ggml_least(f, steps + b * next, in_common[b], g) : zeros();
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
          const float *of_inputs = (halves > 1 ? x->half_sums : x->sums) + of_row * x->rows + row;
          const floats whole = mul(from_units(total[m][b]), splat(x->scales[of_row / halves * x->rows + row + m]));
          sum[m][b] = multiply_add(whole, scale, sum[m][b]);
          if (f.has_least) sum[m][b] = multiply_add(least, splat(of_inputs[m]), sum[m][b]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++) sums[m * blocks + b] = sum[m][b];
}

typedef void (*ggml_tile_fn)(const ggml_inputs *, const uint8_t *, long, long, floats *);
#define TILE(form, rows, blocks)                                                                                          \
  static void ggml_tile_##form##_##rows##_##blocks(const ggml_inputs *x, const uint8_t *w, long ins, long row, floats *sums) { \
    if (ggml_forms[form].bits == 16)                                                                                      \
      ggml_floats_tile(x, w, ins, row, sums, rows, blocks, ggml_forms[form]);                                             \
    else if (ggml_forms[form].levels)                                                                                     \
      ggml_levels_tile(x, w, ins, row, sums, rows, blocks, ggml_forms[form]);                                             \
    else                                                                                                                  \
      ggml_tile(x, w, ins, row, sums, rows, blocks, ggml_forms[form]);                                                    \
  }
#define TILES(form, ...) GGML_TILES(TILE, form)
GGML_FORMS(TILES)
#undef TILES
#undef TILE
#define NAMED(form, rows, blocks) [rows][blocks] = ggml_tile_##form##_##rows##_##blocks,
#define TILES(form, ...) [form] = {GGML_TILES(NAMED, form)},
static const ggml_tile_fn ggml_tiles[GGML_FORM_COUNT][GGML_ROWS + 1][5] = {GGML_FORMS(TILES)};
#undef TILES
#undef NAMED

#ifdef WITH_AMX
#include "matrix_bytes.h"
#endif

/* How many rows take turns with each weight that is read: their inputs stay near the processor. */
static long ggml_rows_together(const ggml_inputs *x) {
  const long near = (1 << (x->kind == AS_FLOATS ? 16 : 18)) / x->padded;
#ifdef WITH_AMX
  if (x->kind != AS_FLOATS) return OPENED_ROWS;
#endif
  return near > GGML_ROWS ? near / GGML_ROWS * GGML_ROWS : GGML_ROWS;
}
