// lost: holds memory with known content, none of it zeros, and survives the loss of any of it.
//
//   lost MIB      prints READY when filled, then an answer a command, a line each on standard input
//
// count [STEP]: reads every page, or one in STEP; answers `RIGHT r WRONG w LOST l` and OK. Lost is what SIGBUS tells.
// mend: gives lost pages back to the system and fills them again.   exit STATUS
#include "pattern.h"
#include <setjmp.h>
#include <signal.h>

static uint64_t *memory, pages;
static sigjmp_buf before;
static void *volatile bad;

static void on_sigbus(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    bad = info->si_addr;
    siglongjmp(before, 1);
}

static uint64_t word(uint64_t page, unsigned i) { return mix(page * WORDS + i) | 1; }

static void write_page(uint64_t page) {
    for (unsigned i = 0; i < WORDS; i++) memory[page * WORDS + i] = word(page, i);
}

enum { RIGHT, WRONG, LOST };

static int look_at(uint64_t page) {
    const volatile uint64_t *at = memory + page * WORDS;
    if (sigsetjmp(before, 1)) {
        bool here = (uintptr_t)bad >= (uintptr_t)at && (uintptr_t)bad < (uintptr_t)at + PAGE;
        return here ? LOST : WRONG;
    }
    for (unsigned i = 0; i < WORDS; i++)
        if (at[i] != word(page, i)) return WRONG;
    return RIGHT;
}

static void count(uint64_t step) {
    uint64_t found[3] = {0};
    for (uint64_t page = 0; page < pages; page += step) found[look_at(page)]++;
    say("RIGHT %llu WRONG %llu LOST %llu\n", (unsigned long long)found[RIGHT], (unsigned long long)found[WRONG],
        (unsigned long long)found[LOST]);
}

static bool mend(void) {
    for (uint64_t page = 0; page < pages; page++) {
        if (look_at(page) != LOST) continue;
        if (madvise(memory + page * WORDS, PAGE, MADV_DONTNEED)) return false;
        write_page(page);
    }
    return true;
}

int main(int argc, char **argv) {
    if (argc < 2) return fprintf(stderr, "lost: see the top of lost.c\n"), 2;
    pages = strtoull(argv[1], NULL, 10) * 256;
    // What the handler itself needs, the C library's data and the stack, stays where it is: it cannot survive losing that.
    if (mlockall(MCL_CURRENT)) return perror("mlockall"), 2;
    memory = map_or_die(pages * PAGE);
    struct sigaction action = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO};
    if (sigaction(SIGBUS, &action, NULL)) return perror("sigaction"), 2;
    for (uint64_t page = 0; page < pages; page++) write_page(page);
    say("READY\n");
    // No buffer of the C library's: it would be in memory that may be lost.
    for (char line[64];;) {
        unsigned have = 0;
        while (have + 1 < sizeof line && read(0, line + have, 1) == 1 && line[have] != '\n') have++;
        line[have] = 0;
        if (!have) return 0;
        char *space = strchr(line, ' ');
        uint64_t number = space ? strtoull(space, NULL, 10) : 1;
        bool right = true;
        if (!strncmp(line, "count", 5)) count(number ? number : 1);
        else if (!strncmp(line, "mend", 4)) right = mend();
        else if (!strncmp(line, "exit", 4)) return (int)number;
        else right = false;
        if (right) say("OK\n");
        else say("BAD %s\n", line);
    }
}
