/* Mixtures of experts, included once for each type of rows (see typed.h): a token goes through the experts that its router
   chooses. A pair is a token and an expert of its own. Pairs are put in order by expert, so that the weights of an expert are
   read once for all of them; what a token gets does not depend on the tokens beside it. */

/* The same fields as `MixtureArguments` in native/structures.py. */
typedef struct {
  NAME(linear) router, gate_up, down; /* of gate_up and down the weights of all experts, behind one another: as
                                         `ggml_groups_product` reads them where bits are below 0, as `rows_product` where
                                         they are 0, else as `quantized_rows_product` */
  NAME(linear) shared_router, shared_down; /* of an expert of all tokens; without a weight where there is none */
  NAME(inputs) shared_gate_up;
  long size, experts, chosen, inner, shared_inner;
  long is_whole, activation; /* whether the shares of a token add up to 1; of the gates */
  long is_sigmoid;           /* whether a score is the sigmoid of its logit; else softmax makes the scores */
  float factor, least;       /* of the shares; added to the sum of a token's scores where shares add up to 1 */
  const float *scales;       /* of the shares of each expert; 0 where there are none */
  const float *biases;       /* added to the sigmoids by which experts are chosen, not to shares; 0 where there are none */
} NAME(mixture);

typedef struct {
  int64_t *experts, *places, *tokens, *groups; /* of each pair its expert and its place in the order; which token stands at each
                                                  place; [count, 3] of the experts that are chosen */
  float *shares;                               /* of each pair */
  long count;
} NAME(routes);

/* Scores of all experts, and by what they are chosen; the sum of the scores, or 1 where that says nothing. */
static float NAME(sigmoid_scores)(const NAME(mixture) * m, const ELEM *logits, float *left, float *weights) {
  for (long i = 0; i < m->experts; i += LANES) {
    const long here = m->experts - i;
    const floats v = exponential(sub(zeros(), NAME(load_first)(logits + i, here)));
    const floats score = quotient(splat(1.0f), add(splat(1.0f), v));
    store_first_float(weights + i, here, score);
    store_first_float(left + i, here, m->biases ? add(score, load_first_float(m->biases + i, here)) : score);
  }
  return 1;
}

static float NAME(softmax_scores)(const NAME(mixture) * m, const ELEM *logits, float *left, float *weights) {
  floats top = splat(-INFINITY), sum = zeros();
  for (long i = 0; i < m->experts; i += LANES) {
    const floats v = NAME(load_first)(logits + i, m->experts - i);
    store_first_float(left + i, m->experts - i, v);
    top = larger(top, first_of(m->experts - i, v, top));
  }
  top = splat(largest_of(top));
  for (long i = 0; i < m->experts; i += LANES) {
    const floats v = exponential(sub(load_first_float(left + i, m->experts - i), top));
    store_first_float(weights + i, m->experts - i, v);
    sum = add(sum, first_of(m->experts - i, v, zeros()));
  }
  return sum_of(sum);
}

/* The experts of a token with the largest scores, the first one first, and their shares. */
static void NAME(route)(const NAME(mixture) * m, const ELEM *logits, int64_t *experts, float *shares) {
  float left[MOST_EXPERTS], weights[MOST_EXPERTS];
  const float all = (m->is_sigmoid ? NAME(sigmoid_scores) : NAME(softmax_scores))(m, logits, left, weights);
  float total = m->is_whole ? m->least : all;
  for (long k = 0; k < m->chosen; k++) {
    long best = 0;
    for (long e = 1; e < m->experts; e++) best = left[e] > left[best] ? e : best;
    left[best] = -INFINITY;
    experts[k] = best;
    shares[k] = weights[best];
    if (m->is_whole) total += shares[k];
  }
  for (long k = 0; k < m->chosen; k++) shares[k] *= m->factor / total * (m->scales ? m->scales[experts[k]] : 1);
}

/* All routes of some tokens, and the order of their pairs. */
static void NAME(route_all)(const NAME(mixture) * m, const ELEM *logits, long tokens, NAME(routes) * to) {
  const long pairs = tokens * m->chosen;
  int64_t next[MOST_EXPERTS + 1] = {0}; /* the first place of each expert that is free */
  for (long token = 0; token < tokens; token++)
    NAME(route)(m, logits + token * m->experts, to->experts + token * m->chosen, to->shares + token * m->chosen);
  for (long pair = 0; pair < pairs; pair++) next[to->experts[pair] + 1]++;
  for (long e = 0; e < m->experts; e++) {
    if (next[e + 1]) {
      int64_t *group = to->groups + 3 * to->count++;
      group[0] = e;
      group[1] = next[e];
      group[2] = next[e + 1];
    }
    next[e + 1] += next[e];
  }
  for (long pair = 0; pair < pairs; pair++) {
    const int64_t place = next[to->experts[pair]]++;
    to->places[pair] = place;
    to->tokens[place] = pair / m->chosen;
  }
}

