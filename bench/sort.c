// Quicksort of numbers in memory, as in dcm's evaluation: Hoare's partition, the middle of three as pivot.
//
//   sort MIB       prints one JSON object; exit status 1 when the numbers are not in order or not those that there were
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

// splitmix64.
static uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

static void swap(uint64_t *a, uint64_t *b) {
    uint64_t kept = *a;
    *a = *b, *b = kept;
}

static void sort(uint64_t *from, uint64_t *to) {  // to: the last one
    while (from < to) {
        uint64_t *middle = from + (to - from) / 2;
        if (*middle < *from) swap(middle, from);
        if (*to < *from) swap(to, from);
        if (*to < *middle) swap(to, middle);
        uint64_t pivot = *middle, *low = from, *high = to;
        while (low <= high) {
            while (*low < pivot) low++;
            while (*high > pivot) high--;
            if (low <= high) swap(low++, high--);
        }
        // The smaller part first: the stack stays short.
        if (high - from < to - low) {
            sort(from, high);
            from = low;
        } else {
            sort(low, to);
            to = high;
        }
    }
}

int main(int argc, char **argv) {
    size_t count = (argc > 1 ? strtoull(argv[1], 0, 10) : 0) << 17;
    uint64_t *numbers = malloc(count * 8 + 8), sum = 0, sorted = 0, wrong = 0;
    if (!numbers || !count) {
        fprintf(stderr, "usage: sort MIB\n");
        return 2;
    }
    for (size_t i = 0; i < count; i++) sum += numbers[i] = mix(i);
    double began = now_s();
    sort(numbers, numbers + count - 1);
    double took = now_s() - began;
    for (size_t i = 0; i < count; i++) {
        sorted += numbers[i];
        wrong += i && numbers[i - 1] > numbers[i];
    }
    wrong += sorted != sum;
    printf("{\"sort_s\":%.4f,\"wrong\":%llu}\n", took, (unsigned long long)wrong);
    return wrong != 0;
}
