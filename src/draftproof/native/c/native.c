/* The operations of a decoder layer on rows of float32 and of bfloat16 (typed.h); and, on float32 rows, softmax, draws,
   races and the plan of block verification. Plain functions on memory that the caller owns: native/operations.py checks every
   argument before it calls one. */

#include "lanes.h"
#include "parallel.h"
#ifdef WITH_AMX
#include "tiles.h"
#endif

enum { AHEAD = 3584, SMALL = 1 << 16, BLOCK = 512, MOST_DIM = 512, MOST_STATE = 256, MOST_EXPERTS = 1024 };
enum { MOST_INPUTS = 4, MOST_KERNEL = 8 };
enum { SPAN = 1024 }; /* keys whose weights are made together; what follows from the next ones is added to their outcome */
enum { WHOLE_TILES, BY_PARTS, BY_SPANS }; /* what threads take, as DIVISIONS of native/structures.py */
#define UNSEEN -1e38f /* scores below it are those of keys that a mask hides */
enum { SILU, GELU, CLAMPED }; /* activations of gates, as ACTIVATIONS of native/operations.py */
enum { SHORT, DELTA, SCAN };  /* kinds of mixers, as MIXERS of native/structures.py */
enum { AS_THEY_ARE = 1 };     /* in place of bits: a weight as torch keeps it, as in native/tensors.py */

static parallel_fn parallel = pool_parallel;
static number_fn thread_number = pool_number, thread_count = pool_count;
static barrier_fn barrier = pool_barrier;

/* Run regions on torch's OpenMP from now on, or on the pool if `with` is 0. */
void draftproof_attach(parallel_fn with, number_fn own, number_fn count, barrier_fn wait) {
  parallel = with ? with : pool_parallel;
  thread_number = with ? own : pool_number;
  thread_count = with ? count : pool_count;
  barrier = with ? wait : pool_barrier;
}

void draftproof_keep_threads(const kept_threads *where) { pool_keep_threads(where); }

/* How far behind a line of weights the line lies that is fetched while it is used. Some blocks are read side by side; behind
   their ends the next ones follow, and not each other. `left`: bytes of a block from the line on; `beside`: bytes of the
   other blocks. */
INLINE long ahead_of(long left, long beside) { return left > AHEAD ? AHEAD : AHEAD + beside; }
/* The same for `blocks` of `size` bytes each. Where one block is read at a time, into the second cache, the distance is longer. */
INLINE long ahead_of_blocks(long left, long size, const int blocks) {
#ifdef FETCH_INTO_SECOND_CACHE
  if (blocks == 1) return 2 * AHEAD;
#endif
  return ahead_of(left, (blocks - 1) * size);
}

/* Fetch a line ahead. AMD's Zen 4 waits for too few lines on their way to the first cache to read memory at its speed, and for
   more on their way to the second. `near`: into the first all the same. */
INLINE void fetch_ahead(const void *at, int near) {
#ifdef FETCH_INTO_SECOND_CACHE
  if (!near) {
    __builtin_prefetch(at, 0, 2);
    return;
  }
#endif
  (void)near;
  __builtin_prefetch(at);
}

/* How many of the `left` blocks of outputs a tile of at most so many rows takes: as many as leave the sums in registers,
   since memory is read faster in more places at once. */
static long blocks_beside(long rows, long left) {
  const long most = rows <= TILE_ROWS_OF_FOUR ? 4 : rows <= TILE_ROWS_OF_THREE ? 3 : rows <= TILE_ROWS_OF_TWO ? 2 : 1;
  return most <= left ? most : left > 1 && rows <= TILE_ROWS_OF_TWO ? 2 : 1;
}

/* Work in blocks that threads share: each begins with a part of its own, takes some blocks of it at once, and helps others
   when it is done. So a thread that is held up, by another program or by memory, does not hold up the rest. */
enum { MOST_PARTS = 256, SHARE_BYTES = 1 << 17, SHARE_BLOCKS = 12 };
typedef struct {
  long blocks, parts, together; /* blocks in all, parts, blocks that are taken at once */
  struct {
    _Alignas(64) long next;
  } of[MOST_PARTS];
} shares;

