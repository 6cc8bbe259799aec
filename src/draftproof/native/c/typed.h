/* The operations of a decoder layer on rows of one type, included once for each type with
     ELEM                 the type of an element
     UNIT                 elements in four bytes
     NAME(x)              x with the type's suffix
   defined. Where transformers' operations round to the rows' type between two steps, these do; sums are float32 always.

   Products read weights once, in the order in which they lie in memory: as [out / 16][in / UNIT][16][UNIT], so that 64
   bytes are what one step multiplies. Outputs are padded with zeros to a multiple of sixteen, and inputs to one of UNIT; rows
   have no padding.

   Each output is one chain of sums over its inputs, in order, whatever the rows beside it and however the work is
   divided: a row's product does not depend on the batch. It is rounded once, at the end. */

/* --- products ---------------------------------------------------------------------------------------------------- */

enum { NAME(WIDTH) = LANES * UNIT }; /* elements of a vector */

typedef struct {
  const ELEM *x, *w, *bias, *onto;
  ELEM *y;
  long rows, outs, ins;
} NAME(product);

/* Inputs of a weight, with padding. */
INLINE long NAME(deep)(long ins) { return (ins + UNIT - 1) / UNIT * UNIT; }

/* One element, and zeros in the rest of each unit: the last input of a row where these are no multiple of UNIT. */
INLINE units NAME(splat_one)(const ELEM *at) {
  const ELEM unit[UNIT] = {*at};
  return splat_unit(unit);
}

/* Sixteen sums of a row become outputs: with the bias, rounded, and added to `onto`, where there are these. */
INLINE void NAME(write)(floats sum, const ELEM *bias, const ELEM *onto, ELEM *y, long row, long outs, long out) {
  const long place = row * outs + out, here = outs - out;
  floats made = bias ? add(sum, NAME(load_first)(bias + out, here)) : sum;
  if (onto) made = add(NAME(rounded)(made), NAME(load_first)(onto + place, here));
  NAME(store_first)(y + place, here, made);
}

#if defined(WITH_AMX) && UNIT == 2
#include "matrix_unit.h"
#else

INLINE void NAME(tile)(const NAME(product) * p, long row, long block, const int rows, const int blocks) {
  const long deep = NAME(deep)(p->ins);
  const ELEM *x = p->x + row * p->ins, *w = p->w + block * deep * LANES;
  floats sum[TILE_ROWS][4];
#pragma GCC unroll 12
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++) sum[m][b] = zeros();
  const long line = LANES * (long)sizeof *w;
  for (long k = 0; k + UNIT <= p->ins; k += UNIT) {
    const long ahead = ahead_of((deep - k) * line, (blocks - 1) * deep * line);
    units weight[4];
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++) {
      const ELEM *at = w + b * deep * LANES + k * LANES;
      weight[b] = load_units(at);
      fetch_ahead((const char *)at + ahead, blocks == 1);
    }
#pragma GCC unroll 12
    for (int m = 0; m < rows; m++) {
      const units input = splat_unit(x + m * p->ins + k);
#pragma GCC unroll 4
      for (int b = 0; b < blocks; b++) sum[m][b] = NAME(add_product)(sum[m][b], weight[b], input);
    }
  }
  if (p->ins < deep)
#pragma GCC unroll 12
    for (int m = 0; m < rows; m++) {
      const units input = NAME(splat_one)(x + m * p->ins + p->ins - 1);
#pragma GCC unroll 4
      for (int b = 0; b < blocks; b++)
        sum[m][b] = NAME(add_product)(sum[m][b], load_units(w + (b * deep + p->ins - 1) * LANES), input);
    }
#pragma GCC unroll 4
  for (int b = 0; b < blocks; b++)
#pragma GCC unroll 12
    for (int m = 0; m < rows; m++)
      NAME(write)(sum[m][b], p->bias, p->onto, p->y, row + m, p->outs, (block + b) * LANES);
}

#if defined(WITH_WIDE) && UNIT == 2
#include "wide_products.h"
#else

