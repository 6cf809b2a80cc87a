// Fills most of a guest's memory with a pattern, and checks every word of it before and after a pause.
//
//   fill MIB        a line "filled SUM", waits for a line on standard input, a line "verified SUM wrong=0", and again
//                   after a part was rewritten; ends when the line says "stop". "query MS" looks pages up for so long, most
//                   of them in a twentieth of the memory, and says how many, and how many were wrong; then waits again
//
// Built with -static: it is the only program of the guest besides busybox.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { PAGE = 4096, WORDS = PAGE / 8 };

// Half of a page is noise, half repeats its number; each rewriting changes both.
static uint64_t word(uint64_t page, uint64_t version, int k) {
    if (k >= WORDS / 2) return page * 31 + version;
    uint64_t x = (page + 1) * 0x9E3779B97F4A7C15ull ^ version << 56 ^ (uint64_t)k * 0xD1B54A32D192ED03ull;
    x ^= x >> 31;
    return x * 0x94D049BB133111EBull;
}

// Every seventh page is rewritten in each round.
static uint64_t version_of(uint64_t page, uint64_t round) {
    uint64_t version = 0;
    for (uint64_t r = 1; r <= round; r++)
        if (page % 7 == r % 7) version = r;
    return version;
}

static int is_right(const uint64_t *memory, uint64_t page, uint64_t round) {
    uint64_t version = version_of(page, round);
    for (int k = 0; k < WORDS; k++)
        if (memory[page * WORDS + k] != word(page, version, k)) return 0;
    return 1;
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void query(const uint64_t *memory, uint64_t pages, uint64_t round, double seconds) {
    uint64_t queries = 0, wrong = 0, random = 88172645463325252ull;
    for (double end = seconds_now() + seconds; seconds_now() < end; queries++) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        uint64_t among = random >> 60 ? pages / 20 + 1 : pages;
        wrong += !is_right(memory, (random >> 8) % among, round);
    }
    printf("round %llu queried %llu wrong=%llu\n", (unsigned long long)round, (unsigned long long)queries, (unsigned long long)wrong);
    fflush(stdout);
}

int main(int argc, char **argv) {
    size_t pages = (argc > 1 ? strtoull(argv[1], 0, 10) : 1) << 8;
    uint64_t *memory = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) { perror("fill: mmap"); return 1; }
    char line[64];
    for (uint64_t round = 0;; round++) {
        for (size_t p = 0; p < pages; p++)
            if (round == 0 || p % 7 == round % 7)
                for (int k = 0; k < WORDS; k++) memory[p * WORDS + k] = word(p, round, k);
        for (int look = 0; look < 2; look++) {
            uint64_t sum = 0;
            size_t wrong = 0;
            for (size_t p = 0; p < pages; p++) {
                uint64_t version = version_of(p, round);
                int bad = 0;
                for (int k = 0; k < WORDS; k++) {
                    uint64_t seen = memory[p * WORDS + k];
                    bad |= seen != word(p, version, k);
                    sum = sum * 0x100000001B3ull ^ seen;
                }
                wrong += bad;
            }
            printf("round %llu %s %016llx wrong=%zu\n", (unsigned long long)round, look ? "verified" : "filled", (unsigned long long)sum, wrong);
            fflush(stdout);
            if (wrong) return 1;
            if (look) continue;
            for (;;) {
                if (!fgets(line, sizeof line, stdin) || !strncmp(line, "stop", 4)) return 0;
                if (strncmp(line, "query ", 6)) break;
                query(memory, pages, round, strtod(line + 6, 0) / 1000);
            }
        }
    }
}
