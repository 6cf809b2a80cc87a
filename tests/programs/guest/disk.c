// Writes a disk from memory and reads it back past all caches, and checks every word: what moves the bytes reaches the memory itself.
//
//   disk PATH MIB               at each line "go" fills MIB of memory anew, reads the disk, which must have what the round before has
//                               written, and writes the memory to it; a line "round N disk wrong=0". Ends when the line says "stop"
//   disk PATH MIB write ROUND   for outside of the guest: makes the disk as that round leaves it,
//   disk PATH MIB check ROUND   or checks that it is so: status 1 if not
//
// Built with -static.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, PIECE_PAGES = 32, PIECES = 64 };

static uint64_t word(uint64_t page, uint64_t round, int k) {
    if (k >= WORDS / 2) return page * 31 + round;
    uint64_t x = (page + 1) * 0x9E3779B97F4A7C15ull ^ round << 56 ^ (uint64_t)k * 0xD1B54A32D192ED03ull;
    x ^= x >> 31;
    return x * 0x94D049BB133111EBull;
}

static void make(uint64_t *at, uint64_t page, uint64_t round) {
    for (int k = 0; k < WORDS; k++) at[k] = word(page, round, k);
}

static uint64_t wrong_pages(const uint64_t *at, uint64_t first, uint64_t pages, uint64_t round) {
    uint64_t wrong = 0;
    for (uint64_t page = 0; page < pages; page++) {
        int bad = 0;
        for (int k = 0; k < WORDS; k++) bad |= at[page * WORDS + k] != word(first + page, round, k);
        wrong += bad;
    }
    return wrong;
}

static uint64_t *memory_of(uint64_t pages) {
    uint64_t *memory = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) { perror("disk: mmap"); exit(2); }
    return memory;
}

// Whole pieces, or none of it.
static void move(ssize_t (*call)(int, void *, size_t, off_t), int disk, uint64_t *memory, uint64_t page) {
    if (call(disk, memory, PIECE_PAGES * PAGE, (off_t)(page * PAGE)) != PIECE_PAGES * PAGE) { perror("disk"); exit(2); }
}

static ssize_t put(int fd, void *from, size_t bytes, off_t at) { return pwrite(fd, from, bytes, at); }

int main(int argc, char **argv) {
    if (argc != 3 && argc != 5) return 2;
    uint64_t pages = strtoull(argv[2], 0, 10) << 8;
    // Read into many pieces by turns, so that they have left by then.
    uint64_t *memory = memory_of(pages), *pieces = memory_of(PIECES * PIECE_PAGES);
    int disk = open(argv[1], argc == 5 ? O_RDWR | O_CREAT : O_RDWR | O_DIRECT, 0600);
    if (disk < 0) { perror(argv[1]); return 2; }
    if (argc == 5) {
        uint64_t round = strtoull(argv[4], 0, 10), wrong = 0;
        for (uint64_t page = 0; page < pages; page += PIECE_PAGES) {
            if (!strcmp(argv[3], "check")) {
                move(pread, disk, pieces, page);
                wrong += wrong_pages(pieces, page, PIECE_PAGES, round);
                continue;
            }
            for (int i = 0; i < PIECE_PAGES; i++) make(pieces + i * WORDS, page + i, round);
            move(put, disk, pieces, page);
        }
        return wrong != 0;
    }
    printf("ready\n");
    fflush(stdout);
    char line[64];
    for (uint64_t round = 1; fgets(line, sizeof line, stdin) && strncmp(line, "stop", 4); round++) {
        uint64_t wrong = 0;
        for (uint64_t page = 0; page < pages; page++) make(memory + page * WORDS, page, round);
        for (uint64_t page = 0; page < pages; page += PIECE_PAGES) {
            uint64_t *piece = pieces + page / PIECE_PAGES % PIECES * PIECE_PAGES * WORDS;
            move(pread, disk, piece, page);
            wrong += wrong_pages(piece, page, PIECE_PAGES, round - 1);
        }
        for (uint64_t page = 0; page < pages; page += PIECE_PAGES) move(put, disk, memory + page * WORDS, page);
        if (fsync(disk)) { perror("disk: fsync"); return 2; }
        wrong += wrong_pages(memory, 0, pages, round);
        printf("round %llu disk wrong=%llu\n", (unsigned long long)round, (unsigned long long)wrong);
        fflush(stdout);
    }
    return 0;
}
