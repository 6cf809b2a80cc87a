// syscalls: system calls that read and write memory which was evicted just before.
//
//   syscalls TEST [--native]      a line of JSON: how many pages were out of memory when the kernel needed them
//
// Under a budget of a few MiB, `cool` pushes the test's own area out by using other memory, and looks at
// /proc/self/pagemap until it is gone. What the calls gave is compared through memory that no pager manages.
#include "pattern.h"
#include "uring.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <sys/wait.h>

enum { PAGES = 384, HALF = PAGES / 2, FILLER = 24 << 20 };
static uint64_t *area, *filler, *mirror;  // managed, managed, not managed (shared)
static uint64_t cold_pages, filler_key = 9;
static bool native;
static int pagemap;

#define NEED(what) do { if (!(what)) fail(#what, __LINE__); } while (0)
static _Noreturn void fail(const char *what, int line) {
    fprintf(stderr, "syscalls: line %d: %s (errno: %s)\n", line, what, strerror(errno));
    exit(1);
}

static unsigned absent(const void *from, unsigned pages) {
    uint64_t entry[PAGES];
    unsigned n = 0;
    NEED(pread(pagemap, entry, pages * 8, (off_t)((uintptr_t)from / PAGE * 8)) == (ssize_t)(pages * 8));
    for (unsigned i = 0; i < pages; i++) n += !(entry[i] >> 63);
    return n;
}

// Uses other memory, several times the budget of it.
static void press(void) {
    filler_key++;
    for (uint64_t i = 0; i < FILLER / PAGE && !native; i++) filler[i * WORDS] = filler_key + i, filler[i * WORDS + 7] = mix(filler_key + i);
}

// Pushes pages of the area out. Their number is what the test can claim to have tested.
static void cool(unsigned pages) {
    if (native) return;
    unsigned out = 0;
    for (double end = seconds_now() + 8; seconds_now() < end && out < pages; out = absent(area, pages)) press();
    cold_pages += out;
}

static void fill(uint64_t *at, uint64_t key, unsigned pages) {
    for (unsigned i = 0; i < pages; i++) pattern_write(at, key, i);
}
static bool right(const uint64_t *at, uint64_t key, unsigned pages) {
    for (unsigned i = 0; i < pages; i++)
        if (!pattern_right(at, key, i)) return false;
    return true;
}

// The area's pages as a vector, the last first.
static struct iovec *backwards(unsigned pages) {
    static struct iovec v[PAGES];
    for (unsigned i = 0; i < pages; i++) v[i] = (struct iovec){area + (pages - 1 - i) * WORDS, PAGE};
    return v;
}
static bool right_backwards(const uint64_t *at, uint64_t key, unsigned pages) {
    for (unsigned i = 0; i < pages; i++)
        for (unsigned k = 0; k < WORDS; k++)
            if (at[i * WORDS + k] != pattern_word(key, pages - 1 - i, k)) return false;
    return true;
}

static int scratch_file(int flags) {
    char name[] = "syscalls-XXXXXX";
    int fd = mkostemp(name, flags);
    NEED(fd >= 0 && !unlink(name));
    return fd;
}

static const size_t BYTES = PAGES * PAGE;

static void test_files(void) {
    int fd = scratch_file(0);
    fill(area, 1, PAGES), cool(PAGES);
    NEED(write(fd, area, BYTES) == (ssize_t)BYTES && pread(fd, mirror, BYTES, 0) == (ssize_t)BYTES && right(mirror, 1, PAGES));
    fill(mirror, 2, PAGES);
    NEED(pwrite(fd, mirror, BYTES, 0) == (ssize_t)BYTES);
    cool(PAGES);
    NEED(lseek(fd, 0, SEEK_SET) == 0 && read(fd, area, BYTES) == (ssize_t)BYTES && right(area, 2, PAGES));
    cool(PAGES);
    NEED(pwrite(fd, area, BYTES, 4096) == (ssize_t)BYTES && pread(fd, mirror, BYTES, 4096) == (ssize_t)BYTES && right(mirror, 2, PAGES));
    fill(mirror, 3, PAGES);
    NEED(pwrite(fd, mirror, BYTES, 0) == (ssize_t)BYTES);
    cool(PAGES);
    NEED(pread(fd, (char *)area + 100, BYTES - 4096, 100) == (ssize_t)BYTES - 4096);
    NEED(!memcmp((char *)area + 100, (char *)mirror + 100, BYTES - 4096));
}

