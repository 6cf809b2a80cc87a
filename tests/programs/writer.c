// writer: writes to a memfd, which it also has mapped, by `write`. What it writes must mostly come back first: whoever calls `write` has
// the file's lock while it waits for that.
//
//   writer private|shared MIB SECONDS [busy]   what is written is private memory, or the beginning of the memfd itself
//
// With `busy` another thread changes the process's mappings all the time, and forks children that write from what they inherit.
//
// Of private memory and of the memfd's beginning there is MIB each, and as much of the memfd is written to. Says READY when it has
// filled them. Told a line, it does what that says, then says OK, or BAD and what is wrong:
//
//   go | verify | exit STATUS
//
// `go` takes SECONDS, and says WROTE, how many pages. `verify` is of what is never written to by `write`: nothing is promised of the rest.
#include "pattern.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

enum { AT_A_TIME = 16, KEY = 5 };

static uint64_t *private_memory, *shared_memory, pages;
static _Thread_local uint64_t state = 1;
static atomic_bool is_over;
static int file;

static uint64_t below(uint64_t n) { return mix(state += 0x9e3779b97f4a7c15u) % n; }

static bool put(const uint64_t *from) {
    uint64_t page = below(pages - AT_A_TIME), to = pages + below(pages - AT_A_TIME);
    return pwrite(file, from + page * WORDS, AT_A_TIME * PAGE, (off_t)(to * PAGE)) == AT_A_TIME * PAGE;
}

static void *be_busy(void *from) {
    enum { ITS_PAGES = 64 };
    uint64_t wrong = 0;
    while (!atomic_load(&is_over)) {
        for (int i = 0; i < 8; i++) {
            char *it = map_or_die(ITS_PAGES * PAGE);
            for (int page = 0; page < ITS_PAGES; page++) it[page * PAGE] = 1;
            wrong += madvise(it, ITS_PAGES / 2 * PAGE, MADV_DONTNEED) != 0 || it[0] != 0;
            wrong += munmap(it, ITS_PAGES * PAGE) != 0;
        }
        pid_t child = fork();
        if (!child) {
            for (int i = 0; i < 4; i++)
                if (!put(from)) _exit(1);
            _exit(0);
        }
        int status;
        wrong += child < 0 || waitpid(child, &status, 0) != child || status;
        state += (uint64_t)child;
    }
    return (void *)wrong;
}

static bool verify(void) {
    for (uint64_t page = 0; page < pages; page++)
        if (!pattern_right(private_memory, KEY, page) || !pattern_right(shared_memory, KEY + 1, page)) return false;
    return true;
}

static bool go(const uint64_t *from, double seconds) {
    uint64_t wrote = 0;
    for (double end = seconds_now() + seconds; seconds_now() < end; wrote += AT_A_TIME) {
        if (!put(from)) {
            say("BAD a write\n");
            return false;
        }
        // Pages of the memfd leave as others are looked at.
        for (int i = 0; i < AT_A_TIME; i++)
            if (!pattern_right(shared_memory, KEY + 1, below(pages))) return false;
    }
    say("WROTE %llu\n", (unsigned long long)wrote);
    return true;
}

static bool go_busily(uint64_t *from, double seconds, bool is_busy) {
    if (!is_busy) return go(from, seconds);
    pthread_t thread;
    void *wrong;
    if (pthread_create(&thread, NULL, be_busy, from)) return false;
    bool right = go(from, seconds);
    atomic_store(&is_over, true);
    if (pthread_join(thread, &wrong) || wrong) say("BAD the other thread\n");
    return right && !wrong;
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    bool is_shared = !strcmp(argv[1], "shared");
    pages = strtoull(argv[2], NULL, 0) << 8;
    double seconds = atof(argv[3]);
    file = memfd_create("writer", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)(2 * pages * PAGE))) return 2;
    shared_memory = mmap(NULL, 2 * pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared_memory == MAP_FAILED) return 2;
    private_memory = map_or_die(pages * PAGE);
    for (uint64_t page = 0; page < pages; page++) {
        pattern_write(private_memory, KEY, page);
        pattern_write(shared_memory, KEY + 1, page);
    }
    say("READY\n");
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        int status;
        if (sscanf(line, "exit %d", &status) == 1) return status;
        bool right = !strcmp(line, "go\n") ? go_busily(is_shared ? shared_memory : private_memory, seconds, argc > 4) : verify();
        if (right) say("OK\n");
    }
    return 0;
}
