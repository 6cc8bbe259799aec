/* What stands in the place of attention in layers with a recurrent state, included once for each type of rows (see typed.h):
   a short convolution, linear attention with the gated delta rule, or a state space (recurrent.h). Each sequence of a pass
   goes on from its own states; those before a pass are not changed. What a token gets does not depend on how many tokens
   are read with it. */

/* The same fields as `MixerArguments` in native/structures.py. A row of `in` holds
     SHORT   two factors and, between them, gates: [channels] each
     DELTA   what is convolved [channels], that is queries, keys and values; gates [inner]; for each head what betas and what
             decays are made of
     SCAN    gates [inner]; what is convolved [channels], that is values, keys and queries; for each head what steps are
             made of */
typedef struct {
  NAME(inputs) in;
  NAME(linear) out;
  const int32_t *order;           /* which input of `out` is each of its own; 0: they are in order */
  const float *taps, *taps_bias;  /* [kernel, channels]; [channels], or 0 */
  const float *rates, *steps, *skip; /* of each head: the factor of a step that is a decay's logarithm, what is added before a
                                        step's softplus, and how much of a value passes the state by, or 0 */
  const float *norm;              /* scaled, [inner], over `groups` parts; or 0 */
  long kind, inner, channels, kernel, key_heads, heads, dim, size, groups, gates_first;
  float least, factor; /* of the norm; of what is added to x */
} NAME(mixer);

typedef struct {
  const NAME(mixer) * m;
  const sequences *of;
  const ELEM *given;                  /* rows of `in` */
  ELEM *y;                            /* [tokens, inner] */
  float *mixed, *out, *logs, *betas;  /* [tokens, channels], [tokens, inner], [tokens, heads] twice */
  delta_rule rule;
} NAME(mixing);

/* A vector of channels of a sequence, over all its tokens; `here` channels are left. */
INLINE void NAME(convolve)(const NAME(mixing) * w, long row, long channel, const int is_short, const int kernel) {
  const NAME(mixer) *m = w->m;
  const int64_t *span = w->of->spans + SPAN_SIZE * row;
  void *const *states = w->of->states + STATES * row;
  const long here = m->channels - channel;
  const ELEM *given = w->given + span[0] * m->in.places + channel + (m->kind == SCAN ? m->inner : 0);
  floats last[MOST_KERNEL];
  for (int k = 0; k < kernel; k++) { /* the last ones of those in the state and those held */
    const long at = k + span[3];
    const ELEM *known = at < kernel ? states[0] : states[3];
    last[k] = known ? NAME(load_first)(known + (at < kernel ? at : at - kernel) * m->channels + channel, here) : zeros();
  }
  for (long t = 0; t < span[1]; t++, given += m->in.places) {
    const long token = span[0] + t;
    floats next = NAME(load_first)(given, here), sum = zeros();
    if (is_short) next = NAME(rounded)(mul(next, NAME(load_first)(given + 2 * m->channels, here)));
    for (int k = 0; k < kernel; k++) {
      last[k] = k + 1 < kernel ? last[k + 1] : next;
      sum = multiply_add(last[k], load_first_float(m->taps + k * m->channels + channel, here), sum);
    }
    if (m->taps_bias) sum = add(sum, load_first_float(m->taps_bias + channel, here));
    if (is_short)
      NAME(store_first)(w->y + token * m->inner + channel, here,
                        mul(NAME(rounded)(sum), NAME(load_first)(given + m->channels, here)));
    else
      store_first_float(w->mixed + token * m->channels + channel, here, NAME(rounded)(silu(sum)));
    if (t + 1 == span[2])
      for (int k = 0; k < kernel; k++) NAME(store_first)((ELEM *)states[1] + k * m->channels + channel, here, last[k]);
    if (states[4] && t >= span[2])
      NAME(store_first)((ELEM *)states[4] + (t - span[2]) * m->channels + channel, here, next);
  }
  for (int k = 0; states[2] && k < kernel; k++)
    NAME(store_first)((ELEM *)states[2] + k * m->channels + channel, here, last[k]);
}

static void NAME(convolve_some)(const NAME(mixing) * w, long row, long first, long stop) {
#define RUN(is_short, kernel) \
  for (long channel = first; channel < stop; channel += LANES) NAME(convolve)(w, row, channel, is_short, kernel)
  const int kernel = (int)w->m->kernel;
  if (w->m->kind == SHORT) {
    if (kernel == 3)
      RUN(1, 3);
    else
      RUN(1, kernel);
  } else if (kernel == 4)
    RUN(0, 4);
  else
    RUN(0, kernel);
#undef RUN
}

INLINE float NAME(first_number)(const ELEM *at) { return sum_of(NAME(load_first)(at, 1)); }

