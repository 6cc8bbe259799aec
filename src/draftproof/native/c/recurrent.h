/* The gated delta rule of linear attention, token by token (Yang et al. 2024, arXiv 2412.06464, equation 10; with a decay for
   each key channel it is Kimi Delta Attention, arXiv 2510.26692). Without betas it is a state space: values are added, and
   nothing is taken back (Mamba 2, Dao and Gu 2024, arXiv 2405.21060). Each value channel of a head goes on alone, so a few
   of them stay in the nearest memory for all tokens. */

enum { CHANNELS = 2 }; /* vectors of value channels that go on together */

/* `step`: from one token to the next, in queries, keys and values. */
typedef struct {
  const float *queries, *keys, *values, *decays, *betas;
  float *out; /* [tokens, heads, size]; may be `values` */
  long key_heads, heads, dim, size, channels; /* channels: of decays, for a head: one, or dim */
  long query_step, key_step, value_step;
  int unit;
} delta_rule;

/* Tokens of one sequence, and its states [heads, dim, size]: before them or 0, after `mark` of them where that is not 0, and
   after all or 0. Before all tokens, `replayed` others change the state, whose inputs were held: of each its keys
   [key heads, dim], values [heads, size], decays and betas [heads]. */
typedef struct {
  long first, tokens, mark;
  const float *before;
  float *root, *end;
  long replayed;
  const float *replays;
} delta_span;

INLINE long held_size(const delta_rule *r) { return r->key_heads * r->dim + r->heads * (r->size + 2); }

/* What a token brings to a head of the recurrence. */
typedef struct {
  const float *key, *value, *decay, *beta;
} delta_inputs;

/* Those of token t; before token 0 are the held ones. */
static delta_inputs inputs_of(const delta_rule *r, const delta_span *s, long t, long head) {
  const long key_head = head / (r->heads / r->key_heads), token = s->first + t, place = token * r->heads + head;
  if (t >= 0)
    return (delta_inputs){r->keys + token * r->key_step + key_head * r->dim,
                          r->values + token * r->value_step + head * r->size, r->decays + place * r->channels,
                          r->betas ? r->betas + place : 0};
  const float *held = s->replays + (s->replayed + t) * held_size(r);
  const float *values = held + r->key_heads * r->dim, *decays = values + r->heads * r->size;
  return (delta_inputs){held + key_head * r->dim, values + head * r->size, decays + head, decays + r->heads + head};
}

/* A token's inputs for a head, to be held. */
static void hold_inputs(const delta_rule *r, const delta_span *s, float *held, long t, long head) {
  const long group = r->heads / r->key_heads;
  const delta_inputs given = inputs_of(r, s, t, head);
  float *values = held + r->key_heads * r->dim, *decays = values + r->heads * r->size;
  if (head % group == 0) memcpy(held + head / group * r->dim, given.key, (size_t)r->dim * sizeof *held);
  memcpy(values + head * r->size, given.value, (size_t)r->size * sizeof *held);
  decays[head] = *given.decay;
  decays[r->heads + head] = given.beta ? *given.beta : 0;
}

/* x of the given number of entries, by a factor; of length one before that where `unit` says so. */
static void scaled_to(float *into, const float *x, long dim, float factor, int unit) {
  floats squares = zeros();
  if (unit) {
    for (long i = 0; i < dim; i += LANES) {
      const floats each = load_first_float(x + i, dim - i);
      squares = multiply_add(each, each, squares);
    }
    factor /= sqrtf(sum_of(squares) + 1e-6f);
  }
  for (long i = 0; i < dim; i += LANES)
    store_first_float(into + i, dim - i, mul(load_first_float(x + i, dim - i), splat(factor)));
}

/* Some value channels of a head, with `here` numbers left, become a part of a state. */
static void store_channels(float *state, const floats (*block)[CHANNELS], long dim, long size, long here) {
  for (long i = 0; i < dim; i++)
#pragma GCC unroll 2
    for (int c = 0; c < CHANNELS; c++) store_first_float(state + i * size + c * LANES, here - c * LANES, block[i][c]);
}

