/* The operations of a decoder layer on rows of one type: products, norms, gates, attention over the slot cache; and, on
   float32 rows, softmax, draws and the plan of block verification. Built once for bfloat16, and once with FLOAT32 defined
   for float32.

   Where transformers' operations round to the rows' type between two steps, these do; sums are float32 always.

   Products read weights once, in the order in which they lie in memory: as [out / 16][in / UNIT][16][UNIT], where UNIT
   inputs' weights of an output are four bytes, so that 64 bytes are what one instruction multiplies. Outputs are padded
   with zeros to a multiple of sixteen; inputs must be a multiple of UNIT.

   Each output is one chain of sums over its inputs, in order, whatever the rows beside it and however the work is
   split: a row's product does not depend on the batch. It is rounded once, at the end. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef FLOAT32
typedef float elem;
enum { UNIT = 1 };
#else
typedef uint16_t elem; /* bfloat16 */
enum { UNIT = 2 };
#endif
typedef void (*part_fn)(void *);
typedef void (*parallel_fn)(part_fn, void *, unsigned, unsigned);
typedef int (*number_fn)(void);

enum { LANES = 16, ROWS = 12, AHEAD = 2048, SMALL = 1 << 16, BLOCK = 512 };

/* The OpenMP runtime that torch runs on, by its stable entry points: a second one's threads would fight the first's. */
static parallel_fn parallel;
static number_fn thread_number, thread_count;

void draftproof_attach(parallel_fn with, number_fn number, number_fn count) {
  parallel = with;
  thread_number = number;
  thread_count = count;
}

static inline __mmask16 first_lanes(long count) { return count >= LANES ? 0xffff : (__mmask16)((1u << count) - 1); }

#ifdef FLOAT32
static inline __m512 load(const elem *at) { return _mm512_loadu_ps(at); }
static inline __m512 load_some(__mmask16 mask, const elem *at) { return _mm512_maskz_loadu_ps(mask, at); }
static inline void store(elem *at, __m512 v) { _mm512_storeu_ps(at, v); }
static inline void store_some(elem *at, __mmask16 mask, __m512 v) { _mm512_mask_storeu_ps(at, mask, v); }
static inline __m512 rounded(__m512 v) { return v; }
/* sum + w x for each lane; a unit of both is one number. */
static inline __m512 add_product(__m512 sum, __m512i w, __m512i x) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), sum);
}
#else
static inline __m512 widened(__m256i given) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(given), 16));
}
static inline __m256i narrowed(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }
static inline __m512 load(const elem *at) { return widened(_mm256_loadu_si256((const __m256i *)at)); }
static inline __m512 load_some(__mmask16 mask, const elem *at) { return widened(_mm256_maskz_loadu_epi16(mask, at)); }
static inline void store(elem *at, __m512 v) { _mm256_storeu_si256((__m256i *)at, narrowed(v)); }
static inline void store_some(elem *at, __mmask16 mask, __m512 v) { _mm256_mask_storeu_epi16(at, mask, narrowed(v)); }
static inline __m512 rounded(__m512 v) { return widened(narrowed(v)); }
/* sum + w x for each lane; a unit of both is two numbers. */
static inline __m512 add_product(__m512 sum, __m512i w, __m512i x) {
  return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
}
#endif

/* The unit at some place, in every lane. */
static inline __m512i repeated(const elem *at) {
  int32_t unit;
  memcpy(&unit, at, sizeof unit);
  return _mm512_set1_epi32(unit);
}

/* --- products ---------------------------------------------------------------------------------------------------- */

typedef struct {
  const elem *x, *w, *bias, *onto;
  elem *y;
  long rows, outs, ins;
} product;

static inline __attribute__((always_inline)) void tile(const product *p, long row, long block, const int rows,
                                                       const int blocks) {
  const elem *x = p->x + row * p->ins, *w = p->w + block * p->ins * LANES;
  __m512 sum[ROWS][4];
#pragma GCC unroll 12
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++) sum[m][b] = _mm512_setzero_ps();
  for (long k = 0; k < p->ins; k += UNIT) {
    __m512i weight[4];
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++) {
      const elem *at = w + b * p->ins * LANES + k * LANES;
      weight[b] = _mm512_loadu_si512(at);
      _mm_prefetch((const char *)at + AHEAD, _MM_HINT_T0);
    }
#pragma GCC unroll 12
    for (int m = 0; m < rows; m++) {
      const __m512i input = repeated(x + m * p->ins + k);
#pragma GCC unroll 4
      for (int b = 0; b < blocks; b++) sum[m][b] = add_product(sum[m][b], weight[b], input);
    }
  }
