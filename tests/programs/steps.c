// steps: maps memory step by step, fills each step, and computes a while; none of it is mapped beside other memory.
//
//   steps MIB MILLISECONDS      so many mappings of 1 MiB, and so long between. Says OK and the most anonymous memory that it
//                               had resident, in KiB, or BAD and what is wrong.
#include "pattern.h"

enum { STEP = 256 };

static uint64_t resident_kib(void) {
    char line[256];
    unsigned long long kib = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status) && sscanf(line, "RssAnon: %llu", &kib) != 1) {}
    if (status) fclose(status);
    return kib;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    uint64_t steps = strtoull(argv[1], NULL, 10), most = 0;
    double pause = strtod(argv[2], NULL) / 1e3;
    uint64_t **memory = calloc(steps, sizeof *memory);
    if (!memory) return 2;
    for (uint64_t i = 0; i < steps; i++) {
        // What is behind it keeps it from becoming one with the next.
        memory[i] = mmap(NULL, 2 * STEP * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory[i] == MAP_FAILED || mprotect(memory[i], STEP * PAGE, PROT_READ | PROT_WRITE) != 0) return 2;
        for (uint64_t page = 0; page < STEP; page++) pattern_write(memory[i], i, page);
        for (double until = seconds_now() + pause; seconds_now() < until;) {}
        uint64_t now = resident_kib();
        most = now > most ? now : most;
    }
    for (uint64_t i = 0; i < steps * STEP; i++)
        if (!pattern_right(memory[i / STEP], i / STEP, i % STEP)) return 1;
    say("OK %llu\n", (unsigned long long)most);
    return 0;
}
