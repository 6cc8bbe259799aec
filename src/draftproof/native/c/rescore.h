/* The largest outputs of a quantized output layer, computed again with whole weights; included once for each type of rows
   (see typed.h).

   Of each row, pieces of NEIGHBOURS outputs are compared by their maxima. The largest `count` outputs lie in the `count`
   pieces with the largest maxima, since each of these has at least one as large as anything outside. */

typedef struct {
  const ELEM *x, *w, *bias; /* w: [outs, ins], or as `product` reads it; 0 where it is stored */
  const uint8_t *stored;    /* [outs], as a file has it (ggml.h) */
  const ggml_type *type;
  ELEM *y;
  long *places;  /* [rows, count]; -1 where a row has fewer outputs that are numbers */
  float *memory; /* [threads, size] */
  long rows, outs, ins, count, blocked, pieces, size;
} NAME(rescoring);

static floats NAME(largest_in_piece)(const NAME(rescoring) * r, const ELEM *y, long piece) {
  floats top = splat(-INFINITY);
  for (long at = piece * NEIGHBOURS; at < (piece + 1) * NEIGHBOURS && at < r->outs; at += LANES)
    top = larger(first_of(r->outs - at, NAME(load_first)(y + at, r->outs - at), top), top); /* `top` where it is NaN */
  return top;
}

/* The outputs that are not below the least of the largest maxima, and their values twice; those of no other piece count. */
static long NAME(candidates)(const NAME(rescoring) * r, const ELEM *y, const float *tops, bound best, float *values,
                             float *kept, int32_t *outs) {
  const float worst = best.least;
  long found = 0;
  for (long piece = 0; piece < r->pieces; piece++) {
    if (!passes(tops[piece], &best)) continue;
    const long start = piece * NEIGHBOURS, stop = start + NEIGHBOURS < r->outs ? start + NEIGHBOURS : r->outs;
    for (long at = start; at < stop; at += LANES) {
      const floats v = NAME(load_first)(y + at, stop - at);
      float here[LANES];
      if (!any_not_below(stop - at, v, splat(worst))) continue;
      store_float(here, v);
      for (long i = 0; i < LANES && at + i < stop; i++)
        if (here[i] >= worst) {
          values[found] = kept[found] = here[i];
          outs[found++] = (int32_t)(at + i);
        }
    }
  }
  return found;
}

static void NAME(choose_outputs)(const NAME(rescoring) * r, long row, float *memory) {
  const ELEM *y = r->y + row * r->outs;
  long *places = r->places + row * r->count, found = 0;
  float *tops = memory, *kept = tops + r->pieces, *values = kept + r->count * NEIGHBOURS;
  int32_t *outs = (int32_t *)(values + r->pieces + r->count * NEIGHBOURS);
  for (long piece = 0; piece < r->pieces; piece++)
    tops[piece] = values[piece] = largest_of(NAME(largest_in_piece)(r, y, piece));
  const bound best = bound_of(values, r->pieces, r->count);
  const long most = NAME(candidates)(r, y, tops, best, values, kept, outs);
  bound least = bound_of(values, most, r->count);
  for (long i = 0; i < most; i++)
    if (passes(kept[i], &least)) places[found++] = outs[i];
  while (found < r->count) places[found++] = -1;
}

static void NAME(share_choosing)(void *given) {
  const NAME(rescoring) *r = given;
  const long number = thread_number(), count = thread_count();
  for (long row = r->rows * number / count; row < r->rows * (number + 1) / count; row++)
    NAME(choose_outputs)(r, row, r->memory + number * r->size);
}

/* Numbers that share a scale are multiplied with inputs before it multiplies their sums. */
static float NAME(stored_output)(const NAME(rescoring) * r, const ELEM *x, long out) {
  const ggml_type *t = r->type;
  const ggml_form f = ggml_forms[t->form];
  const uint8_t *row = r->stored + out * ggml_row_size(t, r->ins);
  floats sum = zeros();
  float numbers[256] = {0}, scale, least;
  ggml_decoded b;
  for (long start = 0; start < r->ins; start += ggml_part(t, r->ins, start)) {
    const int part = ggml_part(t, r->ins, start);
    if (f.bits == 16) {
      ggml_part_of_row(t, row, r->ins, start, numbers);
      for (long k = 0; k < part; k += LANES) {
        const floats w = first_of(part - k, load_float(numbers + k), zeros());
        sum = multiply_add(w, NAME(load_first)(x + start + k, part - k), sum);
      }
      continue;
    }
    ggml_decode(t->type, row + start / t->elements * t->bytes, &b);
    ggml_values(&b, f, part, numbers);
    for (int g = 0; g < part / f.group; g++) {
      floats dots = zeros(), inputs = zeros();
      for (int k = g * f.group; k < (g + 1) * f.group; k += LANES) {
        const floats v = NAME(load)(x + start + k);
        dots = multiply_add(load_float(numbers + k), v, dots);
        inputs = add(inputs, v);
      }
      ggml_range(&b, f, g, &scale, &least);
      sum = multiply_add(splat(scale), dots, sum);
      if (f.has_least) sum = multiply_add(splat(least), inputs, sum);
    }
  }
  return sum_of(sum);
}