#pragma GCC unroll 4
  for (int b = 0; b < blocks; b++) {
    const long out = (block + b) * LANES;
    const __mmask16 mask = first_lanes(p->outs - out);
    const __m512 bias = p->bias ? load_some(mask, p->bias + out) : _mm512_setzero_ps();
#pragma GCC unroll 12
    for (int m = 0; m < rows; m++) {
      const long place = (row + m) * p->outs + out;
      __m512 made = _mm512_add_ps(sum[m][b], bias);
      if (p->onto) made = _mm512_add_ps(rounded(made), load_some(mask, p->onto + place));
      store_some(p->y + place, mask, made);
    }
  }
}

/* A function for each number of rows and blocks, so that sums stay in registers. */
typedef void (*tile_fn)(const product *, long, long);
#define TILE(m, b) \
  static void tile_##m##_##b(const product *p, long row, long block) { tile(p, row, block, m, b); }
#define TILES(m) TILE(m, 1) TILE(m, 2)
TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6) TILES(7) TILES(8) TILES(9) TILES(10) TILES(11) TILES(12)
TILE(1, 4) TILE(2, 4) TILE(3, 4) TILE(4, 4)
#define ONE(m) tile_##m##_1
#define TWO(m) tile_##m##_2
static const tile_fn ones[ROWS + 1] = {0,      ONE(1), ONE(2), ONE(3),  ONE(4),  ONE(5), ONE(6),
                                       ONE(7), ONE(8), ONE(9), ONE(10), ONE(11), ONE(12)};
static const tile_fn twos[ROWS + 1] = {0,      TWO(1), TWO(2), TWO(3),  TWO(4),  TWO(5), TWO(6),
                                       TWO(7), TWO(8), TWO(9), TWO(10), TWO(11), TWO(12)};
static const tile_fn fours[5] = {0, tile_1_4, tile_2_4, tile_3_4, tile_4_4};

/* Some blocks of outputs for all rows: a block's weights are read from memory once and serve every tile of rows. */
static void blocks_of(const product *p, long start, long stop) {
  const long tiles = (p->rows + ROWS - 1) / ROWS, most = (p->rows + tiles - 1) / tiles;
  while (start < stop) {
    const long width = most <= 4 && start + 4 <= stop ? 4 : start + 2 <= stop ? 2 : 1;
    const tile_fn *made = width == 4 ? fours : width == 2 ? twos : ones;
    for (long t = 0, row = 0; t < tiles; t++) {
      const long end = p->rows * (t + 1) / tiles;
      made[end - row](p, row, start);
      row = end;
    }
    start += width;
  }
}

static void share(void *given) {
  const product *p = given;
  const long blocks = (p->outs + LANES - 1) / LANES, number = thread_number(), count = thread_count();
  blocks_of(p, blocks * number / count, blocks * (number + 1) / count);
}

/* y [rows, outs] = x [rows, ins] w^T (+ bias), rounded (+ onto [rows, outs], rounded again). */
void draftproof_product(const elem *x, const elem *w, const elem *bias, const elem *onto, elem *y, long rows, long outs,
                        long ins, long threads) {
  product p = {x, w, bias, onto, y, rows, outs, ins};
  if (threads > 1 && rows * outs * ins > SMALL)
    parallel(share, &p, (unsigned)threads, 0);
  else
    blocks_of(&p, 0, (outs + LANES - 1) / LANES);
}

/* --- rows -------------------------------------------------------------------------------------------------------- */

typedef struct {
  const elem *x;
  const float *scaled;
  elem *y;
  long rows, dim;
  float least;
} row_work;

/* e^v, to two units in the last place; 0 below what float32 holds, and NaN stays NaN. */
static inline __m512 exponential(__m512 v) {
  v = _mm512_max_ps(_mm512_set1_ps(-110.0f), v);
  const __m512 scaled = _mm512_mul_ps(v, _mm512_set1_ps(1.44269504f));
  const __m512 whole = _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 part = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693145752f), v);
  part = _mm512_fnmadd_ps(whole, _mm512_set1_ps(1.42860677e-6f), part);
  __m512 sum = _mm512_set1_ps(1.0f / 720);
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.0f / 120));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.0f / 24));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.0f / 6));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(0.5f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.0f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(sum, whole);
}

