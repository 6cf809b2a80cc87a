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
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, THREADS = 3 };
typedef uint64_t u64;

static char *region[2];
static size_t region_pages[2], pages;
// What each page was last made: 0 is the snapshot's, GONE are zeros.
static uint32_t *version;
static const uint32_t GONE = ~0u;

static void fail(const char *what) { perror(what), exit(1); }

// A third of a page is noise, the rest repeats its number; some pages are zeros from the start.
static u64 word(u64 page, uint32_t made, u64 k) {
    if (made == GONE || (made == 0 && page % 11 == 0)) return 0;
    if (k >= WORDS / 3) return page * 31 + made;
    u64 x = (page + 1) * 0x9E3779B97F4A7C15ull ^ (u64)made << 40 ^ k * 0xD1B54A32D192ED03ull;
    return (x ^ x >> 31) * 0x94D049BB133111EBull;
}

// Pages are counted in the order of the file.
static volatile u64 *at(size_t page) {
    bool second = page < region_pages[1];
    return (u64 *)(second ? region[1] + page * PAGE : region[0] + (page - region_pages[1]) * PAGE);
}

static bool is_wrong(size_t page) {
    volatile u64 *words = at(page);
    for (u64 k = 0; k < WORDS; k++)
        if (words[k] != word(page, version[page], k)) return true;
    return false;
}

static void make(size_t page) {
    version[page] = version[page] == GONE ? 1 : version[page] + 1;
    volatile u64 *words = at(page);
    for (u64 k = 0; k < WORDS; k++) words[k] = word(page, version[page], k);
}

static void drop(size_t first, size_t count) {
    for (size_t page = first; page < first + count && page < pages; page++) {
        version[page] = GONE;
        if (madvise((void *)at(page), PAGE, MADV_DONTNEED)) fail("madvise");
    }
}

static u64 next(u64 *random) {
    *random ^= *random << 13, *random ^= *random >> 7, *random ^= *random << 17;
    return *random >> 11;
}

static volatile bool over;
struct churner { pthread_t thread; u64 random, turns, wrong; size_t from; };

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

static void churn_for(double seconds) {
    static struct churner churners[THREADS];
    over = false;
    for (int i = 0; i < THREADS; i++) {
        churners[i] = (struct churner){ .random = 88172645463325252ull + (u64)i * 7919, .from = (size_t)i };
        pthread_create(&churners[i].thread, NULL, churn, &churners[i]);
    }
    usleep((useconds_t)(seconds * 1e6));
    over = true;
    u64 turns = 0, wrong = 0;
    for (int i = 0; i < THREADS; i++) {
        pthread_join(churners[i].thread, NULL);
        turns += churners[i].turns, wrong += churners[i].wrong;
    }
    printf("churned %lu wrong=%lu\n", (unsigned long)turns, (unsigned long)wrong);
}

static size_t wrong_pages(void) {
    size_t wrong = 0;
    for (size_t page = 0; page < pages; page++) wrong += is_wrong(page);
    return wrong;
}

// The kernel reads pages for us: a file's write waits in the kernel for what is missing.
static size_t wrong_in_calls(size_t first, size_t count) {
    int file = memfd_create("copy", 0);
    size_t wrong = 0;
    for (size_t page = first; page < first + count && page < pages; page++) {
        u64 copy[WORDS];
        if (pwrite(file, (void *)at(page), PAGE, 0) != PAGE || pread(file, copy, PAGE, 0) != PAGE) fail("pwrite");
        bool differs = false;
        for (u64 k = 0; k < WORDS; k++) differs |= copy[k] != word(page, version[page], k);
        wrong += differs;
    }
    close(file);
    return wrong;
}

static int child_has_it(void) {
    int pair[2], status;
    if (pipe(pair)) fail("pipe");
    pid_t child = fork();
    // The kernel says whether there is memory, without a signal.
    if (child == 0) _exit(write(pair[1], region[0], 1) == 1);
    close(pair[0]), close(pair[1]);
    if (child < 0 || waitpid(child, &status, 0) != child) fail("fork");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
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

static int make_userfaultfd(u64 features) {
    struct { u64 api, features, ioctls; } api = { 0xaa, features, 0 };
    int uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    if (uffd < 0 || ioctl(uffd, 0xc018aa3ful, &api)) fail("userfaultfd");
    for (int i = 0; i < 2; i++) {
        struct { u64 start, bytes, mode, ioctls; } range = { (u64)region[i], region_pages[i] * PAGE, 1, 0 };
        if (ioctl(uffd, 0xc020aa00ul, &range)) fail("UFFDIO_REGISTER");
    }
    return uffd;
}

static void hand_over(const char *path, int uffd) {
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    int socket_ = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(socket_, (struct sockaddr *)&address, sizeof address)) fail("connect");
    char text[1024] = "[";
    for (int i = 0; i < 2; i++) {
        size_t length = strlen(text), offset = i ? 0 : region_pages[1] * PAGE;
        snprintf(text + length, sizeof text - length,
                 "%s{\"base_host_virt_addr\":%lu,\"size\":%zu,\"offset\":%zu,\"page_size\":4096,\"page_size_kib\":4096}",
                 i ? "," : "", (unsigned long)region[i], region_pages[i] * PAGE, offset);
    }
    strcat(text, "]");
    struct iovec data = { text, strlen(text) };
    union { char bytes[CMSG_SPACE(sizeof uffd)]; struct cmsghdr align; } control = { 0 };
    struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control };
    struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
    *rights = (struct cmsghdr){ CMSG_LEN(sizeof uffd), SOL_SOCKET, SCM_RIGHTS };
    memcpy(CMSG_DATA(rights), &uffd, sizeof uffd);
    if (sendmsg(socket_, &message, 0) < 0) fail("sendmsg");
    close(socket_);
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
    else if (sscanf(line, "churn %lf", &seconds) == 1) churn_for(seconds);
    else if (!strncmp(line, "fork", 4)) printf("child has=%d\n", child_has_it());
    else if (!strncmp(line, "unmap", 5)) printf("%d\n", munmap(region[0], 16 * PAGE) ? errno : 0);
    else if (!strncmp(line, "move", 4)) printf("%d\n", mremap(region[0], 16 * PAGE, 16 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, region[0] - 64 * PAGE) == MAP_FAILED ? errno : 0);
    else if (!strncmp(line, "over", 4)) printf("%d\n", mmap(region[0], PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED ? errno : 0);
    else if (!strncmp(line, "resident", 8)) printf("resident %zu\n", resident());
    else printf("what is %s", line);
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
    int uffd = make_userfaultfd(features);
    if (!silent) hand_over(argv[2], uffd);
    if (eager && wrong_in_calls(0, pages)) return 1;
    printf("ready %d\n", getpid());
    char line[128];
    while (fgets(line, sizeof line, stdin) && strncmp(line, "stop", 4)) obey(line);
    return 0;
}
