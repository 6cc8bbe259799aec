/* Regions: functions that several threads run at once, as parts of one piece of work.

   They are run by the OpenMP runtime that torch runs on, by its stable entry points, since a second runtime's threads would
   fight the first's; or by threads of this library's own (pool.c), where torch has none. `parallel` returns when all threads
   have run the function, and may take fewer threads than it is asked for. Within a function `thread_number` is from 0 to
   `thread_count` - 1, and `barrier` returns when all threads of the region have called it; outside they are 0 and 1. */

#ifndef DRAFTPROOF_PARALLEL_H
#define DRAFTPROOF_PARALLEL_H

#include <stdint.h>

typedef void (*part_fn)(void *);
typedef void (*parallel_fn)(part_fn, void *, unsigned, unsigned); /* function, argument, threads, flags of OpenMP */
typedef int (*number_fn)(void);
typedef void (*barrier_fn)(void);

#define WITHIN __attribute__((visibility("hidden"))) /* of one library: others in the process have threads of their own */

WITHIN void pool_parallel(part_fn part, void *given, unsigned threads, unsigned flags);
WITHIN int pool_number(void);
WITHIN int pool_count(void);
WITHIN void pool_barrier(void);

/* Processors that the pool's threads may run on, by their numbers: masks [threads, words]. */
typedef struct {
  int64_t threads, words;
  const uint64_t *masks;
} kept_threads;

WITHIN void pool_keep_threads(const kept_threads *where); /* it stays as it is, and so where it is */

#endif
