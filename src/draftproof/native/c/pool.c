/* A pool of threads for regions (parallel.h), where torch runs on no OpenMP.

   Threads are started when a region first needs them, and stay. One that waits spins for some tenths of a millisecond, because
   the others are often there at once, and then sleeps. While it spins it lets others run, since the thread that it waits for
   may be one that wants this processor. There is one pool: while it has work, a region of another thread is run by that
   thread alone. A process that was forked has none of the threads and starts its own. */

#include "parallel.h"

#include <stdatomic.h>

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef _WIN32
#include <windows.h>

typedef SRWLOCK lock_type;
typedef CONDITION_VARIABLE condition_type;
#define UNLOCKED SRWLOCK_INIT
#define UNCHANGED CONDITION_VARIABLE_INIT
static void take(lock_type *lock) { AcquireSRWLockExclusive(lock); }
static void let_go(lock_type *lock) { ReleaseSRWLockExclusive(lock); }
static void sleep_until(condition_type *changed, lock_type *lock) { SleepConditionVariableSRW(changed, lock, INFINITE, 0); }
static void wake_all(condition_type *changed) { WakeAllConditionVariable(changed); }
static void give_way(void) { SwitchToThread(); }

#else
#include <pthread.h>
#include <sched.h>
#include <signal.h>

typedef pthread_mutex_t lock_type;
typedef pthread_cond_t condition_type;
#define UNLOCKED PTHREAD_MUTEX_INITIALIZER
#define UNCHANGED PTHREAD_COND_INITIALIZER
static void take(lock_type *lock) { pthread_mutex_lock(lock); }
static void let_go(lock_type *lock) { pthread_mutex_unlock(lock); }
static void sleep_until(condition_type *changed, lock_type *lock) { pthread_cond_wait(changed, lock); }
static void wake_all(condition_type *changed) { pthread_cond_broadcast(changed); }
static void give_way(void) { sched_yield(); }
#endif

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("isb") /* `yield` takes no time on most processors */
#else
#define PAUSE() atomic_signal_fence(memory_order_seq_cst)
#endif

enum { MOST_THREADS = 256, SPINS = 20000, PAUSES = 50, STACK = 4 << 20 };

/* A number that only grows, and threads that wait for its next value. */
typedef struct {
  _Alignas(128) atomic_uint value;
  atomic_uint asleep;
  condition_type changed;
} counter;

static lock_type sleeping = UNLOCKED; /* held to fall asleep and to wake */
static atomic_flag busy = ATOMIC_FLAG_INIT;
static counter called[MOST_THREADS]; /* regions of each thread; [0] is not used: the caller's */
static counter met = {.changed = UNCHANGED};
static _Alignas(128) atomic_uint arrived; /* threads at the meeting to come */
static unsigned started = 1;              /* threads, with the caller */
static part_fn running;
static void *argument;
static unsigned team;

static _Thread_local int number = 0, count = 1;

int pool_number(void) { return number; }
int pool_count(void) { return count; }

static void wait_beyond(counter *c, unsigned old) {
  for (int i = 1; i <= SPINS; i++) {
    if (atomic_load_explicit(&c->value, memory_order_acquire) != old) return;
    PAUSE();
    if (i % PAUSES == 0) give_way();
  }
  take(&sleeping);
  c->asleep++; /* before the value is read: who changes it reads `asleep` after that */
  while (c->value == old) sleep_until(&c->changed, &sleeping);
  c->asleep--;
  let_go(&sleeping);
}

static void advance(counter *c) {
  c->value++;
  if (!c->asleep) return;
  take(&sleeping);
  wake_all(&c->changed);
  let_go(&sleeping);
}

/* Come to the meeting of the region's threads; whether all others were there, who may then go on. */
static int arrive(void) {
  if (atomic_fetch_add(&arrived, 1) + 1 < (unsigned)count) return 0;
  arrived = 0;
  advance(&met);
  return 1;
}

void pool_barrier(void) {
  if (count == 1) return;
  const unsigned now = met.value;
  if (!arrive()) wait_beyond(&met, now);
}

static _Atomic(const kept_threads *) kept;

void pool_keep_threads(const kept_threads *where) { kept = where; }

/* Go where a thread is kept since `*known`; one that the system does not let go there runs on. */
static void go_where_kept(const kept_threads **known, long own) {
  const kept_threads *where = atomic_load_explicit(&kept, memory_order_acquire);
  if (where == *known) return;
  *known = where;
#ifdef __linux__
  if (own < where->threads)
    syscall(SYS_sched_setaffinity, 0, (size_t)where->words * sizeof(uint64_t), where->masks + own * where->words);
#else
  (void)own;
#endif
}

static void work(long own) {
  const kept_threads *known = 0;
  number = (int)own;
  for (unsigned before = 0;; before++) {
    wait_beyond(called + own, before);
    go_where_kept(&known, own);
    count = (int)team;
    running(argument);
    arrive();
  }
}

/* --- starting threads ---------------------------------------------------------------------------------------------- */

#ifdef _WIN32
static DWORD WINAPI begin(void *own) {
  work((long)(INT_PTR)own);
  return 0;
}

static int start(unsigned own) {
  const HANDLE made = CreateThread(0, STACK, begin, (void *)(INT_PTR)own, STACK_SIZE_PARAM_IS_A_RESERVATION, 0);
  return made && CloseHandle(made);
}

#else
static void *begin(void *own) {
  work((long)own);
  return 0;
}

/* In a new process, which has one thread. */
static void forget(void) {
  started = 1;
  arrived = 0;
  sleeping = (lock_type)UNLOCKED;
  met = (counter){.changed = UNCHANGED};
  atomic_flag_clear(&busy);
}

static int start(unsigned own) {
  static int known;
  pthread_attr_t as;
  pthread_t made;
  sigset_t left, before;
  static const int own_faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS};
  if (!known && pthread_atfork(0, 0, forget)) return 0;
  known = 1;
  if (pthread_attr_init(&as)) return 0;
  pthread_attr_setdetachstate(&as, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&as, STACK);
  sigfillset(&left); /* to Python's own threads */
  for (unsigned i = 0; i < sizeof own_faults / sizeof *own_faults; i++) sigdelset(&left, own_faults[i]);
  pthread_sigmask(SIG_SETMASK, &left, &before);
  const int failed = pthread_create(&made, &as, begin, (void *)(long)own);
  pthread_sigmask(SIG_SETMASK, &before, 0);
  pthread_attr_destroy(&as);
  return !failed;
}
#endif

void pool_parallel(part_fn part, void *given, unsigned threads, unsigned flags) {
  (void)flags;
  if (threads < 2 || atomic_flag_test_and_set(&busy)) {
    part(given);
    return;
  }
  threads = threads < MOST_THREADS ? threads : MOST_THREADS;
  for (; started < threads; started++) {
    called[started] = (counter){.changed = UNCHANGED};
    if (!start(started)) break;
  }
  team = threads < started ? threads : started;
  running = part;
  argument = given;
  count = (int)team;
  for (unsigned i = 1; i < team; i++) advance(called + i);
  part(given);
  pool_barrier();
  count = 1;
  atomic_flag_clear(&busy);
}
