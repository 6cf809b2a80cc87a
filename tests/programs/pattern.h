// Pages whose content follows from a key, and the checks that the small test programs share.
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8 };

// A line on standard output by one write() and no other system call, so that any filter lets it pass.
__attribute__((format(printf, 1, 2))) static inline void say(const char *format, ...) {
    char line[1024];
    va_list rest;
    va_start(rest, format);
    int n = vsnprintf(line, sizeof line, format, rest);
    va_end(rest);
    if (write(1, line, (size_t)n) != n) _exit(3);
}

static inline uint64_t mix(uint64_t x) {
    x ^= x >> 30, x *= 0xbf58476d1ce4e5b9u, x ^= x >> 27, x *= 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// Three pages in eight do not compress, one is zeros, one the same everywhere.
static inline uint64_t pattern_word(uint64_t key, uint64_t page, unsigned i) {
    switch (page % 8) {
    case 0: case 3: case 6: return mix(key + page * WORDS + i);
    case 1: return key + page * WORDS + i;
    case 2: return i == 17 ? key ^ page : 0;
    case 5: return 0;
    case 7: return 0x6c6c697073206120u + i % 3;
    default: return i % 16 ? 0x2065676150202d20u : key + page;
    }
}

static inline void pattern_write(uint64_t *memory, uint64_t key, uint64_t page) {
    for (unsigned i = 0; i < WORDS; i++) memory[page * WORDS + i] = pattern_word(key, page, i);
}

// Says on standard output what is wrong with a page, if anything.
static inline bool pattern_right(const uint64_t *memory, uint64_t key, uint64_t page) {
    const volatile uint64_t *at = memory + page * WORDS;
    for (unsigned i = 0; i < WORDS; i++) {
        uint64_t found = at[i], expected = pattern_word(key, page, i);
        if (found == expected) continue;
        say( "BAD page %llu word %u: expected %016llx, found %016llx\n", (unsigned long long)page, i, (unsigned long long)expected,
                (unsigned long long)found);
        return false;
    }
    return true;
}

static inline double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static inline void *map_or_die(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) perror("mmap"), exit(2);
    return p;
}
