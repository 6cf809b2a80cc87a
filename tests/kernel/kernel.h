// What the tests of kernel facts share: this program plays the pager, and a forked process that obeys plays the target.
//
// Everything of the kernel's interface that a distribution's headers may lack is defined here. A target has a few
// threads; each carries out one order at a time (a system call, a load, a store, a fork) and answers when it is done,
// so a test can see that an order waits. The target's own stacks and data are never registered.
#pragma once
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t u64;
enum { PAGE = 4096 };

// ---- include/uapi/linux/userfaultfd.h, owned -----------------------------------------------------------------------

struct uffdio_api { u64 api, features, ioctls; };
struct uffdio_range { u64 start, len; };
struct uffdio_register { struct uffdio_range range; u64 mode, ioctls; };
struct uffdio_copy { u64 dst, src, len, mode; int64_t copy; };
struct uffdio_fill { struct uffdio_range range; u64 mode; int64_t done; }; // ZEROPAGE, POISON
struct uffdio_move { u64 dst, src, len, mode; int64_t moved; };
struct message {
    uint8_t event, reserved[7];
    u64 a, b, c; // a fault's flags, address, thread; a descriptor; from, to, length; start, end
};
_Static_assert(sizeof(struct message) == 32, "struct uffd_msg");

#define UFFDIO_API 0xc018aa3ful
#define UFFDIO_REGISTER 0xc020aa00ul
#define UFFDIO_UNREGISTER 0x8010aa01ul
#define UFFDIO_WAKE 0x8010aa02ul
#define UFFDIO_COPY 0xc028aa03ul
#define UFFDIO_ZEROPAGE 0xc020aa04ul
#define UFFDIO_MOVE 0xc028aa05ul
#define UFFDIO_POISON 0xc020aa08ul
#define USERFAULTFD_IOC_NEW 0xaa00ul

enum { FAULT = 0x12, FORK = 0x13, REMAP = 0x14, REMOVE = 0x15, UNMAP = 0x16 };
enum { FEATURE_FORK = 1 << 1, FEATURE_REMAP = 1 << 2, FEATURE_REMOVE = 1 << 3, FEATURE_UNMAP = 1 << 6,
       FEATURE_THREAD_ID = 1 << 8, FEATURE_POISON = 1 << 14, FEATURE_MOVE = 1 << 16 };
// What the pager asks for: crates/pager/src/sys/uffd.rs.
// Of shared memory: faults that say that the page is protected, missing pages, protection that outlives the page's mapping.
#define FEATURES_SHARED (1 | 1 << 5 | 1 << 12)
#define FEATURES (FEATURE_FORK | FEATURE_REMAP | FEATURE_REMOVE | FEATURE_UNMAP | FEATURE_THREAD_ID | FEATURE_POISON | FEATURE_MOVE \
                  | FEATURES_SHARED)
enum { ALLOW_HOLES = 2 };

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
#ifndef MAP_DROPPABLE
#define MAP_DROPPABLE 8
#endif
enum { NR_pidfd_open = 434, NR_pidfd_getfd = 438, NR_process_madvise = 440, NR_mseal = 462 };

// ---- facts ---------------------------------------------------------------------------------------------------------

struct fact { const char *id; void (*check)(void); struct fact *next; };
static struct fact *facts;

// A fact: FACT(its_id) { how it is seen }. tests/e2e/test_kernel.py finds them by this word.
#define FACT(name)                                                                  \
    static void name(void);                                                         \
    __attribute__((constructor)) static void add_##name(void) {                     \
        static struct fact fact = { #name, name, NULL };                            \
        fact.next = facts, facts = &fact;                                           \
    }                                                                               \
    static void name(void)

__attribute__((format(printf, 1, 2), noreturn)) static void skip(const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    vprintf(format, rest);
    puts("");
    exit(77);
}