/* `size`: bytes that are read for a block. */
static void share_out(shares *s, long blocks, long size, long threads) {
  s->blocks = blocks;
  s->parts = threads < 1 ? 1 : threads < MOST_PARTS ? threads : MOST_PARTS;
  s->together = (SHARE_BYTES / size + SHARE_BLOCKS) / SHARE_BLOCKS * SHARE_BLOCKS;
  for (long i = 0; i < s->parts; i++) s->of[i].next = blocks * i / s->parts;
}

/* The next blocks of a thread that has come to part `*at`, counted from 0 and on beyond all parts; 0 where there are none. */
static int next_share(shares *s, long *at, long *start, long *stop) {
  for (const long end = thread_number() + s->parts; *at < end; ++*at) {
    const long part = *at % s->parts, last = s->blocks * (part + 1) / s->parts;
    *start = __atomic_fetch_add(&s->of[part].next, s->together, __ATOMIC_RELAXED);
    *stop = *start + s->together < last ? *start + s->together : last;
    if (*start < last) return 1;
  }
  return 0;
}

/* --- layers ------------------------------------------------------------------------------------------------------ */

INLINE floats rounded_float(floats v) { return v; }
INLINE void take_float(units *into, const float *one, const float *two) {
  (void)two;
  *into = load_units(one);
}
INLINE void take_bfloat16(units *into, const bfloat16 *one, const bfloat16 *two) { pair_up(into, one, two); }

/* cap tanh(x / cap), in a form that is right where the exponential is infinite. */
INLINE floats capped(floats x, float cap) {
  const floats twice = exponential(mul(x, splat(2.0f / cap)));
  return sub(splat(cap), quotient(splat(2.0f * cap), add(twice, splat(1.0f))));
}

INLINE floats silu(floats x) { return quotient(x, add(splat(1.0f), exponential(sub(zeros(), x)))); }

/* The first place at which a vector lies well. */
static float *aligned(void *at) { return (float *)(((uintptr_t)at + 63) / 64 * 64); }

/* Sequences that a pass goes on with, one after another: of each the first token, the number of tokens, after how many of them
   states are kept too (0: not), and how many earlier tokens' held inputs its states lack. And its states in a layer, 0 where
   there are none: of the convolution [kernel, channels] before the tokens, after those, and after all; inputs of the earlier
   tokens, and those of the tokens behind the kept state, to be held. Then the same of the recurrence [heads, dim, size]. */
enum { SPAN_SIZE = 4, STATES = 10 };
typedef struct {
  const int64_t *spans;  /* [rows, SPAN_SIZE] */
  void *const *states;   /* [rows, STATES] */
  long rows, tokens;
} sequences;

#include "quantize.h"
#include "ggml.h"
#include "cache_bytes.h"
#include "recurrent.h"

/* --- the largest of some numbers --------------------------------------------------------------------------------- */

enum { NEIGHBOURS = 64 }; /* outputs whose maximum is taken together (rescore.h) */

/* Numbers above `least`, and so many that equal it. */
typedef struct {
  float least;
  long ties;
} bound;

static int passes(float v, bound *b) { return v > b->least || (v == b->least && b->ties-- > 0); }

/* The bound that the `count` largest of some numbers pass; the numbers are exchanged. None of them is NaN. */
static bound bound_of(float *v, long size, long count) {
  if (size <= count) return (bound){-INFINITY, size};
  long first = 0, last = size, wanted = count; /* of v[first, last), this many; all before are larger */
  for (;;) {
    const float pivot = v[first + (last - first) / 2];
    long above = first, at = first, below = last; /* larger, equal, not looked at, smaller */
    while (at < below) {
      const float here = v[at];
      if (here > pivot) {
        v[at++] = v[above];
        v[above++] = here;
      } else if (here < pivot) {
        v[at] = v[--below];
        v[below] = here;
      } else
        at++;
    }
    if (wanted <= above - first)
      last = above;
    else if (wanted <= below - first)
      return (bound){pivot, wanted - (above - first)};
    else {
      wanted -= below - first;
      first = below;
    }
  }
}

