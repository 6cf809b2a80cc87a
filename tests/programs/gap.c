// gap: one thread that looks at the clock without pause. On SIGUSR1: the longest time it did not run, in microseconds.
//
//   gap MIB
#include "pattern.h"
#include <signal.h>

static volatile sig_atomic_t asked;
static void ask(int signal) { asked = signal; }

int main(int argc, char **argv) {
    uint64_t pages = argc > 1 ? strtoull(argv[1], NULL, 10) * 256 : 256;
    uint64_t *memory = map_or_die(pages * PAGE);
    for (uint64_t i = 0; i < pages; i++) pattern_write(memory, 3, i);
    signal(SIGUSR1, ask);
    say( "READY\n");
    double longest = 0, last = seconds_now();
    for (;;) {
        double at = seconds_now();
        if (at - last > longest) longest = at - last;
        last = at;
        if (!asked) continue;
        asked = 0;
        say( "GAP %.0f\n", longest * 1e6);
        longest = 0, last = seconds_now();
    }
}