__attribute__((format(printf, 3, 4), noreturn)) static void fail_at(const char *file, int line, const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    printf("%s:%d: ", file, line);
    vprintf(format, rest);
    puts("");
    exit(1);
}
#define fail(...) fail_at(__FILE__, __LINE__, __VA_ARGS__)
#define expect(condition) do { if (!(condition)) fail("not so: %s", #condition); } while (0)
// Values that should be equal, printed in decimal and as an error where they are not.
#define expect_is(got, wanted)                                                                             \
    do {                                                                                                   \
        long got_ = (long)(got), wanted_ = (long)(wanted);                                                 \
        if (got_ != wanted_)                                                                               \
            fail("%s is %ld%s%s, not %ld", #got, got_, got_ < 0 && got_ > -4096 ? " " : "",                \
                 got_ < 0 && got_ > -4096 ? strerrorname_np((int)-got_) : "", wanted_);                    \
    } while (0)

static bool kernel_is_at_least(int major, int minor) {
    struct utsname name;
    int have_major = 0, have_minor = 0;
    uname(&name);
    sscanf(name.release, "%d.%d", &have_major, &have_minor);
    return have_major > major || (have_major == major && have_minor >= minor);
}

static void needs_kernel(int major, int minor) {
    if (!kernel_is_at_least(major, minor)) skip("needs Linux %d.%d", major, minor);
}

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

static void pause_ms(int ms) { poll(NULL, 0, ms); }

static long raw(long result) { return result == -1 ? -errno : result; }

// ---- targets -------------------------------------------------------------------------------------------------------

enum { THREADS = 4, AGENT = THREADS, SOCKETS, ARGUMENT_BYTES = 4096 };
enum order_kind { CALL, LOAD, STORE, FILL, CHECK, FORK_OFF, COUNT_UP, QUIT, START_AGENT, TOUCH };

struct order { enum order_kind kind; long number; u64 a[6]; };
struct answer { long value; int signal; };

struct target {
    pid_t pid;
    int pidfd;
    int ours[SOCKETS], theirs[SOCKETS];
    pid_t tids[SOCKETS]; // as the target sees them
    // Shared with the target at the same address: where structures for its system calls are put, a page a thread.
    char *arguments;
    struct target *spare; // what its next fork will serve
    _Atomic int cpu;      // where TOUCH runs
};

static __thread sigjmp_buf on_signal;
static void back_out(int signal) { siglongjmp(on_signal, signal); }

// A system call that touches no thread-local errno.
static long bare(long number, u64 a, u64 b, u64 c, u64 d, u64 e, u64 f) {
    register u64 r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
    return result;
}

static u64 word_of(u64 seed, u64 page, u64 word) { return (seed << 32) + (page << 12) + word + 1; }

static void serve(struct target *self, int at);

static void *thread_main(void *argument) {
    void **both = argument;
    serve(both[0], (int)(long)both[1]);
    return NULL;
}

// The target's side: threads that obey, until their socket ends.
static void be_target(struct target *self) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    // What is not killed ends when the test does, at the end of its socket.
    for (int i = 0; i < SOCKETS; i++) {
        close(self->ours[i]);
        if (self->spare) close(self->spare->ours[i]);
    }
    struct sigaction action = { .sa_handler = back_out, .sa_flags = SA_NODEFER };
    sigaction(SIGBUS, &action, NULL);
    sigaction(SIGSEGV, &action, NULL);
    static void *arguments[THREADS][2];
    for (int i = 1; i < THREADS; i++) {
        pthread_t thread;
        arguments[i][0] = self, arguments[i][1] = (void *)(long)i;
        if (pthread_create(&thread, NULL, thread_main, arguments[i])) _exit(9);
    }
    serve(self, 0);
    _exit(0);
}

// A thread like the pager's agent: it shares memory and not the descriptor table, and only makes system calls.
static int be_agent(void *argument) {
    struct target *self = argument;
    struct order order;
    struct answer answer = { bare(SYS_gettid, 0, 0, 0, 0, 0, 0), 0 };
    do {
        bare(SYS_write, (u64)self->theirs[AGENT], (u64)&answer, sizeof answer, 0, 0, 0);
        if (bare(SYS_read, (u64)self->theirs[AGENT], (u64)&order, sizeof order, 0, 0, 0) != sizeof order) break;
        u64 *a = order.a;
        answer.value = bare(order.number, a[0], a[1], a[2], a[3], a[4], a[5]);
    } while (true);
    return 0;
}