static void norm_row(const row_work *w, long row) {
  const elem *x = w->x + row * w->dim;
  __m512 squares = _mm512_setzero_ps();
  for (long i = 0; i < w->dim; i += LANES) {
    const __m512 v = load_some(first_lanes(w->dim - i), x + i);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __m512 length = _mm512_sqrt_ps(_mm512_set1_ps(_mm512_reduce_add_ps(squares) + w->least));
  for (long i = 0; i < w->dim; i += LANES) {
    const __mmask16 there = first_lanes(w->dim - i);
    const __m512 scaled = _mm512_mul_ps(load_some(there, x + i), _mm512_maskz_loadu_ps(there, w->scaled + i));
    store_some(w->y + row * w->dim + i, there, _mm512_div_ps(scaled, length));
  }
}

static void gated_row(const row_work *w, long row) {
  const elem *gate = w->x + 2 * row * w->dim, *up = gate + w->dim;
  const __m512 one = _mm512_set1_ps(1.0f), zero = _mm512_setzero_ps();
  for (long i = 0; i < w->dim; i += LANES) {
    const __mmask16 there = first_lanes(w->dim - i);
    const __m512 v = load_some(there, gate + i);
    const __m512 silu = _mm512_div_ps(v, _mm512_add_ps(one, exponential(_mm512_sub_ps(zero, v))));
    store_some(w->y + row * w->dim + i, there, _mm512_mul_ps(rounded(silu), load_some(there, up + i)));
  }
}

/* x scaled / sqrt(sum x^2 + least) of each row. */
void draftproof_norm(const elem *x, const float *scaled, elem *y, long rows, long dim, float least) {
  const row_work w = {x, scaled, y, rows, dim, least};
  for (long row = 0; row < rows; row++) norm_row(&w, row);
}

static void share_gated(void *given) {
  const row_work *w = given;
  const long number = thread_number(), count = thread_count();
  for (long row = w->rows * number / count; row < w->rows * (number + 1) / count; row++) gated_row(w, row);
}

/* silu(gate) up of each row [gate, up]; dim is that of each half. */
void draftproof_gated(const elem *x, elem *y, long rows, long dim, long threads) {
  row_work w = {x, 0, y, rows, dim, 0};
  if (threads > 1 && rows * dim > SMALL / 16)
    parallel(share_gated, &w, (unsigned)threads, 0);
  else
    for (long row = 0; row < rows; row++) gated_row(&w, row);
}

static void softmax_row(const row_work *w, long row) {
  const float *x = (const float *)w->x + row * w->dim;
  float *y = (float *)w->y + row * w->dim;
  __m512 top = _mm512_set1_ps(-INFINITY);
  for (long i = 0; i < w->dim; i += LANES)
    top = _mm512_max_ps(top, _mm512_mask_loadu_ps(top, first_lanes(w->dim - i), x + i));
  top = _mm512_set1_ps(_mm512_reduce_max_ps(top));
  double total = 0;
  for (long start = 0; start < w->dim; start += BLOCK) { /* a running sum of a whole vocabulary would lose digits */
    const long stop = start + BLOCK < w->dim ? start + BLOCK : w->dim;
    __m512 sum = _mm512_setzero_ps();
    for (long i = start; i < stop; i += LANES) {
      const __mmask16 there = first_lanes(stop - i);
      const __m512 v = exponential(_mm512_sub_ps(_mm512_maskz_loadu_ps(there, x + i), top));
      _mm512_mask_storeu_ps(y + i, there, v);
      sum = _mm512_mask_add_ps(sum, there, sum, v);
    }
    total += _mm512_reduce_add_ps(sum);
  }
  const __m512 by = _mm512_set1_ps((float)(1 / total));
  for (long i = 0; i < w->dim; i += LANES) {
    const __mmask16 there = first_lanes(w->dim - i);
    _mm512_mask_storeu_ps(y + i, there, _mm512_mul_ps(_mm512_maskz_loadu_ps(there, y + i), by));
  }
}

static void share_softmax(void *given) {
  const row_work *w = given;
  const long number = thread_number(), count = thread_count();
  for (long row = w->rows * number / count; row < w->rows * (number + 1) / count; row++) softmax_row(w, row);
}

/* y = softmax(x) of float32 rows; y may be x. */
void draftproof_softmax(const float *x, float *y, long rows, long dim, long threads) {
  row_work w = {(const elem *)x, 0, (elem *)y, rows, dim, 0};
  if (threads > 1 && rows > 1 && rows * dim > SMALL / 4)
    parallel(share_softmax, &w, (unsigned)threads, 0);
  else
    for (long row = 0; row < rows; row++) softmax_row(&w, row);
}

/* Whether each row's largest number is finite, none is NaN: what a distribution follows from. */
int draftproof_legal(const elem *x, long rows, long dim) {
  const __m512 high = _mm512_set1_ps(INFINITY);
  for (long row = 0; row < rows; row++, x += dim) {
    __m512 top = _mm512_set1_ps(-INFINITY);
    __mmask16 wrong = 0;
    for (long i = 0; i < dim; i += LANES) {
      const __mmask16 there = first_lanes(dim - i);
      const __m512 v = load_some(there, x + i);
      wrong |= _mm512_mask_cmp_ps_mask(there, v, high, _CMP_NLT_UQ);
      top = _mm512_mask_max_ps(top, there, top, v);
    }
    if (wrong || _mm512_reduce_max_ps(top) == -INFINITY) return 0;
  }
  return 1;
}

/* y [rows, dim]: x [rows, width] at the columns `ids`, and zeros; 0 where a column is none. */
int draftproof_spread(const float *x, const int64_t *ids, float *y, long rows, long width, long dim) {
  for (long i = 0; i < width; i++)
    if (ids[i] < 0 || ids[i] >= dim) return 0;
  for (long row = 0; row < rows; row++, x += width, y += dim) {
    memset(y, 0, dim * sizeof *y);
    for (long i = 0; i < width; i++) y[ids[i]] = x[i];
  }
  return 1;
}

/* max(scale p - q, 0) of sixteen places; NaN stays. */
static inline __m512 surplus_of(__m512 p, __m512 q, __m512 scale) {
  const __m512 left = _mm512_sub_ps(_mm512_mul_ps(p, scale), q);
  return _mm512_max_ps(_mm512_setzero_ps(), left); /* the second one where they cannot be compared */
}

static double surplus(const float *p, const float *q, float scale, long dim) {
  const __m512 by = _mm512_set1_ps(scale);
  double total = 0;
  for (long start = 0; start < dim; start += BLOCK) {
    const long stop = start + BLOCK < dim ? start + BLOCK : dim;
    __m512 sum = _mm512_setzero_ps();
    for (long i = start; i < stop; i += LANES) {
      const __mmask16 there = first_lanes(stop - i);
      sum = _mm512_add_ps(
          sum, surplus_of(_mm512_maskz_loadu_ps(there, p + i), _mm512_maskz_loadu_ps(there, q + i), by));
    }
    total += _mm512_reduce_add_ps(sum);
  }
  return total;
}

/* Block Verification, arXiv 2403.10444, Algorithm 2, for chains of up to `places` tokens: running[b, i] = P_{i+1} and h[b, i] = h_{i+1}, zeros
   beyond a chain's length. p is [batch, more than places, dim], q [batch, places, dim], or 0 for point masses. 0 where lengths or tokens are none. */
int draftproof_block(const int64_t *tokens, const float *q, const float *p, const int64_t *lengths, double *running,
                      double *h, long batch, long places, long more, long dim) {
  for (long b = 0; b < batch; b++) {
    const int64_t *drafted = tokens + b * places, length = lengths[b];
    const float *mine = p + b * more * dim, *theirs = q ? q + b * places * dim : 0;
    double walk = 0;
    if (length < 0 || length > places) return 0;
    for (long i = 0; i < length; i++)
      if (drafted[i] < 0 || drafted[i] >= dim) return 0;
    for (long i = 0; i < places; i++) {
      double *made = h + b * places + i;
      *made = running[b * places + i] = 0;
      if (i >= length) continue;
      walk += log((double)mine[i * dim + drafted[i]]) - (theirs ? log((double)theirs[i * dim + drafted[i]]) : 0);
      walk = walk > 0 ? 0 : walk; /* NaN stays */
      const double head = running[b * places + i] = exp(walk), deficit = 1 - head;
      if (i + 1 == length) {
        *made = head;
        continue;
      }
      const float *next = mine + (i + 1) * dim;
      const double left =
          theirs ? surplus(next, theirs + (i + 1) * dim, (float)head, dim) : head * (1 - (double)next[drafted[i + 1]]);
      *made = deficit > 0 ? left / (left + deficit) : 1;
    }
  }
  return 1;
}

/* y = max(scale p - q, 0), or p where that is 0 throughout; q = 0 stands for a point mass on `drafted`. */
void draftproof_residual(const float *p, const float *q, long drafted, float scale, float *y, long dim) {
  const __m512 by = _mm512_set1_ps(scale), nothing = _mm512_setzero_ps();
  int left = 0;
  for (long at = 0; at < dim; at += LANES) {
    const __mmask16 there = first_lanes(dim - at);
    __m512 other = q ? _mm512_maskz_loadu_ps(there, q + at) : nothing;
    if (!q && drafted >= at && drafted < at + LANES) other = _mm512_mask_mov_ps(other, (__mmask16)(1u << (drafted - at)), _mm512_set1_ps(1.0f));
    const __m512 made = surplus_of(_mm512_maskz_loadu_ps(there, p + at), other, by);
    left |= _mm512_mask_cmp_ps_mask(there, made, nothing, _CMP_NEQ_UQ);
    _mm512_mask_storeu_ps(y + at, there, made);
  }
  if (!left) memcpy(y, p, dim * sizeof *y);
}

/* First place in a running sum that exceeds the goal, which is held strictly below `total`; `size` - 1 where rounding
   leaves none. */
static long first_above(const double *running, long size, double goal) {
  const double total = running[size - 1], below = goal < nextafter(total, 0) ? goal : nextafter(total, 0);
  long place = 0;
  while (place < size - 1 && !(running[place] > below)) place++;
  return place;
}

/* For each row of weights the first index whose running sum exceeds goal * total: by sums of blocks, then inside one.
   `running` has room for BLOCK + dim / BLOCK + 1 numbers. */
void draftproof_inverse_cdf(const float *weights, const double *goals, int64_t *found, double *running, long rows,
                            long dim) {
  const long blocks = (dim + BLOCK - 1) / BLOCK;
  double *inside = running + blocks;
  for (long row = 0; row < rows; row++) {
    const float *w = weights + row * dim;
    double total = 0;
    for (long b = 0; b < blocks; b++) {
      const long stop = (b + 1) * BLOCK < dim ? (b + 1) * BLOCK : dim;
      __m512d sum = _mm512_setzero_pd();
      long i = b * BLOCK;
      for (; i + 8 <= stop; i += 8) sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm256_loadu_ps(w + i)));
      double rest = _mm512_reduce_add_pd(sum);
      for (; i < stop; i++) rest += w[i];
      running[b] = total += rest;
    }
    const double goal = goals[row] * total;
    const long b = first_above(running, blocks, goal), start = b * BLOCK;
    const long size = start + BLOCK < dim ? BLOCK : dim - start;
    double sum = 0;
    for (long i = 0; i < size; i++) inside[i] = sum += w[start + i];
    found[row] = start + first_above(inside, size, goal - (b ? running[b - 1] : 0));
  }
}

