/* Runs functions of a library of native operations on its own threads, for scripts/wheels.py: on an emulated processor, or in
   another system's process. Prints a hash of the results of each function, and fails where they depend on the threads. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#include <windows.h>
#define OPEN(path) ((void *)LoadLibraryA(path))
#define FIND(library, name) ((void *)GetProcAddress((HMODULE)library, name))
#else
#include <dlfcn.h>
#define OPEN(path) dlopen(path, RTLD_NOW)
#define FIND(library, name) dlsym(library, name)
#endif

enum { KINDS = 7, TIMES = 20, MOST_THREADS = 5 };
typedef int64_t number;

/* The structure `attention` of typed.h. */
typedef struct {
  void *fused, *cos, *sin, *keys, *values;
  float *scales;
  number *places, *visible;
  void *mask, *out;
  float *scratch, *sinks;
  number rows, tokens, heads, key_heads, dim, capacity, horizon, angles, columns, scratch_size, copied, held, outcomes,
      divided, own, halved;
  float scale, cap;
} attention;

static void *library;
static uint64_t state, found[KINDS];
static void *held[64];
static int holds;

static void *space(size_t bytes) {
  held[holds] = calloc(bytes + 128, 1);
  return (void *)(((uintptr_t)held[holds++] + 127) / 128 * 128);
}

static float uniform(void) { /* splitmix64, from -1 to 1 */
  uint64_t x = state += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return (float)((double)((x ^ (x >> 31)) >> 40) / 0x1p23 - 1);
}

static float *floats(number count) {
  float *made = space((size_t)count * sizeof *made);
  for (number i = 0; i < count; i++) made[i] = uniform();
  return made;
}

static void *bfloat16s(number count) {
  uint16_t *made = space((size_t)count * sizeof *made);
  for (number i = 0; i < count; i++) {
    const float value = uniform();
    memcpy(made + i, (const char *)&value + 2, 2);
  }
  return made;
}

static void keep(int kind, const void *from, number bytes) { /* FNV-1a */
  found[kind] = 0xcbf29ce484222325u;
  for (number i = 0; i < bytes; i++) found[kind] = (found[kind] ^ ((const unsigned char *)from)[i]) * 0x100000001b3u;
}

/* One token's tile of queries for each of three key heads, which two and more threads divide. */
static void attend(int kind, const char *name, void *(*draw)(number), number size, number threads) {
  enum { TOKENS = 5, KEY_HEADS = 3, GROUP = 3, DIM = 64, CAPACITY = 800, BEFORE = 700, QUERIES = 16, KEYS = 736, LANES = 16 };
  number places[] = {0, BEFORE, TOKENS, 0}, visible[TOKENS];
  for (number i = 0; i < TOKENS; i++) visible[i] = BEFORE + 1 + i;
  const number copied = QUERIES * KEYS, held = copied + QUERIES * DIM, scratch = held + QUERIES * (LANES + DIM);
  const number outcomes = MOST_THREADS * scratch, last = outcomes + MOST_THREADS * QUERIES * (LANES + DIM);
  const number outs = TOKENS * KEY_HEADS * GROUP * DIM * size;
  attention a = {
      .fused = draw(TOKENS * KEY_HEADS * (GROUP + 2) * DIM),
      .cos = draw(TOKENS * DIM),
      .sin = draw(TOKENS * DIM),
      .keys = draw(KEY_HEADS * CAPACITY * DIM),
      .values = draw(KEY_HEADS * CAPACITY * DIM),
      .places = places,
      .visible = visible,
      .out = space((size_t)outs),
      .scratch = space((size_t)last * sizeof(float)),
      .rows = 1,
      .tokens = TOKENS,
      .heads = KEY_HEADS * GROUP,
      .key_heads = KEY_HEADS,
      .dim = DIM,
      .capacity = CAPACITY,
      .angles = DIM,
      .columns = TOKENS,
      .scratch_size = scratch,
      .copied = copied,
      .held = held,
      .outcomes = outcomes,
      .divided = threads > 1,
      .own = KEY_HEADS,
      .scale = 0.125f,
  };
  void (*function)(attention *, number);
  *(void **)&function = FIND(library, name);
  function(&a, threads);
  keep(kind, a.out, outs);
}

static void *float_draw(number count) { return floats(count); }

static void run(number threads) {
  enum { ROWS = 7, OUTS = 912, INS = 576, VOCAB = 50000 };
  void (*product)(void *, void *, void *, void *, void *, number, number, number, number);
  void (*softmax)(float *, float *, number, number, number);
  void (*race)(float *, number *, number *, double *, number *, number, number, number);
  void (*norm)(void *, float *, void *, number, number, float, number);
  void *x, *w, *bias, *y = space(ROWS * OUTS * sizeof(float));
  state = 1;
  x = floats(ROWS * INS), w = floats(OUTS * INS), bias = floats(OUTS);
  *(void **)&product = FIND(library, "draftproof_product_float");
  product(x, w, bias, 0, y, ROWS, OUTS, INS, threads);
  keep(0, y, ROWS * OUTS * 4);
  x = bfloat16s(ROWS * INS), w = bfloat16s(OUTS * INS), bias = bfloat16s(OUTS);
  *(void **)&product = FIND(library, "draftproof_product_bfloat16");
  product(x, w, bias, 0, y, ROWS, OUTS, INS, threads);
  keep(1, y, ROWS * OUTS * 2);
  float *scores = floats(3 * VOCAB), *weights = space(3 * VOCAB * sizeof(float));
  *(void **)&softmax = FIND(library, "draftproof_softmax");
  softmax(scores, weights, 3, VOCAB, threads);
  keep(2, weights, 3 * VOCAB * 4);
  number keys[] = {1, 2, 3}, winners[3], *ids = space(99 * sizeof *ids);
  *(void **)&race = FIND(library, "draftproof_race");
  race(weights, keys, winners, space(99 * sizeof(double)), ids, 3, VOCAB, threads);
  keep(3, winners, sizeof winners);
  x = bfloat16s(300 * INS), y = space(300 * INS * 2);
  *(void **)&norm = FIND(library, "draftproof_norm_bfloat16");
  norm(x, floats(INS), y, 300, INS, 1e-5f, threads);
  keep(4, y, 300 * INS * 2);
  attend(5, "draftproof_attend_float", float_draw, 4, threads);
  attend(6, "draftproof_attend_bfloat16", bfloat16s, 2, threads);
  while (holds) free(held[--holds]);
}

int main(int given, char **words) {
  uint64_t alone[KINDS];
  library = given == 2 ? OPEN(words[1]) : 0;
  if (!library) {
    fprintf(stderr, "%s cannot be loaded\n", given == 2 ? words[1] : "nothing");
    return 1;
  }
  run(1);
  memcpy(alone, found, sizeof alone);
  for (int time = 0; time < TIMES; time++)
    for (number threads = 2; threads <= MOST_THREADS; threads++) {
      run(threads);
      if (memcmp(alone, found, sizeof alone)) {
        fprintf(stderr, "%d threads give other bits than one\n", (int)threads);
        return 1;
      }
    }
  for (int kind = 0; kind < KINDS; kind++) printf("%016llx%s", (unsigned long long)alone[kind], kind + 1 < KINDS ? " " : "\n");
  return 0;
}