static void test_vectors(void) {
    int fd = scratch_file(0);
    fill(area, 1, PAGES), cool(PAGES);
    NEED(writev(fd, backwards(PAGES), PAGES) == (ssize_t)BYTES);
    NEED(pread(fd, mirror, BYTES, 0) == (ssize_t)BYTES && right_backwards(mirror, 1, PAGES));
    cool(PAGES);
    NEED(pwritev(fd, backwards(PAGES), PAGES, 8192) == (ssize_t)BYTES);
    NEED(pread(fd, mirror, BYTES, 8192) == (ssize_t)BYTES && right_backwards(mirror, 1, PAGES));
    fill(area, 7, PAGES), cool(PAGES);
    NEED(lseek(fd, 8192, SEEK_SET) == 8192 && readv(fd, backwards(PAGES), PAGES) == (ssize_t)BYTES && right(area, 1, PAGES));
    fill(area, 7, PAGES), cool(PAGES);
    NEED(preadv(fd, backwards(PAGES), PAGES, 8192) == (ssize_t)BYTES && right(area, 1, PAGES));
}

static void test_direct(void) {
    int fd = scratch_file(O_DIRECT);
    for (uint64_t round = 1; round <= 4; round++) {
        fill(area, round, PAGES), cool(PAGES);
        NEED(pwrite(fd, area, BYTES, 0) == (ssize_t)BYTES);
        fill(area, 99, PAGES), cool(PAGES);
        NEED(pread(fd, area, BYTES, 0) == (ssize_t)BYTES && right(area, round, PAGES));
        cool(PAGES);
        NEED(right(area, round, PAGES));
    }
}

static void test_io_uring(void) {
    Uring u;
    NEED(!uring_open(&u));
    int buffered = scratch_file(0), direct = scratch_file(O_DIRECT);
    for (int round = 0; round < 4; round++) {
        int fd = round & 1 ? direct : buffered;
        uint8_t flags = round & 2 ? IOSQE_ASYNC : 0;  // by a worker thread
        fill(area, 1, PAGES), cool(PAGES);
        NEED(uring_do(&u, IORING_OP_WRITE, flags, fd, area, BYTES, 0) == (int)BYTES);
        fill(area, 2, PAGES), cool(PAGES);
        NEED(uring_do(&u, IORING_OP_READ, flags, fd, area, BYTES, 0) == (int)BYTES && right(area, 1, PAGES));
        fill(area, 3, PAGES), cool(PAGES);
        NEED(uring_do(&u, IORING_OP_READV, flags, fd, backwards(PAGES), PAGES, 0) == (int)BYTES && right_backwards(area, 1, PAGES));
        cool(PAGES);
        NEED(uring_do(&u, IORING_OP_WRITEV, flags, fd, backwards(PAGES), PAGES, 0) == (int)BYTES);
        NEED(pread(fd, mirror, BYTES, 0) == (ssize_t)BYTES && right(mirror, 1, PAGES));
    }
}

// Registered buffers are pinned: the kernel writes to those very pages, whatever was evicted since.
static void test_pinned(void) {
    Uring u;
    NEED(!uring_open(&u));
    int fd = scratch_file(0);
    fill(area, 1, PAGES), cool(PAGES);
    NEED(!uring_register(&u, area, HALF * PAGE));
    for (uint64_t round = 2; round < 6; round++) {
        fill(mirror, round, HALF);
        NEED(pwrite(fd, mirror, HALF * PAGE, 0) == HALF * PAGE);
        press(), press();
        NEED(uring_do(&u, IORING_OP_READ_FIXED, 0, fd, area, HALF * PAGE, 0) == HALF * PAGE && right(area, round, HALF));
        fill(area, round + 10, HALF);
        NEED(uring_do(&u, IORING_OP_WRITE_FIXED, 0, fd, area, HALF * PAGE, 0) == HALF * PAGE);
        NEED(pread(fd, mirror, HALF * PAGE, 0) == HALF * PAGE && right(mirror, round + 10, HALF));
    }
    for (unsigned i = HALF; i < PAGES; i++) NEED(pattern_right(area, 1, i));
    close(u.fd);
    press(), press();
    NEED(right(area, 15, HALF));
}

