/* Calls functions of a library of native operations for another process, for scripts/emulated.py: this program runs on an
   emulated processor, and the process that asks does not.

   Addresses mean the memory of that process. A page of it is fetched when it is first used, and what a function changed
   is written back when it is done. So functions run as they are, on structures with addresses in them too. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, MOST = 1 << 17, NUMBERS = 20 };

typedef struct {
  char name[64];
  int64_t numbers[NUMBERS]; /* integers and addresses, in order: a procedure call of AArch64 counts floats apart */
  float real;
  float padding;
} request;

typedef int64_t (*any_fn)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                          int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float);

static int memory; /* of the process that asks */
static char *places[2 * MOST]; /* pages that were fetched, by their hash */
static char **pages[MOST];     /* where these are, in order */
static char *before;           /* their content */
static long count;
static pthread_spinlock_t fetching;

static char **place_of(char *page) {
  uintptr_t at = (uintptr_t)page / PAGE * 0x9e3779b97f4a7c15u >> 46;
  while (places[at] && places[at] != page) at = (at + 1) % (2 * MOST);
  return places + at;
}

static void fetch(int number, siginfo_t *info, void *context) {
  (void)context;
  char *page = (char *)((uintptr_t)info->si_addr / PAGE * PAGE);
  pthread_spin_lock(&fetching);
  char **place = place_of(page), *copy = before + count * PAGE;
  if (!*place) { /* no other thread was faster */
    char *made = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (count == MOST || pread(memory, copy, PAGE, (off_t)(uintptr_t)page) != PAGE) {
      static const char said[] = "an address that the process does not have\n";
      (void)!write(2, said, sizeof said - 1);
      signal(number, SIG_DFL);
    } else {
      memcpy(made, copy, PAGE);
      mremap(made, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, page);
      *place = page;
      pages[count++] = place;
    }
  }
  pthread_spin_unlock(&fetching);
}

static int give_back(void) {
  int failed = 0;
  for (long i = 0; i < count; i++) {
    char *now = *pages[i];
    const char *old = before + i * PAGE;
    for (long from = 0, to; memcmp(now + from, old + from, (size_t)(PAGE - from)); from = to) {
      while (now[from] == old[from]) from++;
      for (to = from + 1; to < PAGE && now[to] != old[to];) to++;
      failed |= pwrite(memory, now + from, (size_t)(to - from), (off_t)(uintptr_t)(now + from)) != to - from;
    }
    munmap(now, PAGE);
    *pages[i] = 0;
  }
  count = 0;
  return failed;
}

/* The library's memset: that of Debian's C library uses an instruction (dc zva) that QEMU 7.2 resumes at a wrong place after a
   page was fetched. */
__attribute__((optimize("no-tree-loop-distribute-patterns"))) void *memset(void *at, int value, size_t size) {
  for (size_t i = 0; i < size; i++) ((char *)at)[i] = (char)value;
  return at;
}

int main(int given, char **words) {
  if (given != 3) return 2;
  void *library = dlopen(words[1], RTLD_NOW);
  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  before = mmap(0, (size_t)MOST * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  pthread_spin_init(&fetching, PTHREAD_PROCESS_PRIVATE);
  struct sigaction action = {.sa_sigaction = fetch, .sa_flags = SA_SIGINFO};
  sigaction(SIGSEGV, &action, 0);
  request r;
  while (fread(&r, sizeof r, 1, stdin) == 1) {
    const int64_t *n = r.numbers;
    any_fn function;
    if (!memory) memory = open(words[2], O_RDWR);
    *(void **)&function = dlsym(library, r.name);
    if (memory < 0 || !function) {
      fprintf(stderr, "no %s\n", function ? words[2] : r.name);
      return 1;
    }
    const int64_t result = function(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13],
                                    n[14], n[15], n[16], n[17], n[18], n[19], r.real);
    if (give_back()) {
      fprintf(stderr, "%s cannot be written\n", words[2]);
      return 1;
    }
    fwrite(&result, sizeof result, 1, stdout);
    fflush(stdout);
  }
  return 0;
}
