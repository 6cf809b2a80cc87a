// torch: a program whose threads follow each other: each makes the next, and ends. The last verifies what the first has filled.
//
//   torch MIB SECONDS      OK, or BAD and what is wrong
#include "pattern.h"
#include <pthread.h>

static uint64_t pages, *memory;
static double until;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void *carry(void *nothing) {
    if (now() > until) {
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
    if (argc != 3) return 2;
    pages = strtoull(argv[1], NULL, 10) * 256, memory = map_or_die(pages * PAGE);
    for (uint64_t i = 0; i < pages; i++) pattern_write(memory, 1, i);
    until = now() + strtod(argv[2], NULL);
    pthread_t first;
    if (pthread_create(&first, NULL, carry, NULL) != 0) return 2;
    pthread_exit(NULL);
}