/* A head of a sequence, over all its tokens: decays, betas or steps, and the rule. */
static void NAME(recur)(const NAME(mixing) * w, long row, long head) {
  const NAME(mixer) *m = w->m;
  const int64_t *span = w->of->spans + SPAN_SIZE * row;
  void *const *states = w->of->states + STATES * row;
  const delta_span tokens = {span[0], span[1], span[2], states[5], states[6], states[7], span[3], states[8]};
  for (long token = span[0]; token < span[0] + span[1]; token++) {
    const ELEM *given = w->given + token * m->in.places + m->channels + m->inner + head;
    const long place = token * m->heads + head;
    const float before = NAME(first_number)(given + (m->kind == DELTA ? m->heads : 0)) + m->steps[head];
    const float step = before > 20 ? before : log1pf(expf(before)); /* as torch's softplus */
    if (m->kind == DELTA) {
      const floats beta = quotient(splat(1), add(splat(1), exponential(sub(zeros(), splat(NAME(first_number)(given))))));
      w->betas[place] = sum_of(first_of(1, NAME(rounded)(beta), zeros()));
    } else {
      const float *x = w->mixed + token * m->channels + head * m->size;
      for (long i = 0; i < m->size; i += LANES)
        store_first_float(w->out + place * m->size + i, m->size - i, mul(load_first_float(x + i, m->size - i), splat(step)));
    }
    w->logs[place] = m->rates[head] * step;
  }
  for (long t = span[2]; states[9] && t < span[1]; t++) /* before outputs take the place of values */
    hold_inputs(&w->rule, &tokens, (float *)states[9] + (t - span[2]) * held_size(&w->rule), t, head);
  for (long channel = 0; channel < m->size; channel += CHANNELS * LANES) delta_channels(&w->rule, &tokens, head, channel);
  for (long token = span[0]; m->skip && token < span[0] + span[1]; token++) {
    const float *x = w->mixed + token * m->channels + head * m->size;
    float *out = w->out + (token * m->heads + head) * m->size;
    for (long i = 0; i < m->size; i += LANES)
      store_first_float(out + i, m->size - i,
                        multiply_add(load_first_float(x + i, m->size - i), splat(m->skip[head]),
                                     load_first_float(out + i, m->size - i)));
  }
}

/* One part of a token's outputs, gated and normed. */
static void NAME(gate_part)(const NAME(mixing) * w, long token, long group) {
  const NAME(mixer) *m = w->m;
  const long size = m->inner / m->groups, at = group * size;
  const ELEM *gates = w->given + token * m->in.places + (m->kind == SCAN ? 0 : m->channels) + at;
  float *out = w->out + token * m->inner + at;
  floats squares = zeros(), by = splat(1);
  for (long i = 0; m->norm && i < size; i += LANES) {
    floats v = load_first_float(out + i, size - i);
    if (m->gates_first) store_first_float(out + i, size - i, v = mul(v, silu(NAME(load_first)(gates + i, size - i))));
    squares = multiply_add(v, v, squares);
  }
  if (m->norm) by = splat(sqrtf(sum_of(squares) + m->least));
  for (long i = 0; i < size; i += LANES) {
    floats v = load_first_float(out + i, size - i);
    if (m->norm) v = quotient(mul(v, load_first_float(m->norm + at + i, size - i)), by);
    if (!m->norm || !m->gates_first) v = mul(v, silu(NAME(load_first)(gates + i, size - i)));
    NAME(store_first)(w->y + token * m->inner + at + i, size - i, v);
  }
}

static void NAME(share_mixing)(void *given) {
  enum { TOGETHER_CHANNELS = 16 * LANES };
  const NAME(mixing) *w = given;
  const NAME(mixer) *m = w->m;
  const long number = thread_number(), count = thread_count(), rows = w->of->rows;
  const long parts = (m->channels + TOGETHER_CHANNELS - 1) / TOGETHER_CHANNELS;
  for (long item = rows * parts * number / count; item < rows * parts * (number + 1) / count; item++) {
    const long first = item % parts * TOGETHER_CHANNELS, stop = first + TOGETHER_CHANNELS;
    NAME(convolve_some)(w, item / parts, first, stop < m->channels ? stop : m->channels);
  }
  if (m->kind == SHORT) return;
  barrier();
  for (long item = rows * m->heads * number / count; item < rows * m->heads * (number + 1) / count; item++)
    NAME(recur)(w, item / m->heads, item % m->heads);
  barrier();
  const long all = w->of->tokens * m->groups;
  for (long item = all * number / count; item < all * (number + 1) / count; item++)
    NAME(gate_part)(w, item / m->groups, item % m->groups);
}

/* What a mixer makes of rows x [tokens, size], as inputs of its `out`; returned where they are in `work`. What is behind them
   there is free. */
static ELEM *NAME(mix_rows)(const NAME(mixer) * m, const sequences *of, const ELEM *x, ELEM *work, long size, long threads) {
  const long tokens = of->tokens;
  ELEM *given = work, *y = given + tokens * m->in.places, *ordered = y + tokens * m->inner;
  float *mixed = aligned(ordered + tokens * m->inner), *out = mixed + tokens * m->channels;
  float *logs = out + tokens * m->inner, *betas = logs + tokens * m->heads;
  const long keys = m->key_heads * m->dim;
  const int is_delta = m->kind == DELTA;
  const float *second = mixed + (is_delta ? keys : m->inner), *third = mixed + (is_delta ? 2 * keys : m->inner + keys);
  NAME(mixing) w = {m, of, given, y, mixed, out, logs, betas,
                    {is_delta ? mixed : third, second, is_delta ? third : out, logs, is_delta ? betas : 0, out, m->key_heads,
                     m->heads, m->dim, m->size, 1, m->channels, m->channels, is_delta ? m->channels : m->inner, is_delta}};
  NAME(project)(&m->in, x, given, y, tokens, size, threads);
  const int alone = threads < 2 || (m->kind == SHORT && tokens * m->channels < SMALL / 4);
  parallel(NAME(share_mixing), &w, alone ? 1 : (unsigned)threads, 0);
  if (!m->order) return y;
  NAME(arrange)(y, ordered, m->order, 0, tokens, m->inner, m->inner, threads);
  return ordered;
}