static void test_pipes(void) {
    int ends[2];
    NEED(!pipe(ends));
    for (unsigned at = 0; at < PAGES; at += 8) {
        fill(area, at, 16);
        if (at % 64 == 0) cool(16);
        NEED(write(ends[1], area, 8 * PAGE) == 8 * PAGE && read(ends[0], area + 8 * WORDS, 8 * PAGE) == 8 * PAGE);
        NEED(right(area, at, 8) && !memcmp(area, area + 8 * WORDS, 8 * PAGE));
    }
    fill(area, 5, PAGES), cool(8);
    struct iovec gift = {area, 8 * PAGE};
    NEED(vmsplice(ends[1], &gift, 1, 0) == 8 * PAGE);
    cool(8);  // the pipe holds the pages now
    NEED(read(ends[0], mirror, 8 * PAGE) == 8 * PAGE && right(mirror, 5, 8) && right(area, 5, PAGES));
}

static void test_sockets(void) {
    int ends[2], size = 1 << 20;
    NEED(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends) && !setsockopt(ends[0], SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size));
    for (uint64_t round = 1; round < 6; round++) {
        fill(area, round, 64), cool(64);
        struct msghdr out = {.msg_iov = backwards(32), .msg_iovlen = 32};
        NEED(sendmsg(ends[0], &out, 0) == 32 * PAGE);
        struct iovec in[2] = {{area + 32 * WORDS, 5 * PAGE + 7}, {(char *)area + 37 * PAGE + 7, 27 * PAGE - 7}};
        struct msghdr message = {.msg_iov = in, .msg_iovlen = 2};
        NEED(recvmsg(ends[1], &message, MSG_PEEK | MSG_WAITALL) > 0);
        cool(64);
        NEED(recvmsg(ends[1], &message, MSG_WAITALL) == 32 * PAGE && right_backwards(area + 32 * WORDS, round, 32) && right(area, round, 32));
    }
}

static void test_getrandom(void) {
    fill(area, 1, PAGES), cool(PAGES);
    for (unsigned i = 0; i < PAGES; i += 2) NEED(getrandom(area + i * WORDS, PAGE, 0) == PAGE);
    memcpy(mirror, area, BYTES);
    for (unsigned i = 0; i < PAGES; i += 2) NEED(area[i * WORDS] != pattern_word(1, i, 0) && area[i * WORDS + 511] != pattern_word(1, i, 511));
    for (unsigned i = 1; i < PAGES; i += 2) NEED(pattern_right(area, 1, i));
    cool(PAGES);
    NEED(!memcmp(mirror, area, BYTES));
}

static void test_process_vm(void) {
    fill(area, 1, PAGES), cool(PAGES);
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        struct iovec here = {mirror, BYTES}, there = {area, BYTES};
        if (process_vm_readv(parent, &here, 1, &there, 1, 0) != (ssize_t)BYTES || !right(mirror, 1, PAGES)) _exit(1);
        fill(mirror, 2, PAGES);
        _exit(process_vm_writev(parent, &here, 1, &there, 1, 0) != (ssize_t)BYTES);
    }
    int status;
    NEED(waitpid(child, &status, 0) == child && status == 0);
    NEED(right(area, 2, PAGES));
}

// The kernel does not wait for a pager here, nor for ptrace: it answers EIO for an evicted page, and never with zeros.
static void test_proc_mem(void) {
    int fd = open("/proc/self/mem", O_RDWR);
    NEED(fd >= 0);
    fill(area, 1, PAGES), cool(PAGES);
    for (unsigned i = 0; i < PAGES; i++) {
        off_t at = (off_t)(uintptr_t)(area + i * WORDS);
        ssize_t n = pread(fd, mirror, PAGE, at);
        if (n == PAGE) NEED(!memcmp(mirror, area + i * WORDS, PAGE));
        else NEED(!native && n == -1 && errno == EIO);
        pattern_write(area, 2, i);  // which brings it in
        NEED(pread(fd, mirror, PAGE, at) == PAGE && !memcmp(mirror, area + i * WORDS, PAGE));
        mirror[5] = i;
        NEED(pwrite(fd, mirror, PAGE, at) == PAGE && area[i * WORDS + 5] == i);
    }
}

