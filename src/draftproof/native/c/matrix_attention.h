/* Attention of bfloat16 rows on the matrix unit (AMX), in place of the vector code of typed.h.

   The queries of a tile are copied beside one another, sixteen to a tile register. Scores of 32 keys are made at once:
   keys are transposed into the second operand. The exponentials are a first operand as they lie, and the values of 32 keys
   are paired into the second. Sums go over keys in order, 32 at a time, whatever the queries beside them; keys that a query
   does not see have the weight zero. */

/* Scores of 32 keys of a tile from `key` on; behind the last key they are its own. Queries have zeros up to whole vectors. */
static void score_keys(const attention_bfloat16 *a, const query_tile_bfloat16 *t, const bfloat16 *queries, long key) {
  units block[2][MOST_DIM / 2];
  const long count = t->most - key, near = count < LANES ? count : LANES, beyond = count - LANES < 1 ? 1 : count - LANES;
  const long dim = rounded_dim_bfloat16(a->dim), tiles = (t->queries + HEIGHT - 1) / HEIGHT, stride = t->padded;
  transpose_bfloat16(a, t, key, near, block[0]);
  transpose_bfloat16(a, t, key + (count > LANES ? LANES : count - 1), beyond < LANES ? beyond : LANES, block[1]);
  for (long tile = 0; tile < tiles; tile += 2) {
    const bfloat16 *one = queries + tile * HEIGHT * dim, *two = tile + 1 < tiles ? one + HEIGHT * dim : one;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long d = 0; d < dim; d += STEP) {
      LOAD_TILE(4, one + d, dim * 2);
      LOAD_TILE(6, block[0] + d / 2, 64);
      LOAD_TILE(7, block[1] + d / 2, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      LOAD_TILE(5, two + d, dim * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    float *at = t->scores + key + tile * HEIGHT * stride;
    _tile_stored(0, at, stride * 4);
    _tile_stored(1, at + LANES, stride * 4);
    if (tile + 1 == tiles) continue;
    _tile_stored(2, at + HEIGHT * stride, stride * 4);
    _tile_stored(3, at + HEIGHT * stride + LANES, stride * 4);
  }
}

/* 32 dimensions of up to two tiles of outputs from `d` on, before they are divided: [2][2][HEIGHT][LANES]. */
static void mix_values(const attention_bfloat16 *a, const query_tile_bfloat16 *t, const bfloat16 *weights,
                       const bfloat16 *other, long d, float *sums) {
  const long most = t->most, stride = t->padded * (long)sizeof(float);
  units block[2][LANES];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long key = 0; key < most; key += STEP) {
    for (long pair = 0; pair < LANES; pair++) {
      const long one = key + 2 * pair < most ? key + 2 * pair : most - 1, two = one + 1 < most ? one + 1 : one;
      units both[2];
      take_values_bfloat16(a, t, one, two, d, 0, 2, 1, t->value_scales != 0, both);
      block[0][pair] = both[0];
      block[1][pair] = both[1];
    }
    LOAD_TILE(4, weights + key, stride);
    LOAD_TILE(6, block[0], 64);
    LOAD_TILE(7, block[1], 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (!other) continue;
    LOAD_TILE(5, other + key, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + HEIGHT * LANES, 64);
  _tile_stored(2, sums + 2 * HEIGHT * LANES, 64);
  _tile_stored(3, sums + 3 * HEIGHT * LANES, 64);
}

/* Copies of a tile's queries, one after another, with zeros up to whole tiles. */
static void copy_queries_bfloat16(const attention_bfloat16 *a, const query_tile_bfloat16 *t, char *to) {
  const long tiles = (t->queries + HEIGHT - 1) / HEIGHT, size = rounded_dim_bfloat16(a->dim);
  bfloat16 *queries = (bfloat16 *)to;
  memset(queries, 0, (size_t)(tiles * HEIGHT * size) * sizeof *queries);
  for (long q = 0; q < t->queries; q++)
    memcpy(queries + q * size, query_of_bfloat16(a, t, q), (size_t)a->dim * sizeof *queries);
}

/* See typed.h. */
static void score_bfloat16(const attention_bfloat16 *a, const query_tile_bfloat16 *t, const char *queries, long first,
                           long last) {
  shape_tiles(HEIGHT);
  for (long key = first; key < last; key += STEP)
    score_keys(a, t, (const bfloat16 *)queries, key);
  _tile_release();
}

/* See typed.h. */
static void mix_bfloat16(const attention_bfloat16 *a, const query_tile_bfloat16 *t, long first, long last) {
  const long tiles = (t->queries + HEIGHT - 1) / HEIGHT;
  shape_tiles(HEIGHT);
  for (long tile = 0; tile < tiles; tile += 2) {
    const bfloat16 *weights = (const bfloat16 *)(t->scores + tile * HEIGHT * t->padded);
    const bfloat16 *other = tile + 1 < tiles ? weights + 2 * HEIGHT * t->padded : 0;
    const long end = (tile + 2) * HEIGHT < t->queries ? (tile + 2) * HEIGHT : t->queries;
    for (long d = first; d < last; d += STEP) {
      float mixed[4 * HEIGHT * LANES] __attribute__((aligned(64)));
      mix_values(a, t, weights, other, d, mixed);
      for (long q = tile * HEIGHT; q < end; q++) {
        const float *from = mixed + ((q / HEIGHT - tile) * 2 * HEIGHT + q % HEIGHT) * LANES;
        float *to = outcome_of_bfloat16(a, t, q) + OUTCOME_bfloat16 + d;
        store_float(to, load_float(from));
        store_float(to + LANES, load_float(from + HEIGHT * LANES));
      }
    }
  }
  _tile_release();
}