static u64 nanoseconds(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (u64)at.tv_sec * 1000000000 + (u64)at.tv_nsec;
}

static long obey(struct target *self, struct order *order) {
    u64 *a = order->a, wrong = 0;
    switch (order->kind) {
    case CALL: return bare(order->number, a[0], a[1], a[2], a[3], a[4], a[5]);
    case LOAD: return (long)*(volatile u64 *)a[0];
    case STORE: *(volatile u64 *)a[0] = a[1]; return 0;
    case FILL:
        for (u64 i = 0; i < a[1] * PAGE / 8; i++) ((volatile u64 *)a[0])[i] = word_of(a[2], i / 512, i % 512);
        return 0;
    case CHECK:
        for (u64 i = 0; i < a[1] * PAGE / 8; i++) wrong += ((volatile u64 *)a[0])[i] != word_of(a[2], i / 512, i % 512);
        return (long)wrong;
    case FORK_OFF: {
        // The raw call: no handler of the C library may touch anything in between.
        long pid = syscall(SYS_clone, SIGCHLD | a[0], 0, 0, 0, 0);
        if (pid == 0) be_target(self->spare);
        return raw(pid);
    }
    case COUNT_UP:
        for (u64 i = 0; i < a[1]; i++) ++*(volatile u64 *)a[0];
        return 0;
    case QUIT: bare(SYS_exit, 0, 0, 0, 0, 0, 0); return 0;
    case START_AGENT: {
        enum { STACK_BYTES = 64 << 10 };
        char *stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        int flags = CLONE_VM | CLONE_FS | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM;
        return raw(clone(be_agent, stack + STACK_BYTES, flags, self));
    }
    case TOUCH: // a[1] pages from a[0] on, computing a[3] ns between them; how long each took, in ns, to the u32s at a[2]
        for (u64 i = 0; i < a[1]; i++) {
            u64 before = nanoseconds(), after;
            *(volatile char *)(a[0] + i * PAGE) = 1;
            after = nanoseconds();
            ((volatile uint32_t *)a[2])[i] = (uint32_t)(after - before);
            self->cpu = sched_getcpu();
            while (a[3] && nanoseconds() < after + a[3]) {}
        }
        return 0;
    }
    return -ENOSYS;
}

static void serve(struct target *self, int at) {
    struct order order;
    long tid = syscall(SYS_gettid);
    struct answer hello = { tid, 0 };
    if (write(self->theirs[at], &hello, sizeof hello) < 0) _exit(9);
    while (read(self->theirs[at], &order, sizeof order) == sizeof order) {
        struct answer answer = { 0, 0 };
        answer.signal = sigsetjmp(on_signal, 1);
        if (!answer.signal) answer.value = obey(self, &order);
        if (write(self->theirs[at], &answer, sizeof answer) < 0) break;
    }
}

static struct target *new_target(void) {
    struct target *target = mmap(NULL, sizeof *target, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    target->arguments = mmap(NULL, SOCKETS * ARGUMENT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < SOCKETS; i++) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair)) fail("socketpair: %m");
        // High numbers: the target opens and closes low ones.
        target->ours[i] = fcntl(pair[0], F_DUPFD_CLOEXEC, 500);
        target->theirs[i] = fcntl(pair[1], F_DUPFD_CLOEXEC, 500);
        close(pair[0]), close(pair[1]);
    }
    return target;
}

static bool answered_within(struct target *target, int at, int ms) {
    struct pollfd ready = { target->ours[at], POLLIN, 0 };
    return poll(&ready, 1, ms) == 1;
}

static struct answer answer_of(struct target *target, int at) {
    struct answer answer;
    if (!answered_within(target, at, 3000)) fail("thread %d of the target does not answer", at);
    if (read(target->ours[at], &answer, sizeof answer) != sizeof answer) fail("the target is gone");
    return answer;
}

