// lodger: a process that has the memory of another, which ends before it.
//
//   lodger MIB FILE EVERY          fills memory, makes a process that has the same (CLONE_VM), forks, and ends at once. FILE gets OK or BAD
//                                  of the other; it looks at one page in EVERY
//   lodger MIB FILE EVERY MS       it is killed after so long instead, while it writes. FILE gets OK also where pages raise SIGBUS
#include "pattern.h"
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>

enum { STACK_BYTES = 256 << 10 };

static uint64_t pages, every, *memory;
static pid_t parent;
static sigjmp_buf behind;

static void go_on(int signal) { siglongjmp(behind, signal); }

static int look(void *file) {
    dup2(open(file, O_CREAT | O_WRONLY, 0600), 1);
    while (getppid() == parent) usleep(100);
    bool right = true;
    for (volatile uint64_t i = 0; i < pages && right; i += every) {
        if (sigsetjmp(behind, 1) == 0) right = pattern_right(memory, 1, i);
    }
    if (right) say("OK\n");
    _exit(0);
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    pages = strtoull(argv[1], NULL, 10) * 256, every = strtoull(argv[3], NULL, 10), memory = map_or_die(pages * PAGE);
    parent = getpid();
    char *stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (uint64_t i = 0; i < pages; i++) pattern_write(memory, 1, i);
    if (argc > 4) signal(SIGBUS, go_on);
    if (clone(look, stack + STACK_BYTES, CLONE_VM | SIGCHLD, argv[2]) < 0) return 2;
    if (argc > 4 && fork() == 0) {
        usleep((useconds_t)strtoul(argv[4], NULL, 10) * 1000);
        kill(parent, SIGKILL);
        _exit(0);
    }
    if (argc > 4) {
        for (uint64_t i = 0;; i = (i + 1) % pages) pattern_write(memory, 1, i);
    }
    usleep(50000);
    if (fork() == 0) _exit(0);
    _exit(0);
}