/* --- attention --------------------------------------------------------------------------------------------------- */

enum { COLUMNS = 8, MOST_DIM = 256, TOGETHER = 6 };

typedef struct {
  elem *fused;            /* [rows * width, heads + 2 key_heads, dim]; queries are turned in place */
  const elem *cos, *sin;  /* of each token, `angles` apart; sin with the sign of rotate_half */
  elem *keys, *values;    /* [slots, key_heads, capacity, dim] */
  const int64_t *places;  /* slot, first position and width of each row */
  const int64_t *seen;    /* [rows, width]: slots that a token may see, before the mask */
  const elem *mask;       /* [rows, width, horizon], added to scores; 0 for none */
  elem *out;              /* [rows * width, heads, dim] */
  float *scratch;         /* for each thread `room` floats */
  long rows, width, heads, key_heads, dim, capacity, horizon, angles, room;
  float scale;
} attention;

/* One head's rotary turn, as transformers rounds it; in place, or into the cache. */
static void turn(const attention *a, const elem *x, elem *into, const elem *cos, const elem *sin) {
  const long half = a->dim / 2;
  for (long i = 0; i < half; i += LANES) {
    const __mmask16 there = first_lanes(half - i);
    const __m512 low = load_some(there, x + i), high = load_some(there, x + half + i);
    const __m512 first = rounded(_mm512_mul_ps(low, load_some(there, cos + i)));
    const __m512 second = rounded(_mm512_mul_ps(high, load_some(there, cos + half + i)));
    store_some(into + i, there, _mm512_fmadd_ps(high, load_some(there, sin + i), first));
    store_some(into + half + i, there, _mm512_fmadd_ps(low, load_some(there, sin + half + i), second));
  }
}

