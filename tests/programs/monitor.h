// What the stand-ins for virtual machine monitors have in common: a guest that knows every byte of its memory, and a userfaultfd that is
// handed over. Whoever includes this says where a page is (`at`), and what its words are (`word`).
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
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, THREADS = 3 };
typedef uint64_t u64;

static size_t pages;
// What each page was last made.
static uint32_t *version;

static volatile u64 *at(size_t page);
static u64 word(u64 page, uint32_t made, u64 k);

static void fail(const char *what) { perror(what), exit(1); }

// A third of a page is noise, the rest repeats its number.
static u64 made_word(u64 page, uint32_t made, u64 k) {
    if (k >= WORDS / 3) return page * 31 + made;
    u64 x = (page + 1) * 0x9E3779B97F4A7C15ull ^ (u64)made << 40 ^ k * 0xD1B54A32D192ED03ull;
    return (x ^ x >> 31) * 0x94D049BB133111EBull;
}

static bool is_wrong(size_t page) {
    volatile u64 *words = at(page);
    for (u64 k = 0; k < WORDS; k++)
        if (words[k] != word(page, version[page], k)) return true;
    return false;
}

static void make_version(size_t page, uint32_t made) {
    version[page] = made;
    volatile u64 *words = at(page);
    for (u64 k = 0; k < WORDS; k++) words[k] = word(page, made, k);
}

static u64 next(u64 *random) {
    *random ^= *random << 13, *random ^= *random >> 7, *random ^= *random << 17;
    return *random >> 11;
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

static volatile bool over;
struct churner { pthread_t thread; u64 random, turns, wrong; size_t from; };

// Threads do `churn` for a while, each with what was made for it; all that they did.
static struct churner churn_for(double seconds, struct churner *churners, void *(*churn)(void *)) {
    over = false;
    for (int i = 0; i < THREADS; i++) pthread_create(&churners[i].thread, NULL, churn, &churners[i]);
    usleep((useconds_t)(seconds * 1e6));
    over = true;
    struct churner all = { 0 };
    for (int i = 0; i < THREADS; i++) {
        pthread_join(churners[i].thread, NULL);
        all.turns += churners[i].turns, all.wrong += churners[i].wrong;
    }
    return all;
}

static int child_has(const char *memory) {
    int pair[2], status;
    if (pipe(pair)) fail("pipe");
    pid_t child = fork();
    // The kernel says whether there is memory, without a signal.
    if (child == 0) _exit(write(pair[1], memory, 1) == 1);
    close(pair[0]), close(pair[1]);
    if (child < 0 || waitpid(child, &status, 0) != child) fail("fork");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// What seals are to forbid; false for another line.
static bool change_mapping(const char *line, char *here) {
    bool failed;
    if (!strncmp(line, "unmap", 5)) failed = munmap(here, 16 * PAGE);
    else if (!strncmp(line, "move", 4)) failed = mremap(here, 16 * PAGE, 16 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, here - 64 * PAGE) == MAP_FAILED;
    else if (!strncmp(line, "over", 4)) failed = mmap(here, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED;
    else return false;
    printf("%d\n", failed ? errno : 0);
    return true;
}

static int new_userfaultfd(u64 features) {
    struct { u64 api, features, ioctls; } api = { 0xaa, features, 0 };
    int uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    if (uffd < 0 || ioctl(uffd, 0xc018aa3ful, &api)) fail("userfaultfd");
    return uffd;
}

static void register_memory(int uffd, const char *start, size_t count, u64 mode) {
    struct { u64 start, bytes, mode, ioctls; } range = { (u64)start, count * PAGE, mode, 0 };
    if (ioctl(uffd, 0xc020aa00ul, &range)) fail("UFFDIO_REGISTER");
}

static int connect_to(const char *path) {
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    int other = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(other, (struct sockaddr *)&address, sizeof address)) fail("connect");
    return other;
}

// With a descriptor, unless that is negative.
static void send_all(int to, const void *data, size_t bytes, int with) {
    struct iovec vector = { (void *)(uintptr_t)data, bytes };
    union { char bytes[CMSG_SPACE(sizeof with)]; struct cmsghdr align; } control = { 0 };
    struct msghdr message = { .msg_iov = &vector, .msg_iovlen = 1 };
    if (with >= 0) {
        message.msg_control = &control, message.msg_controllen = sizeof control;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
        *rights = (struct cmsghdr){ CMSG_LEN(sizeof with), SOL_SOCKET, SCM_RIGHTS };
        memcpy(CMSG_DATA(rights), &with, sizeof with);
    }
    if (sendmsg(to, &message, MSG_NOSIGNAL) != (ssize_t)bytes) fail("sendmsg");
}