static void greet(struct target *target) {
    for (int i = 0; i < THREADS; i++) target->tids[i] = (pid_t)answer_of(target, i).value;
    target->pidfd = (int)syscall(NR_pidfd_open, target->pid, 0);
}

static pid_t targets_started[16];
static int targets_count;
static void end_targets(void) {
    for (int i = 0; i < targets_count; i++) kill(targets_started[i], SIGKILL);
}

// A process with THREADS threads that obey; its first fork can obey too.
static struct target *start_target(void) {
    struct target *target = new_target();
    target->spare = new_target();
    pid_t pid = fork();
    if (pid == 0) be_target(target);
    targets_started[targets_count++] = target->pid = pid;
    for (int i = 0; i < SOCKETS; i++) close(target->theirs[i]), close(target->spare->theirs[i]);
    greet(target);
    return target;
}

static void tell(struct target *target, int at, struct order order) {
    if (write(target->ours[at], &order, sizeof order) != sizeof order) fail("the target is gone");
}

static struct answer order(struct target *target, int at, struct order what) {
    tell(target, at, what);
    return answer_of(target, at);
}

static long call_with(struct target *target, int at, long number, const u64 a[6]) {
    return order(target, at, (struct order){ CALL, number, { a[0], a[1], a[2], a[3], a[4], a[5] } }).value;
}

#define ORDER_CALL(n, ...) ((struct order){ CALL, (n), { __VA_ARGS__ } })
#define ORDER_LOAD(address) ((struct order){ LOAD, 0, { (u64)(address) } })
#define ORDER_STORE(address, value) ((struct order){ STORE, 0, { (u64)(address), (value) } })

// A system call in the target, by its thread 0, 1, … : the result, or a negative error.
#define call(target, at, number, ...) call_with((target), (at), (number), (const u64[6]){ __VA_ARGS__ })

static u64 load(struct target *target, int at, u64 address) {
    struct answer answer = order(target, at, ORDER_LOAD(address));
    if (answer.signal) fail("signal %d", answer.signal);
    return (u64)answer.value;
}

static void store(struct target *target, int at, u64 address, u64 value) {
    if (order(target, at, ORDER_STORE(address, value)).signal) fail("a signal");
}

static void fill(struct target *target, u64 address, u64 pages, u64 seed) {
    order(target, 0, (struct order){ FILL, 0, { address, pages, seed } });
}

static u64 wrong_words(struct target *target, u64 address, u64 pages, u64 seed) {
    struct answer answer = order(target, 0, (struct order){ CHECK, 0, { address, pages, seed } });
    if (answer.signal) fail("signal %d", answer.signal);
    return (u64)answer.value;
}

// Space for a structure in a target's memory, for a call by thread `at`.
static void *argument(struct target *target, int at) { return target->arguments + at * ARGUMENT_BYTES; }

static u64 map_at(struct target *target, u64 at, u64 pages, int protection, int flags) {
    long address = call(target, 0, SYS_mmap, at, pages * PAGE, (u64)protection, (u64)(MAP_PRIVATE | MAP_ANONYMOUS | flags), (u64)-1, 0);
    if (address < 0 && address > -4096) fail("mmap in the target: %s", strerror((int)-address));
    return (u64)address;
}

// Pages of their own in the target: unmapped pages before and behind keep other mappings from merging with them.
static u64 map(struct target *target, u64 pages) {
    u64 around = map_at(target, 0, pages + 32, PROT_NONE, 0);
    expect_is(call(target, 0, SYS_munmap, around, (pages + 32) * PAGE), 0);
    return map_at(target, around + 16 * PAGE, pages, PROT_READ | PROT_WRITE, MAP_FIXED_NOREPLACE);
}

static u64 take_fd(struct target *target, int number) {
    long fd = raw(syscall(NR_pidfd_getfd, target->pidfd, number, 0));
    if (fd < 0) fail("pidfd_getfd: %s", strerror((int)-fd));
    return (u64)fd;
}