/* Some value channels of a sequence's head, over all its tokens. Sums over key channels are those of even and of odd ones. */
static void delta_channels(const delta_rule *r, const delta_span *s, long head, long channel) {
  const long key_head = head / (r->heads / r->key_heads), here = r->size - channel;
  const long state = head * r->dim * r->size + channel;
  float key[MOST_STATE] = {0}, query[MOST_STATE] = {0}, decay[MOST_STATE] = {0};
  floats block[MOST_STATE][CHANNELS];
  for (long i = 0; i < r->dim + r->dim % 2; i++)
#pragma GCC unroll 2
    for (int c = 0; c < CHANNELS; c++)
      block[i][c] = s->before && i < r->dim ? load_first_float(s->before + state + i * r->size + c * LANES, here - c * LANES)
                                            : zeros();
  for (long t = -s->replayed; t < s->tokens; t++) {
    const delta_inputs given = inputs_of(r, s, t, head);
    scaled_to(key, given.key, r->dim, 1, r->unit);
    if (t >= 0)
      scaled_to(query, r->queries + (s->first + t) * r->query_step + key_head * r->dim, r->dim,
                r->betas ? 1 / sqrtf((float)r->dim) : 1, r->unit);
    for (long i = 0; i < r->dim; i += LANES)
      store_first_float(decay + i, r->dim - i,
                        exponential(r->channels == 1 ? splat(*given.decay) : load_first_float(given.decay + i, r->dim - i)));
    floats known[2][CHANNELS], made[2][CHANNELS], change[CHANNELS];
#pragma GCC unroll 2
    for (int c = 0; c < CHANNELS; c++) known[0][c] = known[1][c] = made[0][c] = made[1][c] = zeros();
    for (long i = 0; i < r->dim; i += 2)
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 2
        for (int c = 0; c < CHANNELS; c++) {
          block[i + odd][c] = mul(block[i + odd][c], splat(decay[i + odd]));
          known[odd][c] = multiply_add(block[i + odd][c], splat(key[i + odd]), known[odd][c]);
        }
#pragma GCC unroll 2
    for (int c = 0; c < CHANNELS; c++) {
      change[c] = load_first_float(given.value + channel + c * LANES, here - c * LANES);
      if (r->betas) change[c] = mul(sub(change[c], add(known[0][c], known[1][c])), splat(*given.beta));
    }
    for (long i = 0; i < r->dim; i += 2)
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 2
        for (int c = 0; c < CHANNELS; c++) {
          block[i + odd][c] = multiply_add(splat(key[i + odd]), change[c], block[i + odd][c]);
          made[odd][c] = multiply_add(block[i + odd][c], splat(query[i + odd]), made[odd][c]);
        }
    if (t < 0) continue;
    float *out = r->out + ((s->first + t) * r->heads + head) * r->size + channel;
#pragma GCC unroll 2
    for (int c = 0; c < CHANNELS; c++)
      store_first_float(out + c * LANES, here - c * LANES, add(made[0][c], made[1][c]));
    if (t + 1 == s->mark) store_channels(s->root + state, block, r->dim, r->size, here);
  }
  if (s->end) store_channels(s->end + state, block, r->dim, r->size, here);
}

/* Rows of equally many tokens, with their states one after another. */
typedef struct {
  delta_rule rule;
  const float *state;
  float *end;
  long rows, tokens;
} delta_rows;

static void share_delta_rule(void *given) {
  const delta_rows *w = given;
  const delta_rule *r = &w->rule;
  const long parts = (r->size + CHANNELS * LANES - 1) / (CHANNELS * LANES), all = w->rows * r->heads * parts;
  const long number = thread_number(), count = thread_count(), state = r->heads * r->dim * r->size;
  for (long item = all * number / count; item < all * (number + 1) / count; item++) {
    const long row = item / parts / r->heads;
    const delta_span span = {
        row * w->tokens, w->tokens, 0, w->state ? w->state + row * state : 0, 0, w->end + row * state, 0, 0};
    delta_channels(r, &span, item / parts % r->heads, item % parts * CHANNELS * LANES);
  }
}

/* out [rows, tokens, heads, size] and the state at the end [rows, heads, dim, size], after a state or, where it is 0, after
   none. `queries` and `keys` are [rows, tokens, key heads, dim], of any length where `unit`, `values` as out, `betas`
   [rows, tokens, heads] or 0, and `decays` their logarithms, `channels` for a head. Queries are scaled by 1 / sqrt(dim)
   where there are betas. */
void draftproof_delta_rule(const float *queries, const float *keys, const float *values, const float *decays,
                           const float *betas, const float *state, float *end, float *out, long rows, long tokens,
                           long key_heads, long heads, long dim, long size, long channels, long unit, long threads) {
  const long step = key_heads * dim;
  delta_rows w = {{queries, keys, values, decays, betas, out, key_heads, heads, dim, size, channels, step, step,
                   heads * size, (int)unit},
                  state, end, rows, tokens};
  if (threads > 1 && rows * heads * tokens * dim * size > SMALL)
    parallel(share_delta_rule, &w, (unsigned)threads, 0);
  else
    share_delta_rule(&w);
}
