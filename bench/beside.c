// beside: one thread touches pages at random, alone or beside one that only computes, in its own program or in another one.
//
//   beside MIB alone|thread|process SECONDS
//
// The one that touches is on the first CPU that is allowed, the other one on the second. Prints one JSON object with accesses a second
// and how many of them found a wrong byte.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096 };

static void fail(const char *what) { perror(what); exit(2); }
static double now_s(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }

static void confine(int nth) {
    cpu_set_t allowed, set;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) fail("beside: sched_getaffinity");
    CPU_ZERO(&set);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &allowed) && nth-- == 0) CPU_SET(cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set)) fail("beside: sched_setaffinity");
}

static void *compute(void *unused) {
    confine(1);
    for (volatile uint64_t n = 0;; n++);
    return unused;
}

static char mark(size_t page) { return (char)(page * 7 + 1); }

int main(int argc, char **argv) {
    int is_thread = argc == 4 && !strcmp(argv[2], "thread"), is_process = argc == 4 && !strcmp(argv[2], "process");
    if (argc != 4 || (!is_thread && !is_process && strcmp(argv[2], "alone"))) {
        fprintf(stderr, "usage: beside MIB alone|thread|process SECONDS\n");
        return 2;
    }
    size_t pages = strtoul(argv[1], 0, 10) << 8;
    char *memory = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!pages || memory == MAP_FAILED) fail("beside: mmap");
    pid_t other = 0;
    // Before there is memory that it would share.
    if (is_process && !(other = fork())) { prctl(PR_SET_PDEATHSIG, SIGKILL); compute(0); }
    if (other < 0) fail("beside: fork");
    for (size_t page = 0; page < pages; page++) memset(memory + page * PAGE, mark(page), PAGE / 64);
    pthread_t thread;
    if (is_thread && pthread_create(&thread, 0, compute, 0)) fail("beside: pthread_create");
    confine(0);
    uint64_t state = 88172645463325252u, accesses = 0, wrong = 0;
    double began = now_s(), passed;
    do {
        for (int n = 0; n < 64; n++, accesses++) {
            state ^= state << 13, state ^= state >> 7, state ^= state << 17;
            size_t page = state % pages;
            wrong += *(volatile char *)(memory + page * PAGE) != mark(page);
        }
        passed = now_s() - began;
    } while (passed < atof(argv[3]));
    if (other) { kill(other, SIGKILL); waitpid(other, 0, 0); }
    printf("{\"accesses_per_s\": %.0f, \"wrong\": %lu}\n", (double)accesses / passed, (unsigned long)wrong);
    return 0;
}
