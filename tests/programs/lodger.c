// lodger: a process that has the memory of another, which ends before it.
//
//   lodger MIB FILE EVERY      fills memory, makes a process that has the same (CLONE_VM), forks, and ends at once. FILE gets OK or BAD of
//                              the other; it looks at one page in EVERY
#include "pattern.h"
#include <fcntl.h>
#include <sched.h>
#include <signal.h>

enum { STACK_BYTES = 256 << 10 };

static uint64_t pages, every, *memory;
static pid_t parent;

static int look(void *file) {
    dup2(open(file, O_CREAT | O_WRONLY, 0600), 1);
    while (getppid() == parent) usleep(1000);
    bool right = true;
    for (uint64_t i = 0; i < pages && right; i += every) right = pattern_right(memory, 1, i);
    if (right) say("OK\n");
    _exit(0);
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    pages = strtoull(argv[1], NULL, 10) * 256, every = strtoull(argv[3], NULL, 10), memory = map_or_die(pages * PAGE);
    parent = getpid();
    char *stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (uint64_t i = 0; i < pages; i++) pattern_write(memory, 1, i);
    if (clone(look, stack + STACK_BYTES, CLONE_VM | SIGCHLD, argv[2]) < 0) return 2;
    usleep(50000);
    if (fork() == 0) _exit(0);
    _exit(0);
}
