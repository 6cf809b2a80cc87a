// Fills memory, then touches it in one order and says what an access cost.
//
//   touch MIB ORDER ACCESSES [WRITE_PERCENT]      ORDER is uniform, zipf or seq
//
// Prints one JSON object, microseconds throughout. Half of a page is noise and half repeats, so that it compresses to
// about a half. Every page read is checked against its number, and at the end all words of all pages: exit status 1 if
// one was wrong. On SIGUSR1 it prints what accesses cost since the last time, and begins to count anew; on SIGTERM it
// comes to its end.
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { PAGE = 4096, WORDS = PAGE / 8, MARK = 9, WRITES = 10, SUB_BITS = 6, SUB = 1 << SUB_BITS, SLOTS = 40 * SUB };

static uint64_t *memory, pages;
static uint64_t histogram[SLOTS];
// Since figures were last asked for.
static struct { uint64_t accesses, sum_ns, began_ns; } window;
static volatile sig_atomic_t asked, ended;

static void ask(int number) {
    if (number == SIGUSR1) asked = 1;
    else ended = 1;
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

// splitmix64: any number is a good seed, so a page's content follows from its number alone.
static uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

static uint64_t word(uint64_t page, int k) { return k < WORDS / 2 ? mix(page * WORDS + (uint64_t)k) : page; }

// Sixty-four slots an octave: percentiles to 1.6%; few of them are ever touched.
static int slot(uint64_t ns) {
    if (ns < SUB) return (int)ns;
    int octave = 63 - __builtin_clzll(ns);
    int index = (octave - SUB_BITS + 1) * SUB + (int)(ns >> (octave - SUB_BITS)) % SUB;
    return index < SLOTS ? index : SLOTS - 1;
}

static double slot_us(int index) {
    if (index < SUB) return index / 1e3;
    return ldexp(SUB + index % SUB + 0.5, index / SUB - 1) / 1e3;
}

static double percentile(double share) {
    uint64_t seen = 0;
    for (int i = 0; i < SLOTS; i++)
        if ((seen += histogram[i]) >= share * (double)window.accesses) return slot_us(i);
    return slot_us(SLOTS - 1);
}

// The figures of the window, without braces.
static void print_window(void) {
    double count = window.accesses ? (double)window.accesses : 1;
    printf("\"accesses\":%llu,\"mean_us\":%.3f,\"p50_us\":%.3f,\"p99_us\":%.3f,\"accesses_s\":%.4f", (unsigned long long)window.accesses,
           (double)window.sum_ns / 1e3 / count, percentile(.5), percentile(.99), (double)(now_ns() - window.began_ns) / 1e9);
}

static void begin_window(void) {
    memset(histogram, 0, sizeof histogram);
    memset(&window, 0, sizeof window);
    window.began_ns = now_ns();
}

// Gray et al., "Quickly generating billion-record synthetic databases" (SIGMOD 1994), theta 0.99 as in YCSB.
static struct { double theta, zeta, alpha, eta; } zipf = {.theta = 0.99};

static void zipf_prepare(void) {
    for (uint64_t i = 1; i <= pages; i++) zipf.zeta += pow((double)i, -zipf.theta);
    zipf.alpha = 1 / (1 - zipf.theta);
    zipf.eta = (1 - pow(2.0 / (double)pages, 1 - zipf.theta)) / (1 - (1 + pow(0.5, zipf.theta)) / zipf.zeta);
}

static uint64_t zipf_rank(double u) {
    double scaled = u * zipf.zeta;
    if (scaled < 1) return 0;
    if (scaled < 1 + pow(0.5, zipf.theta)) return 1;
    uint64_t rank = (uint64_t)((double)pages * pow(zipf.eta * u - zipf.eta + 1, zipf.alpha));
    return rank < pages ? rank : pages - 1;
}

int main(int argc, char **argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: touch MIB uniform|zipf|seq ACCESSES [WRITE_PERCENT]\n");
        return 2;
    }
    pages = strtoull(argv[1], 0, 10) << 8;
    char order = argv[2][0];
    uint64_t accesses = strtoull(argv[3], 0, 10), write_percent = argc > 4 ? strtoull(argv[4], 0, 10) : 0;
    memory = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || !accesses) {
        perror("touch: mmap");
        return 2;
    }
    madvise(memory, pages * PAGE, MADV_NOHUGEPAGE);
    if (order == 'z') zipf_prepare();

    // Who asks while memory is filled is answered afterwards.
    signal(SIGUSR1, ask);
    signal(SIGTERM, ask);
    uint64_t began = now_ns();
    for (uint64_t p = 0; p < pages; p++) {
        uint64_t *page = memory + p * WORDS;
        for (int k = 0; k < WORDS; k++) page[k] = word(p, k);
        page[MARK] = ~p;
        page[WRITES] = 0;
    }
    double populate_us = (double)(now_ns() - began) / 1e3 / (double)pages;

    uint64_t wrong = 0, dice = 1;
    begin_window();
    for (uint64_t i = 0; i < accesses && !ended; i++) {
        if (asked) {
            asked = 0;
            printf("{");
            print_window();
            printf("}\n");
            fflush(stdout);
            begin_window();
        }
        dice = mix(dice);
        uint64_t p = i % pages;
        // An odd multiplier scatters popular ranks over all of the memory.
        if (order == 'z') p = zipf_rank((double)(dice >> 11) * 0x1p-53) * 2654435761u % pages;
        if (order == 'u') p = dice % pages;
        volatile uint64_t *page = memory + p * WORDS;
        int writes = (dice >> 40) % 100 < write_percent;
        uint64_t start = now_ns();
        uint64_t mark = page[MARK];
        if (writes) page[WRITES]++;
        uint64_t took = now_ns() - start;
        wrong += mark != ~p;
        window.sum_ns += took;
        window.accesses++;
        histogram[slot(took)]++;
    }
    printf("{\"populate_us\":%.3f,", populate_us);
    print_window();

    for (uint64_t p = 0; p < pages; p++) {
        uint64_t *page = memory + p * WORDS;
        int bad = page[MARK] != ~p;
        for (int k = 0; k < WORDS; k++) bad |= k != MARK && k != WRITES && page[k] != word(p, k);
        wrong += bad;
    }
    printf(",\"wrong\":%llu}\n", (unsigned long long)wrong);
    return wrong != 0;
}