/* The first one, since float32 rows leave attention over keys and values of fewer bits to it. */
#define ELEM bfloat16
#define UNIT 2
#define NAME(x) x##_bfloat16
#include "typed.h"
#include "rescore.h"
#undef ELEM
#undef UNIT
#undef NAME

#define ELEM float
#define UNIT 1
#define NAME(x) x##_float
#include "typed.h"
#include "rescore.h"
#undef ELEM
#undef UNIT
#undef NAME

/* --- rows of scores and of probabilities ------------------------------------------------------------------------- */

typedef struct {
  const float *x;
  float *y;
  long rows, dim;
} softmax_work;

static void softmax_row(const softmax_work *w, long row) {
  const float *x = w->x + row * w->dim;
  float *y = w->y + row * w->dim;
  floats top = splat(-INFINITY);
  for (long i = 0; i < w->dim; i += LANES)
    top = larger(top, first_of(w->dim - i, load_first_float(x + i, w->dim - i), top));
  top = splat(largest_of(top));
  double total = 0;
  for (long start = 0; start < w->dim; start += BLOCK) { /* a running sum of a whole vocabulary would lose digits */
    const long stop = start + BLOCK < w->dim ? start + BLOCK : w->dim;
    floats sum = zeros();
    for (long i = start; i < stop; i += LANES) {
      const floats v = exponential(sub(load_first_float(x + i, stop - i), top));
      store_first_float(y + i, stop - i, v);
      sum = add(sum, first_of(stop - i, v, zeros()));
    }
    total += sum_of(sum);
  }
  const floats by = splat((float)(1 / total));
  for (long i = 0; i < w->dim; i += LANES)
    store_first_float(y + i, w->dim - i, mul(load_first_float(y + i, w->dim - i), by));
}

static void share_softmax(void *given) {
  const softmax_work *w = given;
  const long number = thread_number(), count = thread_count();
  for (long row = w->rows * number / count; row < w->rows * (number + 1) / count; row++) softmax_row(w, row);
}

/* y = softmax(x) of each row; y may be x. */
void draftproof_softmax(const float *x, float *y, long rows, long dim, long threads) {
  softmax_work w = {x, y, rows, dim};
  if (threads > 1 && rows > 1 && rows * dim > SMALL / 4)
    parallel(share_softmax, &w, (unsigned)threads, 0);
  else
    for (long row = 0; row < rows; row++) softmax_row(&w, row);
}

/* The place of a row's first largest entry; 0 for a row of NaN. */
static long largest_place(const float *x, long dim) {
  float best = -INFINITY;
  long from = 0;
  for (long start = 0; start < dim; start += BLOCK) {
    const long stop = start + BLOCK < dim ? start + BLOCK : dim;
    floats top = splat(-INFINITY);
    for (long i = start; i < stop; i += LANES)
      top = larger(first_of(stop - i, load_first_float(x + i, stop - i), top), top);
    const float here = largest_of(top);
    if (here > best) {
      best = here;
      from = start;
    }
  }
  for (long i = from; i < dim; i++)
    if (x[i] == best) return i;
  return 0;
}

static void share_greedy(void *given) {
  const softmax_work *w = given;
  const long number = thread_number(), count = thread_count();
  for (long row = w->rows * number / count; row < w->rows * (number + 1) / count; row++) {
    memset(w->y + row * w->dim, 0, (size_t)w->dim * sizeof *w->y);
    w->y[row * w->dim + largest_place(w->x + row * w->dim, w->dim)] = 1;
  }
}

/* y = 1 at the first largest entry of each row of x, 0 elsewhere. */
void draftproof_greedy(const float *x, float *y, long rows, long dim, long threads) {
  softmax_work w = {x, y, rows, dim};
  if (dim > 0) parallel(share_greedy, &w, rows > 1 && rows * dim > SMALL / 4 ? (unsigned)threads : 1, 0);
}