/* Rows `from` of x, or all in order where these are 0, with the matrices of their experts; `rows` may hold copies of them. */
static void NAME(apply_experts)(const NAME(linear) * l, const NAME(routes) * r, const ELEM *x, const int64_t *from, ELEM *y,
                                long pairs, long outs, long ins, ELEM *rows, void *memory, long threads) {
  if (l->bits < 0) {
    NAME(ggml_groups_product)(x, from, l->weight, l->bias, 0, y, r->groups, r->count, pairs, outs, ins, memory, threads);
    return;
  }
  for (long i = 0; from && i < pairs; i++) memcpy(rows + i * ins, x + from[i] * ins, (size_t)ins * sizeof *x);
  if (l->bits) {
    const long blocks = (outs + LANES - 1) / LANES, groups = (ins + l->group - 1) / l->group;
    NAME(draftproof_quantized_rows_product)(from ? rows : x, l->weight, l->bias, y, r->groups, r->count, outs, ins, l->bits,
                                            l->group, blocks * quantized_block_size(groups, l->group, l->bits), memory,
                                            threads);
    return;
  }
  NAME(draftproof_rows_product)(from ? rows : x, l->weight, l->bias, y, 0, r->groups, r->count, outs, ins, ins, outs * ins,
                                threads);
}

typedef struct {
  const NAME(mixture) * m;
  const NAME(routes) * r;
  const ELEM *outer, *shared, *gates; /* of pairs in their order, and of tokens */
  ELEM *y;
  long tokens, size;
} NAME(sum_work);

static void NAME(share_sums)(void *given) {
  const NAME(sum_work) *w = given;
  const long number = thread_number(), count = thread_count(), chosen = w->m->chosen;
  for (long token = w->tokens * number / count; token < w->tokens * (number + 1) / count; token++) {
    const floats gate = w->gates ? exponential(sub(zeros(), NAME(load_first)(w->gates + token, 1))) : zeros();
    const floats share = splat(sum_of(first_of(1, quotient(splat(1.0f), add(splat(1.0f), gate)), zeros())));
    for (long i = 0; i < w->size; i += LANES) {
      floats sum = zeros();
      for (long pair = token * chosen; pair < (token + 1) * chosen; pair++) {
        const ELEM *of = w->outer + w->r->places[pair] * w->size + i;
        sum = multiply_add(NAME(load_first)(of, w->size - i), splat(w->r->shares[pair]), sum);
      }
      if (w->shared) sum = multiply_add(NAME(load_first)(w->shared + token * w->size + i, w->size - i), share, sum);
      NAME(store_first)(w->y + token * w->size + i, w->size - i, sum);
    }
  }
}

/* y [tokens, size] = what the experts make of x [tokens, size], by their shares; y may be x. Working memory:
   `MixtureArguments.work` of structures.py. */
void NAME(draftproof_mixture)(const NAME(mixture) * m, const ELEM *x, ELEM *y, long tokens, ELEM *work, long threads) {
  const long size = m->size, pairs = tokens * m->chosen, inner = pairs * m->inner, shared_inner = tokens * m->shared_inner;
  const long widest = inner > shared_inner ? inner : shared_inner;
  ELEM *logits = work, *gates = logits + tokens * m->experts, *both = gates + tokens, *gated = both + 2 * widest;
  ELEM *outer = gated + widest, *shared = outer + pairs * size;
  int64_t *numbers = (int64_t *)(((uintptr_t)(shared + tokens * size) + 63) / 64 * 64);
  NAME(routes) r = {numbers, numbers + pairs, numbers + 2 * pairs, numbers + 3 * pairs, (float *)(numbers + 6 * pairs), 0};
  void *memory = r.shares + pairs;
  NAME(apply)(&m->router, x, 0, logits, tokens, m->experts, size, memory, threads);
  NAME(route_all)(m, logits, tokens, &r);
  NAME(apply_experts)(&m->gate_up, &r, x, r.tokens, both, pairs, 2 * m->inner, size, outer, memory, threads);
  NAME(draftproof_gated)(both, gated, pairs, m->inner, m->activation, threads);
  NAME(apply_experts)(&m->down, &r, gated, 0, outer, pairs, size, m->inner, 0, memory, threads);
  if (m->shared_down.weight) {
    if (m->shared_router.weight) NAME(apply)(&m->shared_router, x, 0, gates, tokens, 1, size, memory, threads);
    NAME(project)(&m->shared_gate_up, x, both, memory, tokens, size, threads);
    NAME(draftproof_gated)(both, gated, tokens, m->shared_inner, m->activation, threads);
    NAME(apply)(&m->shared_down, gated, 0, shared, tokens, size, m->shared_inner, memory, threads);
  }
  NAME(sum_work) w = {m, &r, outer, m->shared_down.weight ? shared : 0, m->shared_router.weight ? gates : 0, y, tokens, size};
  parallel(NAME(share_sums), &w, threads > 1 && tokens * size > SMALL / 16 ? (unsigned)threads : 1, 0);
}
