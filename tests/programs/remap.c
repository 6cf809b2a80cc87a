// remap: threads that map memory beside each other's and use mremap on what they have mapped just now.
//
//   remap SECONDS THREADS MIB   holds so much beside; prints `REFUSED n OF m`, how many of its mremaps failed
#include "pattern.h"
#include <pthread.h>

static double until;

struct result {
    pthread_t thread;
    uint64_t random, calls, refused;
};

// Memory of so many pages, mapped in one call, is one mapping to its program, whatever was registered of it meanwhile.
static void *work(void *argument) {
    struct result *result = argument;
    char *kept = NULL;
    size_t kept_pages = 0;
    while (seconds_now() < until) {
        uint64_t random = result->random = mix(result->random + 0x9e3779b97f4a7c15u);
        size_t pages = 1 + random % 400, grown = pages + 1 + random % 7;
        char *memory = map_or_die(pages * PAGE);
        memory[0] = memory[pages / 2 * PAGE] = 1;
        // Now and then as long as a scan takes.
        if (random % 64 == 0) usleep(random % 3000);
        char *moved = mremap(memory, pages * PAGE, grown * PAGE, MREMAP_MAYMOVE);
        result->calls++;
        if (moved == MAP_FAILED) {
            result->refused++;
            moved = memory, grown = pages;
        }
        if (kept) munmap(kept, kept_pages * PAGE);
        kept = moved, kept_pages = grown;
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 4) return fprintf(stderr, "remap: see the top of remap.c\n"), 2;
    size_t held = strtoull(argv[3], NULL, 10) << 20;
    memset(map_or_die(held), 1, held);
    until = seconds_now() + strtod(argv[1], NULL);
    struct result results[16] = {0}, all = {0};
    int count = atoi(argv[2]) < 16 ? atoi(argv[2]) : 16;
    for (int i = 0; i < count; i++) {
        results[i].random = (uint64_t)i + 1;
        if (pthread_create(&results[i].thread, NULL, work, &results[i])) return perror("pthread_create"), 2;
    }
    for (int i = 0; i < count; i++) {
        pthread_join(results[i].thread, NULL);
        all.calls += results[i].calls, all.refused += results[i].refused;
    }
    say("REFUSED %llu OF %llu\n", (unsigned long long)all.refused, (unsigned long long)all.calls);
    return 0;
}