static float NAME(whole_output)(const NAME(rescoring) * r, const ELEM *x, long out) {
  if (r->stored) return NAME(stored_output)(r, x, out);
  if (!r->blocked) {
    const ELEM *w = r->w + out * r->ins;
    floats sums[4] = {zeros(), zeros(), zeros(), zeros()}; /* one alone would wait for itself */
    long k = 0;
    for (; k + 4 * LANES <= r->ins; k += 4 * LANES)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        sums[i] = multiply_add(NAME(load)(w + k + i * LANES), NAME(load)(x + k + i * LANES), sums[i]);
    for (; k < r->ins; k += LANES)
      sums[0] = multiply_add(NAME(load_first)(w + k, r->ins - k), NAME(load_first)(x + k, r->ins - k), sums[0]);
    return sum_of(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  }
  floats sum = zeros();
  const ELEM *w = r->w + out / LANES * NAME(deep)(r->ins) * LANES + out % LANES * UNIT;
  for (long k = 0; k < r->ins; k += LANES) {
    ELEM some[LANES] = {0};
    for (long i = 0; i < LANES && k + i < r->ins; i++) some[i] = w[(k + i) / UNIT * UNIT * LANES + (k + i) % UNIT];
    sum = multiply_add(NAME(load_first)(some, LANES), NAME(load_first)(x + k, r->ins - k), sum);
  }
  return sum_of(sum);
}

static void NAME(share_rescoring)(void *given) {
  const NAME(rescoring) *r = given;
  const long all = r->rows * r->count, number = thread_number(), count = thread_count();
  const long stop = all * (number + 1) / count, size = r->stored ? ggml_row_size(r->type, r->ins) : r->ins * (long)sizeof(ELEM);
  const char *rows = r->stored ? (const char *)r->stored : (const char *)r->w;
  for (long at = all * number / count; at < stop; at++) {
    const long row = at / r->count, out = r->places[at];
    if (!r->blocked && at + 1 < stop && r->places[at + 1] >= 0)
      for (long k = 0; k < size; k += 64) __builtin_prefetch(rows + r->places[at + 1] * size + k);
    if (out < 0) continue;
    floats made = splat(NAME(whole_output)(r, r->x + row * r->ins, out));
    if (r->bias) made = add(made, NAME(load_first)(r->bias + out, 1));
    NAME(store_first)(r->y + row * r->outs + out, 1, made);
  }
}

/* The `count` largest outputs of each row y [rows, outs] become x w^T (+ bias), summed in float32 and rounded once.
   w is [outs, ins], or where `blocked` as `product` reads it, or of ggml's `type` (else 0) as a file has it. `places` is for
   rows * count numbers; `memory` for `size` numbers of each thread, at least two for each piece and 3 NEIGHBOURS for each
   output that is chosen. */
void NAME(draftproof_rescore)(const ELEM *x, const void *w, const ELEM *bias, ELEM *y, long *places, float *memory,
                              long rows, long outs, long ins, long count, long blocked, long type, long size, long threads) {
  const long pieces = (outs + NEIGHBOURS - 1) / NEIGHBOURS, most = count < outs ? count : outs;
  NAME(rescoring) r = {x,      type ? 0 : w, bias, type ? w : 0, ggml_type_of(type), y, places, memory, rows,
                       outs,   ins,          most, blocked,      pieces,             size};
  if (rows < 1 || most < 1) return;
  parallel(NAME(share_choosing), &r, rows > 1 && threads > 1 ? (unsigned)threads : 1, 0);
  parallel(NAME(share_rescoring), &r, rows * most * ins > SMALL / 4 && threads > 1 ? (unsigned)threads : 1, 0);
}
