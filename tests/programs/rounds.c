// rounds: touches memory in a known order, with a rest after every hundred touches, so that its miss-ratio curve is known.
//
//   rounds PAGES HOT cyclic|uniform TOUCHES REST_US     fills PAGES, says READY, touches the first HOT so often, or until SIGUSR1
//                                                       comes, checks all, says OK
#include "pattern.h"
#include <signal.h>

static volatile sig_atomic_t enough;

static void on_signal(int number) { enough = number; }

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    signal(SIGUSR1, on_signal);
    uint64_t pages = strtoull(argv[1], 0, 10), hot = strtoull(argv[2], 0, 10), touches = strtoull(argv[4], 0, 10);
    bool uniform = !strcmp(argv[3], "uniform");
    struct timespec rest = {0, atol(argv[5]) * 1000};
    uint64_t *memory = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 3;
    madvise(memory, pages * PAGE, MADV_NOHUGEPAGE);
    for (uint64_t i = 0; i < pages; i++) pattern_write(memory, 1, i);
    say("READY\n");
    for (uint64_t i = 0; i < touches && !enough; i++) {
        uint64_t page = (uniform ? mix(i + 1) : i) % hot;
        volatile uint64_t *word = memory + page * WORDS + 3;
        *word = *word;
        if (i % 100 == 99 && rest.tv_nsec) nanosleep(&rest, 0);
    }
    for (uint64_t i = 0; i < pages; i++)
        if (!pattern_right(memory, 1, i)) return 1;
    say("OK\n");
    return 0;
}
