// A graph kernel: a Kronecker graph (R-MAT, with Graph500's numbers), a breadth-first search from some of its vertices, and PageRank.
// As Graph500 has it, vertices have names at random, so that no part of memory is the busy one. Not as Graph500 has it: edges go
// one way, and there are a few searches for its 64.
//
//   graph SCALE ROUNDS      2^SCALE vertices, 16 edges each; prints one JSON object. `teps`: edges that a search went along, a second;
//                           the harmonic mean of all searches, as Graph500 has it
//
// Nothing is kept of the edges but what searches use, so that the most memory that this has is what it is measured with: edges are
// made anew, from the same numbers, to be counted and to be filled in, a quarter of the vertices at a time.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { DEGREE = 16, PARTS = 4, SEED = 7 };

static uint64_t state;

// splitmix64.
static uint64_t next(void) {
    uint64_t x = state += 0x9E3779B97F4A7C15ull;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void *some(size_t count, size_t size) {
    void *memory = calloc(count, size);
    if (!memory) {
        perror("graph");
        exit(2);
    }
    return memory;
}

// Another name for each of 2^bits vertices.
static uint32_t renamed(uint32_t v, int bits) {
    uint32_t mask = (uint32_t)((1ull << bits) - 1);
    for (int round = 0; round < 2; round++) v ^= v >> (bits + 1) / 2, v = v * 0x9E3779B1u & mask;
    return v ^ v >> (bits + 1) / 2;
}

// An edge: for each bit of both ends one of four quarters, of 57, 19, 19 and 5 % (146, 49, 48 and 13 of 256).
static void edge(int scale, uint32_t *from, uint32_t *to) {
    uint32_t a = 0, b = 0;
    uint64_t dice = 0;
    for (int bit = 0; bit < scale; bit++, dice >>= 8) {
        if (bit % 8 == 0) dice = next();
        uint32_t one = dice & 0xff, below = one >= 195, right = (one >= 146 && !below) || one >= 243;
        a = a << 1 | below, b = b << 1 | right;
    }
    *from = renamed(a, scale), *to = renamed(b, scale);
}

int main(int argc, char **argv) {
    int scale = argc > 1 ? atoi(argv[1]) : 0, rounds = argc > 2 ? atoi(argv[2]) : 0;
    if (scale < 4 || scale > 28 || rounds < 1) {
        fprintf(stderr, "usage: graph SCALE ROUNDS\n");
        return 2;
    }
    size_t vertices = (size_t)1 << scale, edges = vertices * DEGREE;
    uint32_t *ends = some(edges, 4), *queue = some(vertices, 4), from, to;
    uint64_t *first = some(vertices + 2, 8);
    int32_t *depth = some(vertices, 4);
    double *rank = some(vertices, 8), *sum = some(vertices, 8);
    double began = now_s();
    state = SEED;
    for (size_t e = 0; e < edges; e++) {
        edge(scale, &from, &to);
        first[from + 2]++;
    }
    for (size_t v = 2; v < vertices + 2; v++) first[v] += first[v - 1];
    for (uint32_t part = 0; part < PARTS; part++) {
        state = SEED;
        for (size_t e = 0; e < edges; e++) {
            edge(scale, &from, &to);
            if (from / (vertices / PARTS) == part) ends[first[from + 1]++] = to;
        }
    }
    double built_s = now_s() - began;

    began = now_s();
    uint64_t reached = 0;
    double seconds_an_edge = 0;
    for (int round = 0; round < rounds; round++) {
        memset(depth, -1, vertices * 4);
        double search_began = now_s();
        size_t head = 0, tail = 0, gone = 0;
        uint32_t root;
        do root = (uint32_t)(next() % vertices);
        while (first[root] == first[root + 1]);
        depth[root] = 0, queue[tail++] = root;
        while (head < tail) {
            uint32_t v = queue[head++];
            gone += first[v + 1] - first[v];
            for (uint64_t e = first[v]; e < first[v + 1]; e++)
                if (depth[ends[e]] < 0) depth[ends[e]] = depth[v] + 1, queue[tail++] = ends[e];
        }
        reached += tail;
        seconds_an_edge += (now_s() - search_began) / (double)gone;
    }
    double bfs_s = now_s() - began;

    began = now_s();
    for (size_t v = 0; v < vertices; v++) rank[v] = 1.0 / (double)vertices;
    for (int round = 0; round < rounds; round++) {
        memset(sum, 0, vertices * 8);
        for (size_t v = 0; v < vertices; v++) {
            double share = first[v + 1] > first[v] ? rank[v] / (double)(first[v + 1] - first[v]) : 0;
            for (uint64_t e = first[v]; e < first[v + 1]; e++) sum[ends[e]] += share;
        }
        for (size_t v = 0; v < vertices; v++) rank[v] = 0.15 / (double)vertices + 0.85 * sum[v];
    }
    double top = 0;
    for (size_t v = 0; v < vertices; v++)
        if (rank[v] > top) top = rank[v];
    double rank_s = now_s() - began;
    printf("{\"build_s\":%.4f,\"bfs_s\":%.4f,\"rank_s\":%.4f,\"kernel_s\":%.4f,\"teps\":%.0f,\"check\":\"%llu %.12f\"}\n", built_s, bfs_s,
           rank_s, bfs_s + rank_s, rounds / seconds_an_edge, (unsigned long long)reached, top);
    return 0;
}
