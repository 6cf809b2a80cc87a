// A stand-in for a virtual machine monitor that resumes a guest from a snapshot and hands over its userfaultfd, as
// Firecracker does: one message over a Unix socket, after which nothing is said. It is its own guest, and knows every byte.
//
//   vmm image FILE MIB             writes a snapshot's memory file
//   vmm run SOCKET MIB [OPTION]    resumes from it: a line "ready PID", then a line for each line of standard input
//     fresh                        the memory starts as zeros
//     features HEX                 of the userfaultfd; 8, removals alone, is Firecracker's
//     shared                       the memory is a file, shared
//     silent                       makes it all, and never connects
//     touched                      some pages are there, and others than the snapshot's, before it is handed over
//     eager                        the kernel reads all of it before "ready"
//
//   check                  "checked wrong=N": all pages
//   write COUNT            that many pages change, here and there
//   drop FIRST COUNT       these are given back: they read as zeros
//   call FIRST COUNT       the kernel reads these (a system call that may wait for a page): "called wrong=N"
//   churn SECONDS          three threads check, change and give back pages all that time: "churned N wrong=N"
//   fork                   "child has=0|1": whether a child has the memory
//   unmap | move | over    an error's number, or 0, of munmap, mremap, and mmap over it
//   resident               "resident N": pages that are there
//   stop
//
// Its memory is two regions with a hole between, the second of which comes first in the file.
#include "monitor.h"

static char *region[2];
static size_t region_pages[2];
// Of the versions of a page 0 is the snapshot's, and this are zeros.
static const uint32_t GONE = ~0u;

// Some pages are zeros from the start.
static u64 word(u64 page, uint32_t made, u64 k) {
    return made == GONE || (made == 0 && page % 11 == 0) ? 0 : made_word(page, made, k);
}

// Pages are counted in the order of the file.
static volatile u64 *at(size_t page) {
    bool second = page < region_pages[1];
    return (u64 *)(second ? region[1] + page * PAGE : region[0] + (page - region_pages[1]) * PAGE);
}

static void make(size_t page) { make_version(page, version[page] == GONE ? 1 : version[page] + 1); }

static void drop(size_t first, size_t count) {
    for (size_t page = first; page < first + count && page < pages; page++) {
        version[page] = GONE;
        if (madvise((void *)at(page), PAGE, MADV_DONTNEED)) fail("madvise");
    }
}

// Each has pages of its own.
static void *churn(void *argument) {
    struct churner *it = argument;
    while (!over) {
        size_t page = next(&it->random) % (pages / THREADS) * THREADS + it->from;
        it->wrong += is_wrong(page);
        u64 what = next(&it->random) % 16;
        if (what < 6) make(page);
        else if (what == 6) drop(page, 1);
        it->turns++;
    }
    return NULL;
}

static void churn_mine(double seconds) {
    static struct churner churners[THREADS];
    for (int i = 0; i < THREADS; i++)
        churners[i] = (struct churner){ .random = 88172645463325252ull + (u64)i * 7919, .from = (size_t)i };
    struct churner all = churn_for(seconds, churners, churn);
    printf("churned %lu wrong=%lu\n", (unsigned long)all.turns, (unsigned long)all.wrong);
}

static size_t resident(void) {
    size_t count = 0;
    for (int i = 0; i < 2; i++) {
        unsigned char *there = malloc(region_pages[i]);
        int map = open("/proc/self/pagemap", O_RDONLY);
        for (size_t page = 0; page < region_pages[i]; page++) {
            u64 entry = 0;
            if (pread(map, &entry, 8, (off_t)(((u64)region[i] / PAGE + page) * 8)) != 8) fail("pagemap");
            count += entry >> 63;
        }
        close(map), free(there);
    }
    return count;
}

static void *map_at(void *where, size_t bytes, bool shared) {
    int kind = shared ? MAP_SHARED : MAP_PRIVATE | MAP_NORESERVE;
    void *memory = mmap(where, bytes, PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    return memory;
}

static void hand_over(const char *path, int uffd) {
    int manager = connect_to(path);
    char text[1024] = "[";
    for (int i = 0; i < 2; i++) {
        size_t length = strlen(text), offset = i ? 0 : region_pages[1] * PAGE;
        snprintf(text + length, sizeof text - length,
                 "%s{\"base_host_virt_addr\":%lu,\"size\":%zu,\"offset\":%zu,\"page_size\":4096,\"page_size_kib\":4096}",
                 i ? "," : "", (unsigned long)region[i], region_pages[i] * PAGE, offset);
    }
    strcat(text, "]");
    send_all(manager, text, strlen(text), uffd);
    close(manager);
}

static void obey(const char *line) {
    size_t first = 0, count = 0;
    double seconds = 0;
    static u64 random = 0x2545F4914F6CDD1Dull;
    if (!strncmp(line, "check", 5)) printf("checked wrong=%zu\n", wrong_pages());
    else if (sscanf(line, "write %zu", &count) == 1) {
        while (count-- > 0) make(next(&random) % pages);
        puts("written");
    } else if (sscanf(line, "drop %zu %zu", &first, &count) == 2) drop(first, count), puts("dropped");
    else if (sscanf(line, "call %zu %zu", &first, &count) == 2) printf("called wrong=%zu\n", wrong_in_calls(first, count));
    else if (sscanf(line, "churn %lf", &seconds) == 1) churn_mine(seconds);
    else if (!strncmp(line, "fork", 4)) printf("child has=%d\n", child_has(region[0]));
    else if (!strncmp(line, "resident", 8)) printf("resident %zu\n", resident());
    else if (!change_mapping(line, region[0])) printf("what is %s", line);
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    pages = strtoull(argv[3], 0, 10) << 8;
    region_pages[0] = pages / 4, region_pages[1] = pages - pages / 4;
    if (!strcmp(argv[1], "image")) {
        FILE *file = fopen(argv[2], "w");
        for (size_t page = 0; file && page < pages; page++)
            for (u64 k = 0; k < WORDS; k++) {
                u64 value = word(page, 0, k);
                fwrite(&value, 8, 1, file);
            }
        return !file || fclose(file);
    }
    bool fresh = false, shared = false, silent = false, touched = false, eager = false;
    u64 features = 8;
    for (int i = 4; i < argc; i++) {
        fresh |= !strcmp(argv[i], "fresh"), shared |= !strcmp(argv[i], "shared"), silent |= !strcmp(argv[i], "silent");
        touched |= !strcmp(argv[i], "touched"), eager |= !strcmp(argv[i], "eager");
        if (!strcmp(argv[i], "features") && i + 1 < argc) features = strtoull(argv[++i], 0, 16);
    }
    version = mmap(NULL, pages * sizeof *version, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh) memset(version, 0xff, pages * sizeof *version);
    // Room of its own: a hole between the regions, and one on either side.
    size_t hole = 256 * PAGE, room = pages * PAGE + 3 * hole;
    char *around = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    munmap(around, room);
    region[0] = map_at(around + hole, region_pages[0] * PAGE, shared);
    region[1] = map_at(around + 2 * hole + region_pages[0] * PAGE, region_pages[1] * PAGE, shared);
    for (size_t page = 0; touched && page < pages; page += 2) make(page);
    int uffd = new_userfaultfd(features);
    for (int i = 0; i < 2; i++) register_memory(uffd, region[i], region_pages[i], 1);
    if (!silent) hand_over(argv[2], uffd);
    if (eager && wrong_in_calls(0, pages)) return 1;
    printf("ready %d\n", getpid());
    char line[128];
    while (fgets(line, sizeof line, stdin) && strncmp(line, "stop", 4)) obey(line);
    return 0;
}