/* A function for each number of rows and blocks, so that sums stay in registers. */
typedef void (*NAME(tile_fn))(const NAME(product) *, long, long);
#define TILE(m, b) \
  static void NAME(tile_##m##_##b)(const NAME(product) * p, long row, long block) { NAME(tile)(p, row, block, m, b); }
#define NAMED(m, b) [b][m] = NAME(tile_##m##_##b),
PRODUCT_TILES(TILE)
static const NAME(tile_fn) NAME(tiles)[5][TILE_ROWS + 1] = {PRODUCT_TILES(NAMED)};
#undef NAMED
#undef TILE

/* Some blocks of outputs for all rows: a block's weights are read from memory once and serve every tile of rows. */
static void NAME(blocks_of)(const NAME(product) * p, long start, long stop) {
  const long tiles = (p->rows + TILE_ROWS - 1) / TILE_ROWS, most = (p->rows + tiles - 1) / tiles;
  while (start < stop) {
    const long blocks = blocks_beside(most, stop - start);
    for (long t = 0, row = 0; t < tiles; t++) {
      const long end = p->rows * (t + 1) / tiles;
      NAME(tiles)[blocks][end - row](p, row, start);
      row = end;
    }
    start += blocks;
  }
}

#endif /* WITH_WIDE */
#endif /* WITH_AMX */

static void NAME(share_product)(void *given) {
  const NAME(product) *p = given;
  const long blocks = (p->outs + LANES - 1) / LANES, number = thread_number(), count = thread_count();
  NAME(blocks_of)(p, blocks * number / count, blocks * (number + 1) / count);
}

/* y [rows, outs] = x [rows, ins] w^T (+ bias), rounded (+ onto [rows, outs], rounded again). */
void NAME(draftproof_product)(const ELEM *x, const ELEM *w, const ELEM *bias, const ELEM *onto, ELEM *y, long rows,
                              long outs, long ins, long threads) {
  NAME(product) p = {x, w, bias, onto, y, rows, outs, ins};
  if (rows < 1) return;
  if (threads > 1 && rows * outs * ins > SMALL)
    parallel(NAME(share_product), &p, (unsigned)threads, 0);
  else
    NAME(blocks_of)(&p, 0, (outs + LANES - 1) / LANES);
}

#include "quantized.h"
#include "ggml_product.h"
#include "rows.h"

/* --- rows -------------------------------------------------------------------------------------------------------- */

typedef struct {
  const ELEM *x;
  ELEM *y;
  long rows, dim, activation;
} NAME(gate_work);

static void NAME(norm_row)(const ELEM *x, const float *scaled, ELEM *y, long dim, float least) {
  floats squares = zeros();
  for (long i = 0; i < dim; i += LANES) {
    const floats v = NAME(load_first)(x + i, dim - i);
    squares = multiply_add(v, v, squares);
  }
  const floats length = splat(sqrtf(sum_of(squares) + least));
  for (long i = 0; i < dim; i += LANES) {
    const floats v = mul(NAME(load_first)(x + i, dim - i), load_first_float(scaled + i, dim - i));
    NAME(store_first)(y + i, dim - i, quotient(v, length));
  }
}

/* gelu by tanh is x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), silu the same with x in place of 2 u. That of
   gpt-oss is x / (1 + exp(-1.702 x)) times up + 1, with x at most 7, and up from -7 to 7. */
INLINE void NAME(gated_row)(const NAME(gate_work) * w, long row, const int activation) {
  const ELEM *gate = w->x + 2 * row * w->dim, *up = gate + w->dim;
  ELEM *y = w->y + row * w->dim;
  const floats one = splat(1.0f), most = splat(7.0f);
  for (long i = 0; i < w->dim; i += LANES) {
    const long here = w->dim - i;
    floats v = NAME(load_first)(gate + i, here), by = NAME(load_first)(up + i, here), inner = v;
    if (activation == GELU) inner = mul(v, multiply_add(mul(v, v), splat(0.0713548163f), splat(1.59576912f)));
    if (activation == CLAMPED) {
      v = smaller(most, v); /* NaN stays */
      by = add(larger(sub(zeros(), most), smaller(most, by)), one);
      inner = mul(v, splat(1.702f));
    }
    const floats act = quotient(v, add(one, exponential(sub(zeros(), inner))));
    NAME(store_first)(y + i, here, mul(NAME(rounded)(act), by));
  }
}

static void NAME(gated_rows)(const NAME(gate_work) * w, long start, long stop) {
#define RUN(kind) \
  if (w->activation == kind) \
    for (long row = start; row < stop; row++) NAME(gated_row)(w, row, kind);
  RUN(SILU) RUN(GELU) RUN(CLAMPED)
#undef RUN
}

typedef struct {
  const ELEM *x;
  const float *scaled;
  ELEM *y;
  long rows, dim;
  float least;
} NAME(norm_work);

static void NAME(share_norm)(void *given) {
  const NAME(norm_work) *w = given;
  const long number = thread_number(), count = thread_count();
  for (long row = w->rows * number / count; row < w->rows * (number + 1) / count; row++)
    NAME(norm_row)(w->x + row * w->dim, w->scaled, w->y + row * w->dim, w->dim, w->least);
}

/* x scaled / sqrt(sum x^2 + least) of each row; y may be x. */
void NAME(draftproof_norm)(const ELEM *x, const float *scaled, ELEM *y, long rows, long dim, float least,
                           long threads) {
  NAME(norm_work) w = {x, scaled, y, rows, dim, least};
  if (threads > 1 && rows * dim > SMALL / 4)
    parallel(NAME(share_norm), &w, (unsigned)threads, 0);
  else
    for (long row = 0; row < rows; row++) NAME(norm_row)(x + row * dim, scaled, y + row * dim, dim, least);
}

static void NAME(share_gated)(void *given) {
  const NAME(gate_work) *w = given;
  const long number = thread_number(), count = thread_count();
  NAME(gated_rows)(w, w->rows * number / count, w->rows * (number + 1) / count);
}

/* act(gate) up of each row [gate, up]; dim is that of each half. */
void NAME(draftproof_gated)(const ELEM *x, ELEM *y, long rows, long dim, long activation, long threads) {
  NAME(gate_work) w = {x, y, rows, dim, activation};
  if (threads > 1 && rows * dim > SMALL / 16)
    parallel(NAME(share_gated), &w, (unsigned)threads, 0);
  else
    NAME(gated_rows)(&w, 0, rows);
}

typedef struct {
  ELEM *x, *y;
  const float *scaled; /* a norm, or 0 */
  long rows, dim;
  float least, factor;
} NAME(join_work);

/* x + factor y, with y normed before where there is a norm; rounded as three operations. */
static void NAME(join_rows)(const NAME(join_work) * w, long start, long stop) {
  const floats by = splat(w->factor);
  for (long row = start; row < stop; row++) {
    ELEM *x = w->x + row * w->dim, *y = w->y + row * w->dim;
    if (w->scaled) NAME(norm_row)(y, w->scaled, y, w->dim, w->least);
    for (long i = 0; i < w->dim; i += LANES) {
      const floats v = NAME(rounded)(mul(NAME(load_first)(y + i, w->dim - i), by));
      NAME(store_first)(x + i, w->dim - i, add(NAME(load_first)(x + i, w->dim - i), v));
    }
  }
}

static void NAME(share_join)(void *given) {
  const NAME(join_work) *w = given;
  const long number = thread_number(), count = thread_count();
  NAME(join_rows)(w, w->rows * number / count, w->rows * (number + 1) / count);
}

/* Whether each row's largest number is finite and none is NaN: then a distribution follows from it. */
int NAME(draftproof_legal)(const ELEM *x, long rows, long dim) {
  const floats high = splat(INFINITY), low = splat(-INFINITY);
  for (long row = 0; row < rows; row++, x += dim) {
    floats top = low;
    int wrong = 0;
    for (long i = 0; i < dim; i += LANES) {
      const floats v = NAME(load_first)(x + i, dim - i);
      wrong |= any_not_below(dim - i, v, high);
      top = larger(top, first_of(dim - i, v, low));
    }
    if (wrong || largest_of(top) == -INFINITY) return 0;
  }
  return 1;
}

/* --- attention --------------------------------------------------------------------------------------------------- */

/* The same fields as `AttentionArguments` in native/structures.py. */
typedef struct {
  ELEM *fused;            /* [tokens, heads + 2 own, dim]; queries are rotated in place */
  const ELEM *cos, *sin;  /* of each token, `angles` apart; sin with the sign of rotate_half */
  void *keys, *values;    /* [slots, key_heads, capacity, dim]: int8 where there are scales, else bfloat16 where `halved` is not
                             0, else of the rows' type */
  float *scales;          /* [slots, 2 key_heads, capacity]: of each head's keys, and behind them of its values; or 0 */
  const int64_t *places;  /* slot, first position, width and first token of each row; rows are in the order of tokens */
  const int64_t *visible; /* [tokens]: slots that a token may see, before the mask */
  const ELEM *mask;       /* [tokens, horizon], added to scores; 0 for none */
  ELEM *out;              /* [tokens, heads, dim] */
  float *scratch;         /* for each thread, or for each span of a tile, `scratch_size` floats; then the outcomes of spans */
  const float *sinks;     /* of each head a score without a value, or 0 */
  long rows, tokens, heads, key_heads, dim, capacity, horizon, angles; /* tokens of all rows, with padding */
  long columns, scratch_size; /* columns of a row that attend at once */
  long copied, held;          /* where a thread's copy of queries begins in its scratch, and outcomes of a tile */
  long outcomes, divided;     /* where the outcomes of spans begin; which of DIVISIONS */
  long own;                   /* heads of new keys and values: all key heads, or 0 where others have written them */
  long halved;                /* where queries and outputs in bfloat16 begin in scratch, for float32 rows whose keys and values
                                 have fewer bits, and whose mask is bfloat16; else 0 */
  float scale, cap; /* cap: scores become cap tanh(score / cap), before the mask; 0 for none */
} NAME(attention);

/* The rotary embedding of one head, rounded as in transformers; in place, or into the cache. */
static void NAME(turn)(long dim, const ELEM *x, ELEM *into, const ELEM *cos, const ELEM *sin) {
  const long half = dim / 2;
  for (long i = 0; i < half; i += LANES) {
    const long here = half - i;
    const floats low = NAME(load_first)(x + i, here), high = NAME(load_first)(x + half + i, here);
    const floats first = NAME(rounded)(mul(low, NAME(load_first)(cos + i, here)));
    const floats second = NAME(rounded)(mul(high, NAME(load_first)(cos + half + i, here)));
    NAME(store_first)(into + i, here, multiply_add(high, NAME(load_first)(sin + i, here), first));
    NAME(store_first)(into + half + i, here, multiply_add(low, NAME(load_first)(sin + half + i, here), second));
  }
  if (dim % 2) /* has no partner */
    NAME(store_first)(into + dim - 1, 1, mul(NAME(load_first)(x + dim - 1, 1), NAME(load_first)(cos + dim - 1, 1)));
}

/* A head as float32, with zeros up to whole vectors. */
INLINE void NAME(widen)(const ELEM *x, float *into, long dim) {
  for (long i = 0; i < dim; i += LANES) store_float(into + i, NAME(load_first)(x + i, dim - i));
}

/* A turned query for keys of 8 bits. */
static void NAME(hadamard_query)(const NAME(attention) * a, ELEM *query) {
  float mixed[MOST_DIM];
  NAME(widen)(query, mixed, a->dim);
  hadamard(mixed, a->dim);
  const floats by = splat(1.0f / hadamard_size(a->dim)); /* a power of two */
  for (long i = 0; i < a->dim; i += LANES)
    NAME(store_first)(query + i, a->dim - i, mul(load_float(mixed + i), by));
}

/* Write a turned key and a value of 8 bits to a place of a slot. */
static void NAME(store_bytes)(const NAME(attention) * a, long slot, long head, long place, const ELEM *key,
                              const ELEM *value) {
  const long at = ((slot * a->key_heads + head) * a->capacity + place) * a->dim;
  float *scales = a->scales + (2 * slot * a->key_heads + head) * a->capacity + place, numbers[MOST_DIM];
  NAME(widen)(key, numbers, a->dim);
  hadamard(numbers, a->dim);
  scales[0] = round_to_bytes(numbers, (int8_t *)a->keys + at, a->dim);
  NAME(widen)(value, numbers, a->dim);
  scales[a->key_heads * a->capacity] = round_to_bytes(numbers, (int8_t *)a->values + at, a->dim);
}

#if UNIT == 1
/* Numbers of a head in bfloat16. */
static void halve(const float *x, bfloat16 *to, long dim) {
  for (long i = 0; i < dim; i += LANES) store_first_bfloat16(to + i, dim - i, load_first_float(x + i, dim - i));
}

INLINE bfloat16 *halved_queries(const attention_float *a) { return (bfloat16 *)(a->scratch + a->halved); }
INLINE bfloat16 *halved_outputs(const attention_float *a) { return halved_queries(a) + a->tokens * a->heads * a->dim; }
#endif

/* Rotate queries and keys of some tokens, and write keys and values to the cache; padding is not written. */
static void NAME(store_tokens)(const NAME(attention) * a, long start, long stop) {
  const long stride = (a->heads + 2 * a->own) * a->dim;
  for (long row = 0; row < a->rows; row++) {
    const int64_t *place = a->places + 4 * row;
    const long from = place[3] > start ? place[3] : start, end = place[3] + place[2];
    for (long token = from; token < (end < stop ? end : stop); token++) {
      const long column = token - place[3];
      ELEM *fused = a->fused + token * stride;
      const ELEM *cos = a->cos + token * a->angles, *sin = a->sin + token * a->angles;
      for (long head = 0; head < a->heads; head++) {
        ELEM *query = fused + head * a->dim;
        NAME(turn)(a->dim, query, query, cos, sin);
        if (a->scales) NAME(hadamard_query)(a, query);
#if UNIT == 1
        if (a->halved) halve(query, halved_queries(a) + (token * a->heads + head) * a->dim, a->dim);
#endif
      }
      for (long head = 0; head < a->own; head++) {
        const long at = ((place[0] * a->key_heads + head) * a->capacity + place[1] + column) * a->dim;
        const ELEM *value = fused + (a->heads + a->key_heads + head) * a->dim;
        ELEM turned[MOST_DIM], *key = a->scales || a->halved ? turned : (ELEM *)a->keys + at;
        NAME(turn)(a->dim, fused + (a->heads + head) * a->dim, key, cos, sin);
#if UNIT == 1
        if (a->halved && !a->scales) {
          halve(key, (bfloat16 *)a->keys + at, a->dim);
          halve(value, (bfloat16 *)a->values + at, a->dim);
          continue;
        }
#endif
        if (a->scales)
          NAME(store_bytes)(a, place[0], head, place[1] + column, key, value);
        else
          memcpy((ELEM *)a->values + at, value, (size_t)a->dim * sizeof(ELEM));
      }
    }
  }
}

/* The outputs of padding become zero. */
static void NAME(clear_padding)(const NAME(attention) * a) {
  long read = 0;
  for (long row = 0; row < a->rows; row++) read += a->places[4 * row + 2];
  if (read < a->tokens) memset(a->out, 0, (size_t)(a->tokens * a->heads * a->dim) * sizeof(ELEM));
}

static void NAME(share_tokens)(void *given) {
  const NAME(attention) *a = given;
  const long tokens = a->tokens, number = thread_number(), count = thread_count();
  NAME(store_tokens)(a, tokens * number / count, tokens * (number + 1) / count);
}

/* A whole vector at a place of the cache. Where it would reach beyond `end`, that of a copy in `copied`, with zeros behind;
   elsewhere it may reach into the next position, whose numbers are not used. */
INLINE const ELEM *NAME(whole_vector)(const ELEM *at, const ELEM *end, ELEM *copied) {
  if (end - at >= NAME(WIDTH)) return at;
  memset(copied, 0, NAME(WIDTH) * sizeof *at);
  return memcpy(copied, at, (size_t)(end - at) * sizeof *at);
}

/* The size of a head in whole vectors. */
INLINE long NAME(rounded_dim)(long dim) { return (dim + NAME(WIDTH) - 1) / NAME(WIDTH) * NAME(WIDTH); }

/* Sixteen keys (the last one again where there are fewer) with their inputs' units beside one another:
   [dim / UNIT][16][UNIT], as a block of weights lies. */
static void NAME(transpose_whole)(const ELEM *keys, long dim, long count, units *out) {
  for (long unit = 0; unit < dim / UNIT; unit += LANES) {
    for (long key = 0; key < LANES; key++) {
      const ELEM *at = keys + (key < count ? key : count - 1) * dim + UNIT * unit;
      out[unit + key] = load_units(at);
      __builtin_prefetch((const char *)(at + 2 * UNIT * LANES * dim));
    }
    exchange(out + unit);
  }
}

/* The same where heads are no whole vectors, with zeros up to whole ones. */
static __attribute__((noinline)) void NAME(transpose_partial)(const ELEM *keys, const ELEM *end, long dim, long count, units *out) {
  for (long unit = 0; unit * UNIT < dim; unit += LANES) {
    for (long key = 0; key < LANES; key++) {
      const ELEM *at = keys + (key < count ? key : count - 1) * dim + UNIT * unit;
      ELEM copied[NAME(WIDTH)];
      out[unit + key] = load_units(NAME(whole_vector)(at, end, copied));
      __builtin_prefetch((const char *)(at + 2 * UNIT * LANES * dim));
    }
    exchange(out + unit);
  }
  ELEM last[NAME(WIDTH)];
  store_units(last, out[dim / UNIT]);
  for (long i = 0; i < NAME(WIDTH); i++)
    if (i % UNIT >= dim % UNIT) last[i] = 0;
  out[dim / UNIT] = load_units(last);
  for (long unit = dim / UNIT + 1; unit < NAME(rounded_dim)(dim) / UNIT; unit++) out[unit] = no_units();
}

/* The same of 8 bits, widened without their scales; what is behind a head is finite, and multiplied by zeros or not at all. */
static void NAME(transpose_bytes)(const int8_t *keys, const int8_t *end, long dim, long count, units *out) {
  units block[MOST_DIM / 4];
  exchange_bytes(keys, end, dim, count, block);
  for (long i = 0; 4 * i < NAME(rounded_dim)(dim); i++) {
    floats numbers[4];
#pragma GCC unroll 4
    for (int byte = 0; byte < 4; byte++) numbers[byte] = signed_byte(block[i], byte);
#if UNIT == 1
    memcpy(out + 4 * i, numbers, sizeof numbers);
#else
    out[2 * i] = paired_bfloat16(numbers[0], numbers[1]);
    out[2 * i + 1] = paired_bfloat16(numbers[2], numbers[3]);
#endif
  }
}

/* What a query makes of some keys is an outcome: their largest score (-INFINITY: it sees none of them), the sum of their
   weights, which are exponentials of scores over it, and the sums of weighted values, from OUTCOME on. */
enum { NAME(OUTCOME) = LANES };
INLINE long NAME(outcome_size)(long dim) { return NAME(OUTCOME) + NAME(rounded_dim)(dim); }

/* The queries of one key head in some columns of a row, and a span of the keys that they see. A query is a column and one of
   the query heads of the key head; the heads of a column follow one another. */
typedef struct {
  const void *keys, *values;      /* [SPAN, dim], and on to their ends */
  const void *keys_end, *values_end;
  const float *key_scales, *value_scales; /* [SPAN], or 0 */
  long token, head, group;        /* the first column's, the first one of `group` query heads */
  long queries, start;            /* the span's first key */
  long most, padded;              /* keys of the span that one of the queries sees; a whole number of vectors of them */
  float *scores, *outcomes;       /* [queries, padded], and then the values' weights, rounded; of each query */
} NAME(query_tile);

/* Keys that one of a tile's columns sees. */
static long NAME(seen_by)(const NAME(attention) * a, long row, long first) {
  const int64_t *place = a->places + 4 * row;
  long most = 0;
  for (long column = first; column < place[2] && column < first + a->columns; column++)
    most = a->visible[place[3] + column] > most ? a->visible[place[3] + column] : most;
  return most;
}

/* Whether the mask hides a span's keys from all columns: those far behind a window. */
static int NAME(hides)(const NAME(attention) * a, const NAME(query_tile) * t, long count) {
  if (!a->mask) return 0;
  for (long token = t->token; token < t->token + t->queries / t->group; token++) {
    const ELEM *mask = a->mask + token * a->horizon + t->start;
    for (long key = 0; key < count; key += LANES)
      if (largest_of(first_of(count - key, NAME(load_first)(mask + key, count - key), splat(-INFINITY))) > UNSEEN) return 0;
  }
  return 1;
}

static NAME(query_tile) NAME(query_tile_of)(const NAME(attention) * a, long row, long head, long first, long start, long most,
                                            float *scratch, float *outcomes) {
  const int64_t *place = a->places + 4 * row;
  const long left = place[2] - first, columns = left < a->columns ? left : a->columns, group = a->heads / a->key_heads;
  const long of_key = a->dim * (a->scales ? 1 : (long)sizeof(ELEM)), size = a->capacity * of_key;
  const long at = (place[0] * a->key_heads + head) * size;
  NAME(query_tile) t = {.keys = (char *)a->keys + at + start * of_key, .values = (char *)a->values + at + start * of_key,
                        .keys_end = (char *)a->keys + at + size, .values_end = (char *)a->values + at + size,
                        .token = place[3] + first, .head = head * group, .group = group, .queries = columns * group,
                        .start = start, .scores = scratch, .outcomes = outcomes};
  if (a->scales) {
    t.key_scales = a->scales + (2 * place[0] * a->key_heads + head) * a->capacity + start;
    t.value_scales = t.key_scales + a->key_heads * a->capacity;
  }
  t.most = most - start < SPAN ? most - start : SPAN;
  if (NAME(hides)(a, &t, t.most)) t.most = 0;
  t.padded = (t.most + 2 * LANES - 1) / (2 * LANES) * 2 * LANES;
  return t;
}

INLINE float *NAME(outcome_of)(const NAME(attention) * a, const NAME(query_tile) * t, long query) {
  return t->outcomes + query * NAME(outcome_size)(a->dim);
}

INLINE const ELEM *NAME(query_of)(const NAME(attention) * a, const NAME(query_tile) * t, long query) {
  return a->fused + ((t->token + query / t->group) * (a->heads + 2 * a->own) + t->head + query % t->group) * a->dim;
}

INLINE ELEM *NAME(output_of)(const NAME(attention) * a, const NAME(query_tile) * t, long query) {
  return a->out + ((t->token + query / t->group) * a->heads + t->head + query % t->group) * a->dim;
}

/* Sixteen keys of a tile from `key` on, in the form of the first `transpose`. */
INLINE void NAME(transpose)(const NAME(attention) * a, const NAME(query_tile) * t, long key, long count, units *out) {
  const ELEM *keys = (const ELEM *)t->keys + key * a->dim;
  if (t->key_scales)
    NAME(transpose_bytes)((const int8_t *)t->keys + key * a->dim, t->keys_end, a->dim, count, out);
  else if (a->dim % NAME(WIDTH))
    NAME(transpose_partial)(keys, t->keys_end, a->dim, count, out);
  else
    NAME(transpose_whole)(keys, a->dim, count, out);
}

#if UNIT == 2 && (defined(WITH_WIDE) || !defined(WITH_BF16))
#define WIDENED /* bfloat16 numbers are multiplied as float32 ones (wide_products.h) */
#endif
#if UNIT == 1 || defined(WIDENED)
#define IN_FLOATS /* one number at a time, in float32; else UNIT of them */
typedef floats NAME(taken);
#else
typedef units NAME(taken);
#endif

/* Sixteen values of a key, or of two keys side by side, for the vectors from `first` to `last` after dimension `d`; where they
   are `partial`, as many as there are. Values of 8 bits are without their scales. */
INLINE void NAME(take_values)(const NAME(attention) * a, const NAME(query_tile) * t, long key, long other, long d,
                              const int first, const int last, const int partial, const int bytes, NAME(taken) * into) {
  if (bytes) {
    const int8_t *one = (const int8_t *)t->values + key * a->dim + d, *two = (const int8_t *)t->values + other * a->dim + d;
    int8_t copied[2][NAME(WIDTH)];
    if (partial) {
      one = whole_bytes(one, t->values_end, NAME(WIDTH), copied[0]);
      two = whole_bytes(two, t->values_end, NAME(WIDTH), copied[1]);
    }
#pragma GCC unroll 4
    for (int v = first; v < last; v++) {
      const floats number = load_signed_bytes(one + v * LANES);
#ifdef IN_FLOATS
      into[v - first] = number;
      (void)two;
#else
      into[v - first] = paired_bfloat16(number, load_signed_bytes(two + v * LANES));
#endif
      if (v % 4 == 0) __builtin_prefetch(one + v * LANES + 4 * LANES * a->dim);
    }
    return;
  }
  const ELEM *one = (const ELEM *)t->values + key * a->dim + d, *two = (const ELEM *)t->values + other * a->dim + d;
  ELEM copied[2][NAME(WIDTH)];
  if (partial) {
    one = NAME(whole_vector)(one, t->values_end, copied[0]);
    two = NAME(whole_vector)(two, t->values_end, copied[1]);
  }
#ifdef IN_FLOATS
#pragma GCC unroll 4
  for (int v = first; v < last; v++) {
    into[v - first] = NAME(load_apart)(one + v * LANES);
    if (v % UNIT == 0) __builtin_prefetch((const char *)(one + v * LANES + 2 * LANES * a->dim));
  }
#else
#pragma GCC unroll 4
  for (int v = first; v < last; v += UNIT) {
    NAME(take)(into + v - first, one + v * LANES, two + v * LANES);
    __builtin_prefetch((const char *)(two + v * LANES + 2 * LANES * a->dim));
    __builtin_prefetch((const char *)(one + v * LANES + 2 * LANES * a->dim));
  }
#endif
}

#if defined(WITH_AMX) && UNIT == 2
#include "matrix_attention.h"
#else

/* Values of some keys come to the second cache while these keys are multiplied; `mix` would wait for each line of them. */
INLINE void NAME(fetch_values)(const NAME(attention) * a, const NAME(query_tile) * t, long key, long count) {
  const long size = a->dim * (t->value_scales ? 1 : (long)sizeof(ELEM));
  const char *at = (const char *)t->values + key * size;
  for (long line = 0; line < count * size; line += 64) __builtin_prefetch(at + line, 0, 2);
}

/* A number of queries that is known to the compiler: sums of those that are not there would take as long. */
#define BY_QUERIES(here, run) \
  switch (here) {             \
    case 1: run(1); break;    \
    case 2: run(2); break;    \
    case 3: run(3); break;    \
    case 4: run(4); break;    \
    case 5: run(5); break;    \
    default: run(6);          \
  }

/* Products of some queries with sixteen keys in each of one or two blocks that lie as `transpose` leaves them. */
INLINE void NAME(score_some)(const units (*block)[MOST_DIM / UNIT], const char *queries, long stride, float *to, long padded,
                             long dim, const int count, const int blocks) {
  floats sum[6][2];
#pragma GCC unroll 6
  for (int m = 0; m < count; m++) sum[m][0] = sum[m][1] = zeros();
  for (long unit = 0; unit * UNIT < dim; unit++) {
#ifdef WIDENED
#pragma GCC unroll 2
    for (int number = 0; number < 2; number++)
#pragma GCC unroll 2
      for (int b = 0; b < blocks; b++) {
        READ_AGAIN;
        const floats keyed = one_of_two(load_units(block[b] + unit), number);
#pragma GCC unroll 6
        for (int m = 0; m < count; m++)
          sum[m][b] = multiply_add(keyed, splat(((const float *)(queries + m * stride))[2 * unit + number]), sum[m][b]);
      }
#else
#pragma GCC unroll 6
    for (int m = 0; m < count; m++) {
      const units numbers = splat_unit(queries + m * stride + 4 * unit);
      for (int b = 0; b < blocks; b++) sum[m][b] = NAME(add_product)(sum[m][b], block[b][unit], numbers);
    }
#endif
  }
#pragma GCC unroll 6
  for (int m = 0; m < count; m++)
    for (int b = 0; b < blocks; b++) store_float(to + m * padded + b * LANES, sum[m][b]);
}

#if defined(WITH_BYTE_DOTS) && UNIT == 2
#define WITH_DIGITS /* queries of no more than 8 significant bits become whole numbers where keys are bytes */
#endif

/* Bytes from one copy of a query to the next. */
INLINE long NAME(copy_stride)(const NAME(attention) * a) {
#ifdef WIDENED
  return NAME(rounded_dim)(a->dim) * (long)sizeof(float);
#else
  return a->scales ? NAME(rounded_dim)(a->dim) * (long)sizeof(float) : NAME(deep)(a->dim) * (long)sizeof(ELEM);
#endif
}

/* Copies of a tile's queries, one after another, as `score` reads them: with zeros behind an odd number, or in float32, or as
   whole numbers. */
static void NAME(copy_queries)(const NAME(attention) * a, const NAME(query_tile) * t, char *to) {
  const long stride = NAME(copy_stride)(a);
  for (long query = 0; query < t->queries; query++, to += stride) {
    const ELEM *from = NAME(query_of)(a, t, query);
#ifdef WITH_DIGITS
    if (a->scales) {
      float numbers[MOST_DIM];
      NAME(widen)(from, numbers, a->dim);
      digits_of(numbers, a->dim, (query_digits *)to);
      continue;
    }
#endif
#ifdef WIDENED
    NAME(widen)(from, (float *)to, a->dim);
#else
    memcpy(to, from, (size_t)a->dim * sizeof *from);
    if (a->dim % UNIT) ((ELEM *)to)[a->dim] = 0;
#endif
  }
}

#ifdef WITH_DIGITS
/* `score` of keys of 8 bits. */
static void NAME(score_bytes)(const NAME(attention) * a, const NAME(query_tile) * t, const char *queries, long first, long last) {
  const long stride = NAME(copy_stride)(a);
  for (long key = first; key < last; key += LANES) {
    const long left = t->most - key, from = left < 1 ? t->most - 1 : key, count = left < 1 ? 1 : left;
    units block[MOST_DIM / 4];
    exchange_bytes((const int8_t *)t->keys + from * a->dim, t->keys_end, a->dim, count, block);
    NAME(fetch_values)(a, t, key, LANES);
    for (long q = 0; q < t->queries; q += TOGETHER_OF_TWO) {
      const long here = t->queries - q < TOGETHER_OF_TWO ? t->queries - q : TOGETHER_OF_TWO;
#define RUN(number) \
  dot_some(block, queries + q * stride, stride, t->scores + q * t->padded + key, t->padded, a->dim, number)
      BY_QUERIES(here, RUN)
#undef RUN
    }
  }
}
#endif

/* Products of a tile's queries, which were copied, with the keys from `first` to `last`, multiples of 32; from `most` on they are
   those of the last key. */
static void NAME(score)(const NAME(attention) * a, const NAME(query_tile) * t, const char *queries, long first, long last) {
#ifdef WITH_DIGITS
  if (t->key_scales) {
    NAME(score_bytes)(a, t, queries, first, last);
    return;
  }
#endif
  const long stride = NAME(copy_stride)(a);
  units block[2][MOST_DIM / UNIT];
  for (long key = first; key < last; key += 2 * LANES) {
    for (int b = 0; b < 2; b++) {
      const long left = t->most - key - b * LANES, from = left < 1 ? t->most - 1 : key + b * LANES;
      const long count = left < 1 ? 1 : left < LANES ? left : LANES;
      NAME(transpose)(a, t, from, count, block[b]);
    }
    NAME(fetch_values)(a, t, key, 2 * LANES);
    for (long q = 0; q < t->queries; q += TOGETHER) {
      const long here = t->queries - q < TOGETHER ? t->queries - q : TOGETHER;
#define RUN(count)                                                                                                        \
  for (int b = 0; b < 2; b += count > TOGETHER_OF_TWO ? 1 : 2)                                                            \
  NAME(score_some)(block + b, queries + q * stride, stride, t->scores + q * t->padded + key + b * LANES, t->padded, a->dim, \
                   count, count > TOGETHER_OF_TWO ? 1 : 2)
      BY_QUERIES(here, RUN)
#undef RUN
    }
  }
}

/* Values by weights: `vectors` times sixteen dimensions of some queries' outputs; where they are `partial`, as many of UNIT
   times sixteen as a head still has. */
INLINE void NAME(mix_some)(const NAME(attention) * a, const NAME(query_tile) * t, long query, long d, const int count,
                           const int vectors, const int partial, const int bytes) {
  const float *scores = t->scores + query * t->padded;
  floats sum[6][WIDE];
#pragma GCC unroll 6
  for (int m = 0; m < count; m++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sum[m][v] = zeros();
#ifdef IN_FLOATS
  const int held = UNIT == 1 || partial || TAKEN > vectors ? vectors : TAKEN;
  for (long key = 0; key < t->most; key++) {
#pragma GCC unroll 4
    for (int first = 0; first < vectors; first += held) {
      floats taken[WIDE];
      if (held < vectors) READ_AGAIN;
      NAME(take_values)(a, t, key, key, d, first, first + held, partial, bytes, taken);
#pragma GCC unroll 6
      for (int m = 0; m < count; m++) {
        const floats weight = splat(scores[m * t->padded + key]);
#pragma GCC unroll 4
        for (int v = 0; v < held; v++) sum[m][first + v] = multiply_add(taken[v], weight, sum[m][first + v]);
      }
    }
  }
#else
  for (long key = 0; key < t->most; key += UNIT) {
    units taken[WIDE];
    NAME(take_values)(a, t, key, key + 1 < t->most ? key + 1 : key, d, 0, vectors, partial, bytes, taken);
#pragma GCC unroll 6
    for (int m = 0; m < count; m++) {
      const units weight = splat_unit((const ELEM *)(scores + m * t->padded) + key);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) sum[m][v] = NAME(add_product)(sum[m][v], taken[v], weight);
    }
  }
#endif
#pragma GCC unroll 6
  for (int m = 0; m < count; m++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
#ifdef IN_FLOATS
      if (!bytes) sum[m][v] = NAME(in_order)(sum[m][v]);
#endif
      store_float(NAME(outcome_of)(a, t, query + m) + NAME(OUTCOME) + d + v * LANES, sum[m][v]);
    }
}

/* The last dimensions of heads that are no whole vectors; apart, so that the code of the others stays small. */
static __attribute__((noinline)) void NAME(mix_last)(const NAME(attention) * a, const NAME(query_tile) * t, long query,
                                                     long d, long here, int bytes) {
#define RUN(count) NAME(mix_some)(a, t, query, d, count, UNIT, 1, bytes)
  for (; here > TOGETHER_OF_TWO; here -= TOGETHER_OF_TWO, query += TOGETHER_OF_TWO) RUN(TOGETHER_OF_TWO);
  BY_QUERIES(here, RUN)
#undef RUN
}

INLINE void NAME(mix_all)(const NAME(attention) * a, const NAME(query_tile) * t, long first, long last, const int bytes) {
  for (long q = 0; q < t->queries; q += TOGETHER) {
    const long here = t->queries - q < TOGETHER ? t->queries - q : TOGETHER;
    for (long d = first; d < last;) {
#define RUN_WIDE(count)                                                                                    \
  for (int v = 0; v < WIDE; v += count > TOGETHER_OF_TWO ? 1 : WIDE)                                       \
  NAME(mix_some)(a, t, q, d + v * LANES, count, count > TOGETHER_OF_TWO ? 1 : WIDE, 0, bytes)
#define RUN(count) NAME(mix_some)(a, t, q, d, count, UNIT, 0, bytes)
      if (last - d >= WIDE * LANES) {
        BY_QUERIES(here, RUN_WIDE)
        d += WIDE * LANES;
      } else if (last - d >= UNIT * LANES) {
        BY_QUERIES(here, RUN)
        d += UNIT * LANES;
      } else {
        NAME(mix_last)(a, t, q, d, here, bytes);
        d += UNIT * LANES;
      }
#undef RUN
#undef RUN_WIDE
    }
  }
}

/* Sums of a tile's weighted values in the dimensions from `first`, a multiple of 32, to `last`, another one or the last of all. */
static void NAME(mix)(const NAME(attention) * a, const NAME(query_tile) * t, long first, long last) {
  if (t->value_scales)
    NAME(mix_all)(a, t, first, last, 1);
  else
    NAME(mix_all)(a, t, first, last, 0);
}

#undef BY_QUERIES
#undef WITH_DIGITS
#endif /* WITH_AMX */

/* The products of one query become exponentials over the largest score, in the rows' type, times their values' scales where
   there are these; their sum is of what was not rounded. */
static void NAME(weigh)(const NAME(attention) * a, const NAME(query_tile) * t, long query) {
  const floats scale = splat(a->scale), nothing = splat(-INFINITY);
  const long token = t->token + query / t->group, seen = a->visible[token] - t->start;
  float *scores = t->scores + query * t->padded, *outcome = NAME(outcome_of)(a, t, query);
  const int plain = !t->key_scales && a->cap == 0.0f && !a->mask && t->padded <= seen; /* then scores follow from products */
  floats top = nothing, sum = zeros();
  for (long key = 0; plain && key < t->padded; key += LANES) top = larger(top, load_float(scores + key));
  if (plain) top = mul(top, scale);
  for (long key = 0; !plain && key < t->padded; key += LANES) {
    floats score = mul(load_float(scores + key), scale);
    if (t->key_scales) score = mul(score, load_first_float(t->key_scales + key, t->most - key));
    if (a->cap != 0.0f) score = capped(score, a->cap);
    if (a->mask) score = add(score, NAME(load_first)(a->mask + token * a->horizon + t->start + key, t->most - key));
    score = first_of(seen - key, score, nothing);
    top = larger(top, score);
    store_float(scores + key, score);
  }
  outcome[0] = largest_of(top);
  top = splat(outcome[0]);
  for (long key = 0; key < t->padded; key += LANES) {
    const floats score = load_float(scores + key);
    floats weight = exponential(sub(plain ? mul(score, scale) : score, top));
    sum = add(sum, weight);
    if (t->value_scales) weight = mul(weight, load_first_float(t->value_scales + key, t->most - key));
#ifdef IN_FLOATS
    store_float(scores + key, NAME(rounded)(weight));
#else
    NAME(store)((ELEM *)scores + key, weight); /* behind what is still to be read */
#endif
  }
  outcome[1] = sum_of(sum);
}
#undef IN_FLOATS
#undef WIDENED

/* The outcome of no keys: that of the query's sink, where it has one. */
static void NAME(begin)(const NAME(attention) * a, long head, float *outcome) {
  memset(outcome, 0, (size_t)NAME(outcome_size)(a->dim) * sizeof *outcome);
  outcome[0] = a->sinks ? a->sinks[head] : -INFINITY;
  outcome[1] = a->sinks != 0;
}

/* The outcome of some keys and of the next ones: both are brought to the same largest score. */
static void NAME(absorb)(float *outcome, const float *next, long dim) {
  if (next[0] < UNSEEN) return;
  const floats top = larger(splat(outcome[0]), splat(next[0]));
  const floats old = exponential(sub(splat(outcome[0]), top)), new = exponential(sub(splat(next[0]), top));
  outcome[0] = largest_of(top);
  outcome[1] = largest_of(multiply_add(splat(outcome[1]), old, mul(splat(next[1]), new)));
  for (long d = NAME(OUTCOME); d < NAME(OUTCOME) + dim; d += LANES)
    store_float(outcome + d, multiply_add(load_float(outcome + d), old, mul(load_float(next + d), new)));
}

static void NAME(put_out)(const float *outcome, ELEM *to, long dim) {
  for (long d = 0; d < dim; d += LANES)
    NAME(store_first)(to + d, dim - d, quotient(load_float(outcome + NAME(OUTCOME) + d), splat(outcome[1])));
}

/* A span of a tile by one thread. */
static void NAME(attend_span)(const NAME(attention) * a, const NAME(query_tile) * t, const char *queries) {
  NAME(score)(a, t, queries, 0, t->padded);
  for (long query = 0; query < t->queries; query++) NAME(weigh)(a, t, query);
  NAME(mix)(a, t, 0, a->dim);
}

/* Few tiles, whose spans are divided among threads. Either a thread takes whole spans; or, where these are few too, first all 32
   keys of all spans are divided, then all queries, then all 32 dimensions, in parts of equal size. In the end the queries
   are. Every sum is taken in the same order as by one thread. Each span has outcomes of its own. */
static void NAME(divide_tiles)(const NAME(attention) * a, long number, long count) {
  enum { COUNT, SCORE, WEIGH, MIX, END, STEPS };
  const long wide = 2 * LANES, group = a->heads / a->key_heads, size = NAME(outcome_size)(a->dim);
  float *own = a->scratch + number * a->scratch_size;
  char *queries = (char *)(own + a->copied);
  long total[STEPS] = {0}, copied = -1; /* the tile whose queries were copied */
  for (int step = COUNT; step < STEPS; step++) {
    const long from = total[step] * number / count, to = total[step] * (number + 1) / count;
    long i = 0, before = 0, tile = 0;
    if (step > SCORE && total[step]) barrier();
    for (long row = 0; row < a->rows; row++)
      for (long head = 0; head < a->key_heads; head++)
        for (long first = 0; first < a->places[4 * row + 2]; first += a->columns, tile++) {
          const long most = NAME(seen_by)(a, row, first);
          float *outcomes = a->scratch + a->outcomes + i * a->columns * group * size;
          for (long start = 0; start < most; start += SPAN, i++) {
            float *scratch = a->divided == BY_SPANS ? own : a->scratch + i * a->scratch_size;
            const NAME(query_tile) t = NAME(query_tile_of)(a, row, head, first, start, most, scratch,
                                                           a->scratch + a->outcomes + i * a->columns * group * size);
            const long dims = (a->dim + wide - 1) / wide, last = start + SPAN >= most ? t.queries : 0;
            const long spans[STEPS] = {0, 1, 0, 0, last}, parts[STEPS] = {0, t.padded / wide, t.queries, dims, last};
            const long *pieces = a->divided == BY_SPANS ? spans : parts;
            for (int later = SCORE; step == COUNT && later < STEPS; later++) total[later] += pieces[later];
            const long low = from < before ? 0 : from - before;
            const long high = to - before < pieces[step] ? to - before : pieces[step];
            before += pieces[step];
            if (low >= high) continue;
            if (step == SCORE && tile != copied) NAME(copy_queries)(a, &t, queries);
            if (step == SCORE) copied = tile;
            if (step == SCORE && a->divided == BY_SPANS) NAME(attend_span)(a, &t, queries);
            if (step == SCORE && a->divided == BY_PARTS) NAME(score)(a, &t, queries, low * wide, high * wide);
            if (step == WEIGH)
              for (long query = low; query < high; query++) NAME(weigh)(a, &t, query);
            if (step == MIX) NAME(mix)(a, &t, low * wide, high * wide < a->dim ? high * wide : a->dim);
            if (step == END)
              for (long query = low; query < high; query++) {
                float *held = own + a->held;
                NAME(begin)(a, t.head + query % group, held);
                for (const float *each = outcomes + query * size; each <= t.outcomes + query * size;
                     each += a->columns * group * size)
                  NAME(absorb)(held, each, a->dim);
                NAME(put_out)(held, NAME(output_of)(a, &t, query), a->dim);
              }
          }
        }
  }
}

static void NAME(share_tiles)(void *given) {
  const NAME(attention) *a = given;
  const long number = thread_number(), count = thread_count(), size = NAME(outcome_size)(a->dim);
  float *scratch = a->scratch + number * a->scratch_size, *held = scratch + a->held;
  char *queries = (char *)(scratch + a->copied);
  long part = 0;
  if (a->divided) {
    NAME(divide_tiles)(a, number, count);
    return;
  }
  for (long row = 0; row < a->rows; row++)
    for (long head = 0; head < a->key_heads; head++)
      for (long first = 0; first < a->places[4 * row + 2]; first += a->columns)
        if (part++ % count == number) { /* in turns: later columns see more */
          const long most = NAME(seen_by)(a, row, first);
          float *outcomes = a->scratch + a->outcomes + number * a->columns * (a->heads / a->key_heads) * size;
          for (long start = 0; start < most; start += SPAN) {
            const NAME(query_tile) t = NAME(query_tile_of)(a, row, head, first, start, most, scratch, outcomes);
            if (!start) NAME(copy_queries)(a, &t, queries);
            NAME(attend_span)(a, &t, queries);
            for (long query = 0; query < t.queries; query++) {
              float *all = held + query * size;
              if (!start) NAME(begin)(a, t.head + query % t.group, all);
              NAME(absorb)(all, NAME(outcome_of)(a, &t, query), a->dim);
              if (start + SPAN >= most) NAME(put_out)(all, NAME(output_of)(a, &t, query), a->dim);
            }
          }
        }
}

#if UNIT == 1
static void share_halved_outputs(void *given) {
  const attention_float *a = given;
  const long size = a->heads * a->dim, first = a->tokens * thread_number() / thread_count();
  const long last = a->tokens * (thread_number() + 1) / thread_count();
  const bfloat16 *from = halved_outputs(a);
  for (long i = first * size; i < last * size; i += LANES)
    store_first_float(a->out + i, last * size - i, load_first_bfloat16(from + i, last * size - i));
}

/* What bfloat16 rows make of the same queries, keys and values. */
static void attend_in_halves(const attention_float *a, long threads, long of_tokens) {
  attention_bfloat16 halves = {
      .fused = halved_queries(a), .keys = a->keys, .values = a->values, .scales = a->scales, .places = a->places,
      .visible = a->visible, .mask = (const bfloat16 *)a->mask, .out = halved_outputs(a), .scratch = a->scratch,
      .sinks = a->sinks, .rows = a->rows, .tokens = a->tokens, .heads = a->heads, .key_heads = a->key_heads, .dim = a->dim,
      .capacity = a->capacity, .horizon = a->horizon, .columns = a->columns, .scratch_size = a->scratch_size,
      .copied = a->copied, .held = a->held, .outcomes = a->outcomes, .divided = a->divided, .scale = a->scale, .cap = a->cap};
  clear_padding_bfloat16(&halves);
  parallel(share_tiles_bfloat16, &halves, (unsigned)threads, 0);
  parallel(share_halved_outputs, (void *)a, (unsigned)of_tokens, 0);
}
#endif

/* Rotate, store, attend. dim is from 1 to MOST_DIM. An area of scratch has for columns * group queries, rounded up to a multiple
   of 16, scores of SPAN keys, or of as many as the horizon has, in whole vectors of 32; from `copied` on a copy of each, of
   dim floats, rounded up to a multiple of 16 UNIT; and from `held` on an outcome of each. */
void NAME(draftproof_attend)(NAME(attention) * a, long threads) {
  const long tokens = a->tokens, all = threads > 1 ? threads : 1, of_tokens = tokens >= 64 ? all : 1;
  NAME(clear_padding)(a);
  if (of_tokens > 1)
    parallel(NAME(share_tokens), a, (unsigned)threads, 0);
  else
    NAME(store_tokens)(a, 0, tokens);
#if UNIT == 1
  if (a->halved) {
    attend_in_halves(a, all, of_tokens);
    return;
  }
#endif
  parallel(NAME(share_tiles), a, (unsigned)all, 0);
}

/* --- layers ------------------------------------------------------------------------------------------------------ */

typedef struct {
  const void *weight; /* as `product` reads it; or `quantized_product` where `bits` is not 0, `plain_product` where it is
                         AS_THEY_ARE, and a ggml_matrix where it is below */
  const ELEM *bias;
  long bits, group;
} NAME(linear);

static void NAME(apply)(const NAME(linear) * l, const ELEM *x, const ELEM *onto, ELEM *y, long rows, long outs, long ins,
                        void *memory, long threads) {
  if (l->bits < 0)
    NAME(draftproof_ggml_product)(x, l->weight, l->bias, onto, y, rows, outs, ins, memory, threads);
  else if (l->bits == AS_THEY_ARE)
    NAME(plain_product)(x, l->weight, l->bias, onto, y, rows, outs, ins, threads);
  else if (l->bits)
    NAME(draftproof_quantized_product)(x, l->weight, l->bias, onto, y, rows, outs, ins, l->bits, l->group, memory, threads);
  else
    NAME(draftproof_product)(x, l->weight, l->bias, onto, y, rows, outs, ins, threads);
}

#include "inputs.h"
#include "mixture.h"
#include "mixers.h"

/* The same fields as `LayerArguments` in native/structures.py. */
typedef struct {
  NAME(inputs) qkv, gate_up; /* qkv: without a product where nothing attends */
  NAME(linear) out, down;
  NAME(linear) embedded_gate, embedded_out; /* of the layer's own embeddings of tokens, where it has some */
  const float *before, *mixed, *between, *made, *embedded; /* scaled norms before attention, of what it made, and so for the
                                                              gates, and of what the embeddings add; 0 where there is none */
  const float *experts_in, *experts_out, *gated_out; /* where a mixture and gates are added before `made`: norms of what experts
                                                        read, in place of `between`, of what they make, and of what gates do;
                                                        or 0, all three */
  const float *turned;       /* those of the first heads of queries, keys and values; or 0 */
  const float *sinks;        /* of `attention` */
  const NAME(mixture) *mixture; /* in place of gate_up and down or, where these have a product, beside them; or 0 */
  const NAME(mixer) *mixer;     /* in place of attention or beside it, or 0 */
  long size, inner;          /* of hidden states, and of the gated ones */
  long whole, activation;    /* whether all query heads have one norm, and all key heads; of the gates */
  long gates;                /* of what attention makes, behind queries, keys and values: as many numbers, or 0 */
  long own, normed;          /* heads of its keys, 0 where it reads those of another layer; heads that have a norm */
  long embedded_size, embedded_first; /* numbers of its embedding of a token, and where they begin; 0 without */
  float before_least, mixed_least, between_least, made_least, embedded_least;
  float experts_in_least, experts_out_least, gated_out_least, turned_least;
  float out_factor, down_factor; /* of what is added to x */
  float leaving;                 /* factor of what the layer makes */
} NAME(layer);

/* What the layers of a pass share: embeddings of its tokens in all layers, [tokens, stride], or 0. */
typedef struct {
  const ELEM *of;
  long stride;
} NAME(embeddings);

static void NAME(norm_heads)(const NAME(layer) * l, const NAME(attention) * a, long token) {
  const long heads = a->heads + 2 * a->own;
  ELEM *at = a->fused + token * heads * a->dim;
  if (l->whole) {
    const long queries = a->heads * a->dim, keys = a->key_heads * a->dim;
    NAME(norm_row)(at, l->turned, at, queries, l->turned_least);
    NAME(norm_row)(at + queries, l->turned + queries, at + queries, keys, l->turned_least * keys / queries);
  } else
    for (long head = 0; head < l->normed; head++, at += a->dim)
      NAME(norm_row)(at, l->turned + head * a->dim, at, a->dim, l->turned_least);
}

/* x + factor norm(y), or without the norm where there is none. */
static void NAME(join)(ELEM *x, ELEM *y, const float *norm, float least, float factor, long tokens, long size, long threads) {
  NAME(join_work) w = {x, y, norm, tokens, size, least, factor};
  if (threads > 1 && tokens * size > SMALL / 4)
    parallel(NAME(share_join), &w, (unsigned)threads, 0);
  else
    NAME(join_rows)(&w, 0, tokens);
}

/* x + product, or x + factor norm(product), which is made in y. */
static void NAME(apply_onto)(const NAME(linear) * by, const ELEM *given, ELEM *x, ELEM *y, const float *norm, float least,
                             float factor, long tokens, long size, long ins, void *memory, long threads) {
  if (!norm && factor == 1.0f) {
    NAME(apply)(by, given, x, x, tokens, size, ins, memory, threads);
    return;
  }
  NAME(apply)(by, given, 0, y, tokens, size, ins, memory, threads);
  NAME(join)(x, y, norm, least, factor, tokens, size, threads);
}

/* What attention makes of `given` is added to x; `work` is free. */
static void NAME(attend_onto)(const NAME(layer) * l, NAME(attention) * a, const ELEM *given, ELEM *x, ELEM *work, long threads) {
  const long tokens = a->tokens, wide = (a->heads + 2 * l->own) * a->dim, mixed = a->heads * a->dim;
  ELEM *gates, *rest;
  a->own = l->own;
  a->sinks = l->sinks;
  a->fused = work;
  a->out = a->fused + tokens * wide;
  gates = a->out + tokens * mixed;
  rest = gates + tokens * l->gates;
  if (l->gates) {
    const long all = NAME(outs_of)(&l->qkv);
    NAME(apply_all)(&l->qkv, given, rest, rest + tokens * all, tokens, l->size, threads);
    NAME(arrange)(rest, a->fused, l->qkv.order, 0, tokens, all, wide, threads);
    NAME(arrange)(rest, gates, l->qkv.order + wide, 0, tokens, all, l->gates, threads);
  } else
    NAME(project)(&l->qkv, given, a->fused, rest, tokens, l->size, threads);
  if (l->turned)
    for (long token = 0; token < tokens; token++) NAME(norm_heads)(l, a, token);
  NAME(draftproof_attend)(a, threads);
  for (long i = 0; i < tokens * l->gates; i += LANES) {
    const long here = tokens * l->gates - i;
    const floats gate = quotient(splat(1), add(splat(1), exponential(sub(zeros(), NAME(load_first)(gates + i, here)))));
    NAME(store_first)(a->out + i, here, mul(NAME(load_first)(a->out + i, here), NAME(rounded)(gate)));
  }
  NAME(apply_onto)(&l->out, a->out, x, rest, l->mixed, l->mixed_least, l->out_factor, tokens, l->size, mixed,
                   rest + tokens * l->size, threads);
}

/* What a layer's own embeddings of tokens add to x: gates of x let them through. */
static void NAME(embed_onto)(const NAME(layer) * l, const NAME(embeddings) * e, ELEM *x, ELEM *work, long tokens, long threads) {
  const long size = l->embedded_size;
  ELEM *made = work, *gate = made + tokens * l->size, *both = gate + tokens * size, *gated = both + 2 * tokens * size;
  ELEM *rest = gated + tokens * size;
  NAME(apply)(&l->embedded_gate, x, 0, gate, tokens, size, l->size, rest, threads);
  for (long token = 0; token < tokens; token++) {
    memcpy(both + 2 * token * size, gate + token * size, (size_t)size * sizeof *x);
    memcpy(both + (2 * token + 1) * size, e->of + token * e->stride + l->embedded_first, (size_t)size * sizeof *x);
  }
  NAME(draftproof_gated)(both, gated, tokens, size, l->activation, threads);
  NAME(apply_onto)(&l->embedded_out, gated, x, made, l->embedded, l->embedded_least, 1.0f, tokens, l->size, size, rest, threads);
}

/* One layer on x [tokens, size], in place, with keys, values and states stored; fused and out of `a` are set here, in `work`. */
static void NAME(run_layer)(const NAME(layer) * l, NAME(attention) * a, const sequences *of, const NAME(embeddings) * e, ELEM *x,
                            ELEM *work, long threads) {
  const long tokens = a->tokens;
  ELEM *normed = work, *made = normed + tokens * l->size, *both = made + tokens * l->size;
  ELEM *gated = both + tokens * 2 * l->inner, *rest = gated + tokens * l->inner;
  const ELEM *given = l->before ? normed : x;
  if (l->before) NAME(draftproof_norm)(x, l->before, normed, tokens, l->size, l->before_least, threads);
  if (l->mixer) { /* of the same rows as attention, which reads them from `normed` */
    const ELEM *mixed = NAME(mix_rows)(l->mixer, of, given, both, l->size, threads);
    void *memory = (ELEM *)mixed + tokens * l->mixer->inner;
    NAME(apply_onto)(&l->mixer->out, mixed, x, made, 0, 0, l->mixer->factor, tokens, l->size, l->mixer->inner, memory, threads);
  }
  if (l->qkv.count) NAME(attend_onto)(l, a, given, x, made, threads);
  if (l->between) NAME(draftproof_norm)(x, l->between, normed, tokens, l->size, l->between_least, threads);
  given = l->between ? normed : x;
  if (l->mixture) {
    if (l->experts_in) NAME(draftproof_norm)(x, l->experts_in, made, tokens, l->size, l->experts_in_least, threads);
    NAME(draftproof_mixture)(l->mixture, l->experts_in ? made : given, made, tokens, both, threads);
    if (l->gated_out)
      NAME(draftproof_norm)(made, l->experts_out, made, tokens, l->size, l->experts_out_least, threads);
    else
      NAME(join)(x, made, l->made, l->made_least, l->down_factor, tokens, l->size, threads);
  }
  if (l->gate_up.count) {
    NAME(project)(&l->gate_up, given, both, rest, tokens, l->size, threads);
    NAME(draftproof_gated)(both, gated, tokens, l->inner, l->activation, threads);
    if (l->gated_out) { /* added to what experts made; nothing reads `normed` any more */
      NAME(apply_onto)(&l->down, gated, made, normed, l->gated_out, l->gated_out_least, 1.0f, tokens, l->size, l->inner, rest,
                       threads);
      NAME(join)(x, made, l->made, l->made_least, l->down_factor, tokens, l->size, threads);
    } else
      NAME(apply_onto)(&l->down, gated, x, made, l->made, l->made_least, l->down_factor, tokens, l->size, l->inner, rest, threads);
  }
  if (l->embedded_size) NAME(embed_onto)(l, e, x, work, tokens, threads);
  for (long i = 0; l->leaving != 1.0f && i < tokens * l->size; i += LANES)
    NAME(store_first)(x + i, tokens * l->size - i, mul(NAME(load_first)(x + i, tokens * l->size - i), splat(l->leaving)));
}

/* Layers after one another on x [tokens, size], in place, each with its keys, values and scales, and with the states of its
   sequences where it keeps some (`states` [count, rows, STATES]). `which` says for each layer which of the attentions `a` is
   its own; `LayerArguments.work` of structures.py is the size of `work`. */
void NAME(draftproof_layers)(const NAME(layer) * l, long count, NAME(attention) * a, const int64_t *which, void *const *keys,
                             void *const *values, float *const *scales, const int64_t *spans, void *const *states, long rows,
                             const ELEM *embedded, long stride, ELEM *x, ELEM *work, long threads) {
  const NAME(embeddings) e = {embedded, stride};
  for (long number = 0; number < count; number++) {
    NAME(attention) *own = a + which[number];
    const sequences of = {spans, states ? states + number * rows * STATES : 0, rows, own->tokens};
    own->keys = keys[number];
    own->values = values[number];
    own->scales = scales[number];
    NAME(run_layer)(l + number, own, &of, &e, x, work, threads);
  }
}