/* y [rows, dim]: x [rows, width] at the columns `ids`, and zeros; returns 0 where an id is not a column of y. */
int draftproof_spread(const float *x, const int64_t *ids, float *y, long rows, long width, long dim) {
  for (long i = 0; i < width; i++)
    if (ids[i] < 0 || ids[i] >= dim) return 0;
  for (long row = 0; row < rows; row++, x += width, y += dim) {
    memset(y, 0, (size_t)dim * sizeof *y);
    for (long i = 0; i < width; i++) y[ids[i]] = x[i];
  }
  return 1;
}

/* max(scale p - q, 0) of sixteen places; NaN stays. */
INLINE floats surplus_of(floats p, floats q, floats scale) { return larger(zeros(), sub(mul(p, scale), q)); }

static double surplus(const float *p, const float *q, float scale, long dim) {
  const floats by = splat(scale);
  double total = 0;
  for (long start = 0; start < dim; start += BLOCK) {
    const long stop = start + BLOCK < dim ? start + BLOCK : dim;
    floats sum = zeros();
    for (long i = start; i < stop; i += LANES)
      sum = add(sum, surplus_of(load_first_float(p + i, stop - i), load_first_float(q + i, stop - i), by));
    total += sum_of(sum);
  }
  return total;
}

/* Block Verification (arXiv 2403.10444), Algorithm 2, for chains of up to `places` tokens: running[b, i] = P_{i+1} and
   h[b, i] = h_{i+1}, zeros beyond a chain's length. p is [batch, more, dim] with more >= places, q [batch, places, dim], or
   0 for point masses. Returns 0 where a length or a token is out of range. */
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

/* y = max(scale p - q, 0), or p if that is 0 everywhere; q = 0 means a point mass on `drafted`. */
void draftproof_residual(const float *p, const float *q, long drafted, float scale, float *y, long dim) {
  const floats by = splat(scale);
  int left = 0;
  for (long at = 0; at < dim; at += LANES) {
    floats other = q ? load_first_float(q + at, dim - at) : zeros();
    if (!q && drafted >= at && drafted < at + LANES) {
      float mass[LANES] = {0};
      mass[drafted - at] = 1;
      other = load_float(mass);
    }
    const floats made = surplus_of(load_first_float(p + at, dim - at), other, by);
    left |= any_not_zero(dim - at, made);
    store_first_float(y + at, dim - at, made);
  }
  if (!left) memcpy(y, p, (size_t)dim * sizeof *y);
}

/* First place in a running sum that exceeds the goal, which is held strictly below `total`; `size` - 1 where rounding
   leaves none. */
static long first_above(const double *running, long size, double goal) {
  const double total = running[size - 1], below = goal < nextafter(total, 0) ? goal : nextafter(total, 0);
  long place = 0;
  while (place < size - 1 && !(running[place] > below)) place++;
  return place;
}