// The child of a fork by thread `at`; the fork must have been allowed to finish.
static struct target *child_of(struct target *target, int at) {
    struct answer answer = answer_of(target, at);
    if (answer.value < 0) fail("fork: %s", strerror((int)-answer.value));
    struct target *child = target->spare;
    targets_started[targets_count++] = child->pid = (pid_t)answer.value;
    greet(child);
    return child;
}

static void tell_fork(struct target *target, int at) { tell(target, at, (struct order){ FORK_OFF, 0, { 0 } }); }

static void start_agent(struct target *target) {
    if (order(target, 0, (struct order){ START_AGENT, 0, { 0 } }).value < 0) fail("clone");
    target->tids[AGENT] = (pid_t)answer_of(target, AGENT).value;
}

// ---- userfaultfd, from outside: 0 or a negative error --------------------------------------------------------------

// A userfaultfd of a target: our descriptor, and its number there.
struct uffd { int fd, there; };

static struct uffd open_uffd(struct target *target, u64 features) {
    struct uffd uffd;
    uffd.there = (int)call(target, 0, SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    if (uffd.there < 0) skip("userfaultfd: %s", strerror(-uffd.there));
    uffd.fd = (int)take_fd(target, uffd.there);
    struct uffdio_api api = { 0xaa, features, 0 };
    if (ioctl(uffd.fd, UFFDIO_API, &api)) skip("this kernel lacks a feature of userfaultfd: %m");
    return uffd;
}

static long reg(int fd, u64 address, u64 pages) {
    struct uffdio_register argument = { { address, pages * PAGE }, 1, 0 };
    return raw(ioctl(fd, UFFDIO_REGISTER, &argument));
}
static long unreg(int fd, u64 address, u64 pages) {
    struct uffdio_range argument = { address, pages * PAGE };
    return raw(ioctl(fd, UFFDIO_UNREGISTER, &argument));
}
static long wake(int fd, u64 address, u64 pages) {
    struct uffdio_range argument = { address, pages * PAGE };
    return raw(ioctl(fd, UFFDIO_WAKE, &argument));
}
static int64_t copied; // bytes that the last copy, zeros or poison did
static long copy(int fd, u64 address, const void *from, u64 pages) {
    struct uffdio_copy argument = { address, (u64)from, pages * PAGE, 0, 0 };
    long result = raw(ioctl(fd, UFFDIO_COPY, &argument));
    copied = argument.copy;
    return result;
}
static long zeros(int fd, u64 address, u64 pages) {
    struct uffdio_fill argument = { { address, pages * PAGE }, 0, 0 };
    long result = raw(ioctl(fd, UFFDIO_ZEROPAGE, &argument));
    copied = argument.done;
    return result;
}
static long poison(int fd, u64 address, u64 pages) {
    struct uffdio_fill argument = { { address, pages * PAGE }, 0, 0 };
    return raw(ioctl(fd, UFFDIO_POISON, &argument));
}

// A page of ours to copy from, all words `value`.
static const void *page_of(u64 value) {
    static u64 page[16 * PAGE / 8] __attribute__((aligned(4096)));
    for (size_t i = 0; i < sizeof page / 8; i++) page[i] = value;
    return page;
}

// By thread `at` of the target, as the agent does it.
static int64_t moved; // bytes
static long move(struct target *target, int at, int there, u64 to, u64 from, u64 pages, u64 mode) {
    struct uffdio_move *argument_ = argument(target, at);
    *argument_ = (struct uffdio_move){ to, from, pages * PAGE, mode, 0 };
    long result = call(target, at, SYS_ioctl, (u64)there, UFFDIO_MOVE, (u64)argument_);
    moved = argument_->moved;
    return result;
}

static bool read_message(int fd, struct message *message) {
    return read(fd, message, sizeof *message) == sizeof *message;
}

static struct message next_message(int fd, int event) {
    struct pollfd ready = { fd, POLLIN, 0 };
    struct message message = { 0 };
    if (poll(&ready, 1, 2000) != 1) fail("no message; wanted %#x", event);
    if (!read_message(fd, &message)) fail("read: %m");
    if (message.event != event) fail("message %#x, not %#x", message.event, event);
    return message;
}

static bool is_quiet(int fd) {
    struct pollfd ready = { fd, POLLIN, 0 };
    return poll(&ready, 1, 20) == 0;
}

#define expect_message(fd, event, x, y, z)                                                                      \
    do {                                                                                                        \
        struct message got_ = next_message((fd), (event));                                                      \
        if (got_.a != (u64)(x) || got_.b != (u64)(y) || ((event) == REMAP && got_.c != (u64)(z)))               \
            fail("message %#x says %#lx %#lx %#lx", (event), (long)got_.a, (long)got_.b, (long)got_.c);         \
    } while (0)

// ---- looking on ----------------------------------------------------------------------------------------------------

// Whether the page at `address` is in the target's page tables.
static bool is_present(struct target *target, u64 address) {
    char path[64];
    u64 entry = 0;
    snprintf(path, sizeof path, "/proc/%d/pagemap", target->pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || pread(fd, &entry, 8, (off_t)(address / PAGE * 8)) != 8) fail("%s: %m", path);
    close(fd);
    return entry >> 63;
}

static u64 present_pages(struct target *target, u64 address, u64 pages) {
    u64 count = 0;
    for (u64 i = 0; i < pages; i++) count += is_present(target, address + i * PAGE);
    return count;
}

// Whether the mapping that holds `address` has `flag` among its VmFlags; -1 without such a mapping.
static int has_flag(struct target *target, u64 address, const char *flag) {
    char path[64], line[512], with_spaces[8];
    snprintf(path, sizeof path, "/proc/%d/smaps", target->pid);
    snprintf(with_spaces, sizeof with_spaces, " %s ", flag);
    FILE *file = fopen(path, "re");
    int found = -1;
    bool inside = false;
    while (file && fgets(line, sizeof line, file)) {
        unsigned long start, end;
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2 && strchr(line, '-') < strchr(line, ' '))
            inside = address >= start && address < end;
        else if (inside && !strncmp(line, "VmFlags:", 8))
            found = strstr(line, with_spaces) != NULL;
    }
    if (file) fclose(file);
    return found;
}