/* Turn queries and keys of every token, and write keys and values to the cache; padding is not written, its output is
   zero. */
static void store_tokens(const attention *a, long start, long stop) {
  const long stride = (a->heads + 2 * a->key_heads) * a->dim;
  for (long token = start; token < stop; token++) {
    const long row = token / a->width, column = token % a->width;
    const int64_t *place = a->places + 3 * row;
    elem *fused = a->fused + token * stride;
    const elem *cos = a->cos + token * a->angles, *sin = a->sin + token * a->angles;
    if (column >= place[2]) {
      memset(a->out + token * a->heads * a->dim, 0, a->heads * a->dim * sizeof(elem));
      continue;
    }
    for (long head = 0; head < a->heads; head++) turn(a, fused + head * a->dim, fused + head * a->dim, cos, sin);
    for (long head = 0; head < a->key_heads; head++) {
      const long at = ((place[0] * a->key_heads + head) * a->capacity + place[1] + column) * a->dim;
      turn(a, fused + (a->heads + head) * a->dim, a->keys + at, cos, sin);
      memcpy(a->values + at, fused + (a->heads + a->key_heads + head) * a->dim, a->dim * sizeof(elem));
    }
  }
}

static void share_tokens(void *given) {
  const attention *a = given;
  const long tokens = a->rows * a->width, number = thread_number(), count = thread_count();
  store_tokens(a, tokens * number / count, tokens * (number + 1) / count);
}