static long futex(uint64_t *word, int op, uint32_t value, const struct timespec *limit) {
    return syscall(SYS_futex, (uint32_t *)word, op, value, limit, NULL, 0);
}
static void *waker(void *word) {
    usleep(50000);
    __atomic_store_n((uint32_t *)word, 2, __ATOMIC_SEQ_CST);
    while (futex(word, FUTEX_WAKE_PRIVATE, 1, NULL) == 0) usleep(1000);
    return NULL;
}
static void test_futex(void) {
    struct timespec limit = {5, 0}, brief = {0, 20000000};
    for (unsigned i = 0; i < 8; i++) {
        fill(area, 1, PAGES);
        area[i * WORDS] = 1, area[(i + 16) * WORDS] = 0, area[(i + 32) * WORDS] = 1;
        cool(64);
        NEED(futex(area + i * WORDS, FUTEX_WAIT_PRIVATE, 7, &limit) == -1 && errno == EAGAIN);      // another value: read from the pool
        cool(64);
        NEED(futex(area + (i + 32) * WORDS, FUTEX_WAIT_PRIVATE, 1, &brief) == -1 && errno == ETIMEDOUT);
        pthread_t id;
        NEED(!pthread_create(&id, NULL, waker, area + i * WORDS));
        NEED(futex(area + i * WORDS, FUTEX_WAIT_PRIVATE, 1, &limit) == 0 && (uint32_t)area[i * WORDS] == 2);
        pthread_join(id, NULL);
        // With priority inheritance the kernel does not wait for a pager, but gives EFAULT. C libraries try the word first.
        uint32_t *lock = (uint32_t *)(area + (i + 16) * WORDS), unlocked = 0;
        cool(64);
        NEED(!__atomic_compare_exchange_n(lock, &(uint32_t){1}, 0, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
        NEED(futex(area + (i + 16) * WORDS, FUTEX_LOCK_PI_PRIVATE, 0, NULL) == 0 && *lock == (uint32_t)gettid());
        cool(64);
        uint32_t held = (uint32_t)gettid();
        NEED(__atomic_compare_exchange_n(lock, &held, unlocked, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    }
}

static void test_mlock(void) {
    for (uint64_t round = 1; round < 4; round++) {
        fill(area, round, PAGES), cool(PAGES);
        NEED(!mlock(area, 64 * PAGE) && absent(area, 64) == 0 && right(area, round, 64));
        press(), press();
        NEED(native || absent(area, 64) == 0);  // it stays
        fill(area, round + 10, 64);
        NEED(!munlock(area, 64 * PAGE));
        cool(64);
        NEED(right(area, round + 10, 64));
        for (unsigned i = 64; i < PAGES; i++) NEED(pattern_right(area, round, i));
    }
}

static void test_mincore(void) {
    unsigned char in[PAGES];
    fill(area, 1, PAGES), cool(PAGES);
    NEED(!mincore(area, BYTES, in));
    for (unsigned i = 0; i < PAGES && !native; i++) NEED(!(in[i] & 1));  // evicted pages are not in memory, and it says so
    NEED(right(area, 1, PAGES) && !mincore(area, PAGE, in));
}

// Small structures that the kernel copies in and out.
static void test_structs(void) {
    char *at = (char *)area;
    int ends[2];
    NEED(!pipe(ends));
    for (unsigned i = 0; i < 6; i++) {
        fill(area, 1, 64), cool(64);
        NEED(!stat("/", (struct stat *)(at + PAGE - 64)) && S_ISDIR(((struct stat *)(at + PAGE - 64))->st_mode));  // across two pages
        NEED(!uname((struct utsname *)(at + 3 * PAGE)) && !strcmp(((struct utsname *)(at + 3 * PAGE))->sysname, "Linux"));
        NEED(getcwd(at + 4 * PAGE, PAGE) && at[4 * PAGE] == '/');
        NEED(!syscall(SYS_clock_gettime, CLOCK_MONOTONIC, at + 5 * PAGE) && ((struct timespec *)(at + 5 * PAGE))->tv_nsec < 1000000000);
        NEED(!pipe((int *)(at + 6 * PAGE)) && write(((int *)(at + 6 * PAGE))[1], at + 7 * PAGE, 9) == 9);
        struct pollfd *polled = (struct pollfd *)(at + 8 * PAGE);
        *polled = (struct pollfd){((int *)(at + 6 * PAGE))[0], POLLIN, 0};
        cool(64);
        NEED(poll(polled, 1, 1000) == 1 && polled->revents == POLLIN);
        int epoll = epoll_create1(0);
        struct epoll_event *event = (struct epoll_event *)(at + 10 * PAGE);
        *event = (struct epoll_event){.events = EPOLLIN, .data.u64 = 1234};
        cool(64);
        NEED(!epoll_ctl(epoll, EPOLL_CTL_ADD, polled->fd, event));
        cool(64);
        NEED(epoll_wait(epoll, event, 1, 1000) == 1 && event->data.u64 == 1234);
        pid_t child = fork();
        if (child == 0) _exit(7);
        cool(64);
        NEED(waitpid(child, (int *)(at + 12 * PAGE), 0) == child && WEXITSTATUS(*(int *)(at + 12 * PAGE)) == 7);
        strcpy(at + 14 * PAGE, "/proc/self/exe");
        cool(64);
        NEED(readlink(at + 14 * PAGE, at + 15 * PAGE, PAGE) > 8 && at[15 * PAGE] == '/');
        close(epoll), close(((int *)(at + 6 * PAGE))[0]), close(((int *)(at + 6 * PAGE))[1]);
    }
}

static volatile sig_atomic_t seen;
static void on_signal(int number) {
    char big[16384];
    memset(big, number, sizeof big);
    __asm__ volatile("" : : "r"(big) : "memory");
    seen = seen + 1;
}
static void *on_cold_stack(void *unused) {
    char big[32768];
    memset(big, 1, sizeof big);
    __asm__ volatile("" : : "r"(big) : "memory");
    return unused;
}
// The kernel writes a signal's frame to an evicted stack, and starts a thread on one.
static void test_stacks(void) {
    stack_t stack = {.ss_sp = area, .ss_size = 64 * PAGE};
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_ONSTACK};
    NEED(!sigaltstack(&stack, NULL) && !sigaction(SIGUSR1, &action, NULL));
    for (int i = 1; i <= 8; i++) {
        fill(area, 1, 128), cool(128);
        NEED(!raise(SIGUSR1) && seen == i);
        pthread_attr_t attributes;
        pthread_t id;
        pthread_attr_init(&attributes);
        NEED(!pthread_attr_setstack(&attributes, area + 64 * WORDS, 64 * PAGE));
        NEED(!pthread_create(&id, &attributes, on_cold_stack, NULL) && !pthread_join(id, NULL));
    }
}

static void test_exec(void) {
    for (int i = 0; i < 6; i++) {
        char *at = (char *)area, **argv = (char **)(area + 9 * WORDS), **envp = (char **)(area + 11 * WORDS), said[64] = "";
        fill(area, 1, 64);
        strcpy(at, "/bin/sh"), strcpy(at + PAGE, "-c"), strcpy(at + 2 * PAGE, "echo \"$COLD\""), strcpy(at + 4 * PAGE, "COLD=memory");
        argv[0] = at, argv[1] = at + PAGE, argv[2] = at + 2 * PAGE, argv[3] = NULL, envp[0] = at + 4 * PAGE, envp[1] = NULL;
        int ends[2], status;
        NEED(!pipe(ends));
        cool(64);
        pid_t child = fork();
        if (child == 0) dup2(ends[1], 1), execve(at, argv, envp), _exit(1);
        close(ends[1]);
        NEED(read(ends[0], said, sizeof said) == 7 && !strcmp(said, "memory\n"));
        NEED(waitpid(child, &status, 0) == child && status == 0);
        close(ends[0]);
    }
}

// munmap fails at the sealed page (mseal, 6.10), after the kernel has noted that it unmaps what lies in front of it.
static void test_refused_munmap(void) {
    fill(area, 1, PAGES);
    NEED(!syscall(462 /* mseal */, area + (PAGES - 1) * WORDS, PAGE, 0));
    for (int round = 0; round < 4; round++) {
        cool(HALF);
        NEED(pattern_right(area, 1, HALF));
        NEED(munmap(area, BYTES) == -1 && errno == EPERM);
        NEED(right(area, 1, PAGES));
    }
}

int main(int argc, char **argv) {
    static const struct { const char *name; void (*run)(void); } tests[] = {
        {"files", test_files}, {"vectors", test_vectors}, {"direct", test_direct}, {"io_uring", test_io_uring}, {"pinned", test_pinned},
        {"pipes", test_pipes}, {"sockets", test_sockets}, {"getrandom", test_getrandom}, {"process_vm", test_process_vm},
        {"proc_mem", test_proc_mem}, {"futex", test_futex}, {"mlock", test_mlock}, {"mincore", test_mincore}, {"structs", test_structs},
        {"stacks", test_stacks}, {"exec", test_exec}, {"refused_munmap", test_refused_munmap},
    };
    native = argc > 2 && !strcmp(argv[2], "--native");
    pagemap = open("/proc/self/pagemap", O_RDONLY);
    area = map_or_die(BYTES), filler = map_or_die(FILLER);
    mirror = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (unsigned i = 0; i < sizeof tests / sizeof *tests; i++) {
        if (argc < 2 || strcmp(argv[1], tests[i].name)) continue;
        tests[i].run();
        printf("{\"test\":\"%s\",\"cold_pages\":%llu}\n", tests[i].name, (unsigned long long)cold_pages);
        return 0;
    }
    fprintf(stderr, "syscalls: see the top of syscalls.c\n");
    return 2;
}