static bool is_registered(struct target *target, u64 address) { return has_flag(target, address, "um") == 1; }

// ---- the usual scene: a target, a userfaultfd with events, a staging area ------------------------------------------

static struct target *it;
static struct uffd uffd;
static u64 staging;
enum { STAGING_PAGES = 64 };

static void begin(void) {
    it = start_target();
    uffd = open_uffd(it, FEATURES);
    staging = map(it, STAGING_PAGES);
    expect_is(call(it, 0, SYS_madvise, staging, STAGING_PAGES * PAGE, MADV_DONTFORK), 0);
}

// Pages with known content, registered.
static u64 managed(u64 pages, u64 seed) {
    u64 address = map(it, pages);
    fill(it, address, pages, seed);
    expect_is(reg(uffd.fd, address, pages), 0);
    return address;
}

// One capture as the agent makes it, into staging at page `to`: staging is registered only meanwhile.
static long capture(u64 address, u64 pages, u64 to) {
    expect_is(reg(uffd.fd, staging, STAGING_PAGES), 0);
    long result = move(it, 1, uffd.there, staging + to * PAGE, address, pages, ALLOW_HOLES);
    expect_is(unreg(uffd.fd, staging, STAGING_PAGES), 0);
    return result;
}

// Takes pages out of the target, so that the next access faults.
static void evict(u64 address, u64 pages) {
    expect_is(call(it, 1, SYS_madvise, staging, STAGING_PAGES * PAGE, MADV_DONTNEED), 0);
    expect_is(capture(address, pages, 0), 0);
    expect_is(present_pages(it, address, pages), 0);
}

int main(int count, char **words) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    atexit(end_targets);
    // A hang is a failure too. Processes that are left go with their parent (PR_SET_PDEATHSIG).
    alarm(20);
    for (struct fact *fact = facts; fact; fact = fact->next) {
        if (count < 2) puts(fact->id);
        else if (!strcmp(words[1], fact->id)) {
            fact->check();
            return 0;
        }
    }
    return count < 2 ? 0 : 2;
}