/* Sixteen rows of sixteen units, their rows and columns exchanged. */
static inline void exchange(__m512i *r) {
  __m512i t[LANES];
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
    const __m512i even = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), odd = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    const __m512i even_too = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    const __m512i odd_too = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    t[i] = _mm512_shuffle_i32x4(even, even_too, 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(odd, odd_too, 0x88);
    t[8 + i] = _mm512_shuffle_i32x4(even, even_too, 0xdd);
    t[12 + i] = _mm512_shuffle_i32x4(odd, odd_too, 0xdd);
  }
  for (int i = 0; i < LANES; i++) r[i] = t[i];
}

/* Sixteen keys (the last one again where there are fewer) with their inputs' units beside one another:
   [dim / UNIT][16][UNIT], as a block of weights lies. */
static void transpose(const elem *keys, long dim, long count, __m512i *out) {
  for (long unit = 0; unit < dim / UNIT; unit += LANES) {
    for (long key = 0; key < LANES; key++) {
      const elem *at = keys + (key < count ? key : count - 1) * dim + UNIT * unit;
      out[unit + key] = _mm512_loadu_si512(at);
      _mm_prefetch((const char *)(at + UNIT * LANES * dim), _MM_HINT_T0);
    }
    exchange(out + unit);
  }
}

/* Where a query of a tile stands: column by column, the query heads of the key head after one another. */
static inline long token_of(const attention *a, long row, long column) { return row * a->width + column; }

/* Scores of some queries with every key that one of them sees, then their exponentials over the largest, in the rows'
   type; sums of what was not yet rounded go to `sums`. Each query's weights begin at scores + query * padded. */
static void weigh(const attention *a, long row, long head, long first, long columns, long most, float *scores,
                  float *sums) {
  const long group = a->heads / a->key_heads, stride = (a->heads + 2 * a->key_heads) * a->dim;
  const long queries = columns * group, padded = (most + LANES - 1) / LANES * LANES;
  const elem *keys = a->keys + (a->places[3 * row] * a->key_heads + head) * a->capacity * a->dim;
  const __m512 scale = _mm512_set1_ps(a->scale), nothing = _mm512_set1_ps(-INFINITY);
  const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i block[MOST_DIM];
  for (long key = 0; key < padded; key += LANES) {
    transpose(keys + key * a->dim, a->dim, most - key < LANES ? most - key : LANES, block);
    for (long q = 0; q < queries; q += TOGETHER) {
      const long here = queries - q < TOGETHER ? queries - q : TOGETHER;
      const elem *at[TOGETHER];
      __m512 sum[TOGETHER];
#pragma GCC unroll 6
      for (long m = 0; m < TOGETHER; m++) {
        const long query = q + (m < here ? m : 0);
        at[m] = a->fused + token_of(a, row, first + query / group) * stride + (head * group + query % group) * a->dim;
        sum[m] = _mm512_setzero_ps();
      }
      for (long unit = 0; unit < a->dim / UNIT; unit++) {
#pragma GCC unroll 6
        for (long m = 0; m < TOGETHER; m++) sum[m] = add_product(sum[m], block[unit], repeated(at[m] + UNIT * unit));
      }
#pragma GCC unroll 6
      for (long m = 0; m < TOGETHER; m++) {
        if (m >= here) continue;
        const long column = first + (q + m) / group, token = token_of(a, row, column);
        __m512 score = _mm512_mul_ps(sum[m], scale);
        if (a->mask) {
          const __mmask16 there = first_lanes(most - key);
          score = _mm512_add_ps(score, load_some(there, a->mask + token * a->horizon + key));
        }
        const __mmask16 seen =
            _mm512_cmplt_epi32_mask(order, _mm512_set1_epi32((int)(a->seen[token] - key)));
        _mm512_storeu_ps(scores + (q + m) * padded + key, _mm512_mask_mov_ps(nothing, seen, score));
      }
    }
  }
  for (long q = 0; q < queries; q++) {
    float *mine = scores + q * padded;
    __m512 top = nothing, sum = _mm512_setzero_ps();
    for (long key = 0; key < padded; key += LANES) top = _mm512_max_ps(top, _mm512_loadu_ps(mine + key));
    top = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    for (long key = 0; key < padded; key += LANES) {
      const __m512 weight = exponential(_mm512_sub_ps(_mm512_loadu_ps(mine + key), top));
      sum = _mm512_add_ps(sum, weight);
      store((elem *)mine + key, weight); /* behind what is still to be read */
    }
    sums[q] = _mm512_reduce_add_ps(sum);
  }
}

