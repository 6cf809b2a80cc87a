// torch: a program whose threads follow each other: each makes the next, and ends. The last verifies what the first has filled.
//
//   torch MIB SECONDS           OK, or BAD and what is wrong
//   torch MIB SECONDS late      the last one fills it, says READY, and waits for the end of its input before
#include "pattern.h"
#include <pthread.h>

static uint64_t pages, *memory;
static bool is_late;
static double until;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void fill(void) {
    for (uint64_t i = 0; i < pages; i++) pattern_write(memory, 1, i);
}

static void *carry(void *nothing) {
    if (now() > until) {
        if (is_late) {
            fill();
            say("READY\n");
            for (char byte; read(0, &byte, 1) == 1;) {}
        }
        bool right = true;
        for (uint64_t i = 0; i < pages && right; i++) right = pattern_right(memory, 1, i);
        if (right) say("OK\n");
        _exit(0);
    }
    pthread_t next;
    if (pthread_create(&next, NULL, carry, nothing) != 0 || pthread_detach(next) != 0) _exit(2);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    is_late = argc > 3;
    pages = strtoull(argv[1], NULL, 10) * 256, memory = map_or_die(pages * PAGE);
    if (!is_late) fill();
    until = now() + strtod(argv[2], NULL);
    pthread_t first;
    if (pthread_create(&first, NULL, carry, NULL) != 0) return 2;
    pthread_exit(NULL);
}
