/* Linear layers that read the same rows, included once for each type of rows (see typed.h): their outputs are one row. */

/* The same fields as `InputsArguments` in native/structures.py. */
typedef struct {
  NAME(linear) of[MOST_INPUTS];
  int64_t outs[MOST_INPUTS];
  const int32_t *order; /* which of all outputs stands at each place of a row; 0: they are in order */
  const float *factors; /* of each place; 0 for ones */
  int64_t count, places;
} NAME(inputs);

typedef struct {
  const ELEM *from;
  ELEM *to;
  const int32_t *order;
  const float *factors;
  long rows, wide, places;
} NAME(arranging);

static void NAME(arrange_rows)(const NAME(arranging) * w, long start, long stop) {
  for (long row = start; row < stop; row++) {
    const ELEM *from = w->from + row * w->wide;
    ELEM *to = w->to + row * w->places;
    if (w->order)
      for (long i = 0; i < w->places; i++) to[i] = from[w->order[i]];
    else
      memcpy(to, from, (size_t)w->places * sizeof *to);
    for (long i = 0; w->factors && i < w->places; i += LANES)
      NAME(store_first)(to + i, w->places - i,
                        mul(NAME(load_first)(to + i, w->places - i), load_first_float(w->factors + i, w->places - i)));
  }
}

static void NAME(share_arranging)(void *given) {
  const NAME(arranging) *w = given;
  const long number = thread_number(), count = thread_count();
  NAME(arrange_rows)(w, w->rows * number / count, w->rows * (number + 1) / count);
}

/* to [rows, places] = some numbers of each row of `from` [rows, wide], by a factor where there are these. */
static void NAME(arrange)(const ELEM *from, ELEM *to, const int32_t *order, const float *factors, long rows, long wide,
                          long places, long threads) {
  NAME(arranging) w = {from, to, order, factors, rows, wide, places};
  if (threads > 1 && rows * places > SMALL)
    parallel(NAME(share_arranging), &w, (unsigned)threads, 0);
  else
    NAME(arrange_rows)(&w, 0, rows);
}

static long NAME(outs_of)(const NAME(inputs) * l) {
  long all = 0;
  for (long i = 0; i < l->count; i++) all += l->outs[i];
  return all;
}

/* y [rows, outs of all]: the outputs of the layers beside one another. */
static void NAME(apply_all)(const NAME(inputs) * l, const ELEM *x, ELEM *y, ELEM *work, long rows, long ins, long threads) {
  const long all = NAME(outs_of)(l);
  const int in_place = rows == 1 || l->count == 1;
  for (long i = 0, at = 0; i < l->count; at += l->outs[i++]) {
    ELEM *made = in_place ? y + at : work;
    NAME(apply)(l->of + i, x, 0, made, rows, l->outs[i], ins, work + (in_place ? 0 : rows * l->outs[i]), threads);
    for (long row = 0; row < rows && !in_place; row++)
      memcpy(y + row * all + at, made + row * l->outs[i], (size_t)l->outs[i] * sizeof *y);
  }
}

/* y [rows, places]: the outputs in their order, by their factors. */
static void NAME(project)(const NAME(inputs) * l, const ELEM *x, ELEM *y, ELEM *work, long rows, long ins, long threads) {
  if (!l->order && !l->factors) {
    NAME(apply_all)(l, x, y, work, rows, ins, threads);
    return;
  }
  const long all = NAME(outs_of)(l);
  NAME(apply_all)(l, x, work, work + rows * all, rows, ins, threads);
  NAME(arrange)(work, y, l->order, l->factors, rows, all, l->places, threads);
}
