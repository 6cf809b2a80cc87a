// giver: a process that has the memory of another (CLONE_VM) gives it up, while that one sleeps.
//
//   giver MIB CPU [shared]    fills memory, shared memory if told so; at a line on standard input, the other, which gets what the CPU has
//                             left, gives up all of it in one call, then says OK if it reads as zeros, or how many pages do not
#include "pattern.h"
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>

enum { STACK_BYTES = 256 << 10 };

static uint64_t pages, *memory;
static bool is_shared;

static int give(void *cpu) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(strtoul(cpu, NULL, 10), &one);
    struct sched_param none = {0};
    if (sched_setaffinity(0, sizeof one, &one) || sched_setscheduler(0, SCHED_IDLE, &none)) _exit(2);
    say("GIVER %d\n", getpid());
    if (madvise(memory, pages * PAGE, is_shared ? MADV_REMOVE : MADV_DONTNEED)) _exit(2);
    uint64_t old = 0;
    for (uint64_t i = 0; i < pages; i++) old += ((volatile uint64_t *)memory)[i * WORDS] != 0;
    if (old) say("BAD %llu of %llu pages\n", (unsigned long long)old, (unsigned long long)pages);
    else say("OK\n");
    _exit(0);
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    pages = strtoull(argv[1], NULL, 10) * 256, is_shared = argc > 3;
    memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, (is_shared ? MAP_SHARED : MAP_PRIVATE) | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 2;
    char *stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    // The other is to wait for nothing but its removal.
    memset(stack, 1, STACK_BYTES);
    for (uint64_t i = 0; i < pages; i++) memory[i * WORDS] = mix(i) | 1;
    say("READY\n");
    char line[8];
    if (read(0, line, sizeof line) < 1) return 0;
    int status;
    pid_t giver = clone(give, stack + STACK_BYTES, CLONE_VM | SIGCHLD, argv[2]);
    if (giver < 0 || waitpid(giver, &status, 0) != giver) return 2;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 2;
}