#ifdef FLOAT32
enum { KEYS = 1, STEP = 1 };
/* Some dimensions of a key's values, sixteen to a vector. */
static inline void take(__m512i *into, const elem *one, const elem *two, int v) {
  (void)two;
  into[v] = _mm512_loadu_si512(one + v * LANES);
}
#else
enum { KEYS = 2, STEP = 2 };
/* Some dimensions of two keys' values, a pair of both to a lane; two vectors at a time. */
static inline void take(__m512i *into, const elem *one, const elem *two, int v) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                       36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const __m512i even = _mm512_loadu_si512(one + v * LANES), odd = _mm512_loadu_si512(two + v * LANES);
  into[v] = _mm512_permutex2var_epi16(even, low, odd);
  into[v + 1] = _mm512_permutex2var_epi16(even, high, odd);
}
#endif

/* Values by weights: `vectors` times sixteen dimensions of some queries' outputs. */
static inline __attribute__((always_inline)) void mix(const attention *a, const elem *values, const elem *const *weights,
                                                      const float *sums, elem *const *out, long most, long here,
                                                      const int vectors) {
  __m512 sum[TOGETHER][4];
#pragma GCC unroll 6
  for (int m = 0; m < TOGETHER; m++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sum[m][v] = _mm512_setzero_ps();
  for (long key = 0; key < most; key += KEYS) {
    const elem *one = values + key * a->dim, *two = key + 1 < most ? one + a->dim : one;
    __m512i units[4];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v += STEP) {
      take(units, one, two, v);
      _mm_prefetch((const char *)(one + v * LANES + LANES * a->dim), _MM_HINT_T0);
      _mm_prefetch((const char *)(two + v * LANES + LANES * a->dim), _MM_HINT_T0);
    }
#pragma GCC unroll 6
    for (int m = 0; m < TOGETHER; m++) {
      const __m512i weight = repeated(weights[m] + key);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) sum[m][v] = add_product(sum[m][v], units[v], weight);
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < TOGETHER; m++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
      if (m < here) store(out[m] + v * LANES, _mm512_div_ps(sum[m][v], _mm512_set1_ps(sums[m])));
}

static void attend_tile(const attention *a, long row, long head, long first, long columns, float *scratch) {
  const long group = a->heads / a->key_heads, queries = columns * group;
  long most = 0;
  for (long column = first; column < first + columns; column++) {
    const long seen = a->seen[token_of(a, row, column)];
    most = seen > most ? seen : most;
  }
  const long padded = (most + LANES - 1) / LANES * LANES;
  float *sums = scratch, *scores = scratch + (queries + LANES - 1) / LANES * LANES;
  weigh(a, row, head, first, columns, most, scores, sums);
  const elem *values = a->values + (a->places[3 * row] * a->key_heads + head) * a->capacity * a->dim;
  for (long q = 0; q < queries; q += TOGETHER) {
    const long here = queries - q < TOGETHER ? queries - q : TOGETHER;
    const elem *weights[TOGETHER];
    elem *out[TOGETHER];
    for (long m = 0; m < TOGETHER; m++) {
      const long query = q + (m < here ? m : 0);
      weights[m] = (const elem *)(scores + query * padded);
      out[m] = a->out + (token_of(a, row, first + query / group) * a->heads + head * group + query % group) * a->dim;
    }
    for (long d = 0; d < a->dim;) {
      elem *into[TOGETHER];
      for (long m = 0; m < TOGETHER; m++) into[m] = out[m] + d;
      if (a->dim - d >= 4 * LANES) {
        mix(a, values + d, weights, sums + q, into, most, here, 4);
        d += 4 * LANES;
      } else {
        mix(a, values + d, weights, sums + q, into, most, here, STEP);
        d += STEP * LANES;
      }
    }
  }
}

static void share_tiles(void *given) {
  const attention *a = given;
  const long tiles = (a->width + COLUMNS - 1) / COLUMNS, units = a->rows * a->key_heads * tiles;
  const long number = thread_number(), count = thread_count();
  float *scratch = a->scratch + number * a->room;
  for (long unit = units * number / count; unit < units * (number + 1) / count; unit++) {
    const long row = unit / (a->key_heads * tiles), head = unit / tiles % a->key_heads;
    const long first = unit % tiles * COLUMNS, width = a->places[3 * row + 2];
    const long columns = width - first < COLUMNS ? width - first : COLUMNS;
    if (columns > 0) attend_tile(a, row, head, first, columns, scratch);
  }
}

/* Turn, store, attend: see `attention`. dim is a multiple of 16 UNIT, at most 256; room holds
   (16 + COLUMNS * group) * (horizon + 15) floats. */
void draftproof_attend(attention *a, long threads) {
  const long tokens = a->rows * a->width;
  if (threads > 1 && tokens >= 64)
    parallel(share_tokens, a, (unsigned)threads, 0);
  else
    store_tokens(a, 0, tokens);
  parallel(share_tiles, a, (unsigned)(threads > 1 ? threads : 1), 0);
}

/* --- layers ---------------------------------------------------------------------------------------------------- */

typedef struct {
  const elem *weight, *bias;
} linear;

typedef struct {
  linear qkv, out, gate_up, down;
  const float *before, *between, *turned; /* scaled norms; the last of each query and key head, or 0 */
  long size, inner;                       /* of hidden states, and of the gated ones */
  float before_least, between_least, turned_least;
} layer;

/* One layer on x [tokens, size], in place, with keys and values stored; fused and out of `a` are set here, in `work`. */
static void run_layer(const layer *l, attention *a, elem *x, elem *work, long threads) {
  const long tokens = a->rows * a->width, heads = a->heads + 2 * a->key_heads, mixed = a->heads * a->dim;
  elem *normed = work, *both, *gated;
  a->fused = normed + tokens * l->size;
  a->out = a->fused + tokens * heads * a->dim;
  both = a->out + tokens * mixed;
  gated = both + tokens * 2 * l->inner;
  draftproof_norm(x, l->before, normed, tokens, l->size, l->before_least);
  draftproof_product(normed, l->qkv.weight, l->qkv.bias, 0, a->fused, tokens, heads * a->dim, l->size, threads);
  if (l->turned)
    for (long token = 0; token < tokens; token++)
      for (long head = 0; head < a->heads + a->key_heads; head++) {
        elem *at = a->fused + (token * heads + head) * a->dim;
        draftproof_norm(at, l->turned + head * a->dim, at, 1, a->dim, l->turned_least);
      }
  draftproof_attend(a, threads);
  draftproof_product(a->out, l->out.weight, l->out.bias, x, x, tokens, l->size, mixed, threads);
  draftproof_norm(x, l->between, normed, tokens, l->size, l->between_least);
  draftproof_product(normed, l->gate_up.weight, l->gate_up.bias, 0, both, tokens, 2 * l->inner, l->size, threads);
  draftproof_gated(both, gated, tokens, l->inner, threads);
  draftproof_product(gated, l->down.weight, l->down.bias, x, x, tokens, l->size, l->inner, threads);
}

/* Layers after one another on x [tokens, size], in place, each with its keys and values; `work` has
   tokens * (size + 2 (heads + key_heads) dim + 3 inner) elements. */
void draftproof_layers(const layer *l, long count, attention *a, elem *const *keys, elem *const *values, elem *x,
                       elem *work, long threads) {
  for (long number = 0; number < count; number++) {
    a->keys = keys[number];
    a->values = values[number];
    run_layer(l + number, a, x, work, threads);
  }
}
