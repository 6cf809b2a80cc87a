// grow: mappings that grow in place, again and again, by mremap; to the program each is one mapping, whoever looks at it.
//
//   grow SECONDS MIB      MIB of settled memory besides. Says READY, then OK and how often it grew, or BAD and what is wrong.
#include "pattern.h"
#include <errno.h>

// In pages. Small, so that most of the time one has just appeared; with plenty of room, so that what else is mapped does not
// come near. They begin at one place: what is mapped over the beginning of another is a different matter (README.md).
enum { FIRST = 1, MOST = 48, ROOM = 1024, STEP = 3 };

static uint64_t grown;
static char *room;

static bool failed(const char *what, uint64_t pages) {
    say("BAD %s at %llu pages after growing %llu times: %s\n", what, (unsigned long long)pages, (unsigned long long)grown, strerror(errno));
    return false;
}

// One life of a mapping: it appears with free space behind it, grows into that, and is checked as a whole.
static bool live(uint64_t key) {
    uint64_t pages = FIRST, *memory = mmap(room, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (memory == MAP_FAILED) return failed("mmap", pages);
    for (uint64_t i = 0; i < pages; i++) pattern_write(memory, key, i);
    for (; pages < MOST; pages += STEP) {
        void *at = mremap(memory, pages * PAGE, (pages + STEP) * PAGE, 0);
        if (at != memory && errno == ENOMEM) break; // the kernel has put something else there
        if (at != memory) return failed("mremap in place", pages);
        for (uint64_t i = pages; i < pages + STEP; i++) pattern_write(memory, key, i);
        grown++;
    }
    uint64_t *moved = mremap(memory, pages * PAGE, 2 * pages * PAGE, MREMAP_MAYMOVE);
    if (moved == MAP_FAILED) return failed("mremap", pages);
    for (uint64_t i = 0; i < pages; i++)
        if (!pattern_right(moved, key, i)) return false;
    return munmap(moved, 2 * pages * PAGE) == 0 || failed("munmap", 2 * pages);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    double until = seconds_now() + strtod(argv[1], NULL);
    uint64_t settled = strtoull(argv[2], NULL, 10) * 256, *memory = map_or_die(settled * PAGE);
    for (uint64_t i = 0; i < settled; i++) pattern_write(memory, 9, i);
    room = map_or_die(ROOM * PAGE);
    if (munmap(room, ROOM * PAGE) != 0) return 2;
    say("READY\n");
    for (uint64_t key = 100; seconds_now() < until; key++) {
        if (!live(key)) return 1;
        if (!pattern_right(memory, 9, mix(key) % settled)) return 1;
    }
    say("OK %llu\n", (unsigned long long)grown);
    return 0;
}