/* Sums of a block in eight chains, so that they need not wait for one another. */
static double block_sum(const float *w, long size) {
  double sums[8] = {0};
  long i = 0;
  for (; i + 8 <= size; i += 8)
    for (int lane = 0; lane < 8; lane++) sums[lane] += w[i + lane];
  for (int lane = 0; i < size; i++, lane++) sums[lane] += w[i];
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

/* For each row of weights the first index whose running sum exceeds goal * total: by sums of blocks, then inside one.
   `running` has space for BLOCK + dim / BLOCK + 1 numbers. */
void draftproof_inverse_cdf(const float *weights, const double *goals, int64_t *found, double *running, long rows,
                            long dim) {
  const long blocks = (dim + BLOCK - 1) / BLOCK;
  double *inside = running + blocks;
  for (long row = 0; row < rows; row++) {
    const float *w = weights + row * dim;
    double total = 0;
    for (long b = 0; b < blocks; b++)
      running[b] = total += block_sum(w + b * BLOCK, (b + 1) * BLOCK < dim ? BLOCK : dim - b * BLOCK);
    const double goal = goals[row] * total;
    const long b = first_above(running, blocks, goal), start = b * BLOCK;
    const long size = start + BLOCK < dim ? BLOCK : dim - start;
    double sum = 0;
    for (long i = 0; i < size; i++) inside[i] = sum += w[start + i];
    found[row] = start + first_above(inside, size, goal - (b ? running[b - 1] : 0));
  }
}

/* --- races --------------------------------------------------------------------------------------------------------- */

enum { HEAT = 64, PIECE = 1 << 14 }; /* entries that are looked at together, and entries that one thread takes */

typedef struct {
  const float *weights;
  const int64_t *keys;
  double *times;
  int64_t *ids;
  long rows, dim, pieces;
} race_work;

/* The finaliser of splitmix64, as `rng._mix`. */
INLINE uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/* The entry of a piece with the smallest time -log(1 - v) / weight, v the uniform of its place in the row. -log(1 - v) is
   at least v. So most entries need their v only: they cannot be first where v exceeds weight times the best time. */
static void race_piece(const race_work *w, long number) {
  const uint64_t golden = 0x9e3779b97f4a7c15u, one = (uint64_t)1023 << 52; /* 1.0 in float64 */
  const long row = number / w->pieces, from = number % w->pieces * PIECE;
  const long to = from + PIECE < w->dim ? from + PIECE : w->dim;
  double best = INFINITY;
  long winner = 0;
  for (long start = from; start < to; start += HEAT) {
    const long size = start + HEAT < to ? HEAT : to - start;
    const uint64_t before = (uint64_t)w->keys[row] + (uint64_t)start * golden;
    const float *weight = w->weights + row * w->dim + start;
    float padded[HEAT] = {0};
    if (size < HEAT) weight = memcpy(padded, weight, (size_t)size * sizeof *weight);
    int some = 0;
    for (int i = 0; i < HEAT; i++) some |= weight[i] > 0;
    if (!some) continue;
    uint64_t bits[HEAT];
    double low[HEAT]; /* v, less half a step */
    for (int i = 0; i < HEAT; i++) bits[i] = mixed(before + (uint64_t)(i + 1) * golden) >> 12 | one;
    memcpy(low, bits, sizeof low);
    int possible = 0;
    for (int i = 0; i < HEAT; i++) possible |= (low[i] -= 1) <= weight[i] * best;
    if (!possible && best < INFINITY) continue;
    for (int i = 0; i < HEAT; i++) {
      if (!(weight[i] > 0) || !(low[i] <= weight[i] * best)) continue;
      const double time = -log1p(-(low[i] + 0x1p-53)) / weight[i];
      if (time < best) {
        best = time;
        winner = start + i;
      }
    }
  }
  w->times[number] = best;
  w->ids[number] = winner;
}

static void share_race(void *given) {
  const race_work *w = given;
  const long number = thread_number(), count = thread_count(), all = w->rows * w->pieces;
  for (long piece = all * number / count; piece < all * (number + 1) / count; piece++) race_piece(w, piece);
}

/* For each row of weights the index of the smallest -log(1 - v) / weight, where v is the hash of the row's key and the index:
   never an index without weight, but 0 for a row without any. `times` and `ids` have space for one number a piece. */
void draftproof_race(const float *weights, const int64_t *keys, int64_t *found, double *times, int64_t *ids, long rows,
                     long dim, long threads) {
  race_work w = {weights, keys, times, ids, rows, dim, (dim + PIECE - 1) / PIECE};
  if (threads > 1 && rows * w.pieces > 1)
    parallel(share_race, &w, (unsigned)threads, 0);
  else
    for (long piece = 0; piece < rows * w.pieces; piece++) race_piece(&w, piece);
  for (long row = 0; row < rows; row++) {
    double best = INFINITY;
    found[row] = 0;
    for (long piece = row * w.pieces; piece < (row + 1) * w.pieces; piece++)
      if (times[piece] < best) {
        best = times[piece];
        found[row] = ids[piece];
      }
  }
}
