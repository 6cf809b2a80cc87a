// flat: a small monitor of KVM with a small guest, which knows what is in its memory and does what it is told, a command a line on
// standard input.
//
//   flat MIB [deaf]    prints READY once the guest has filled its memory, then an answer a command: OK, or BAD and what is wrong
//   flat --probe       whether KVM can be used at all: exit status 0, or 1 and the reason on standard output
//
// verify          all pages, by the guest and by the monitor
// work | rest     the guest checks and writes chunks of pages at random, until it is told to rest: "worked N", chunks in all
// worked          the same without a rest
// drop COUNT      so many chunks are given back (MADV_DONTNEED) here and there, also while the guest works: it must find zeros
// zap             all of them
// spoil PAGE      a bit of it changes behind everyone's back
// spin MS         the thread that obeys is busy for so long
// exit STATUS
//
// The guest runs in long mode, as a user: where KVM runs without support of the processor (as PVM does), that is all that is not
// emulated one instruction after another. What it is to do is in its memory, as are its code and its page tables: all of that is
// evicted like the rest. It reports by a store to where it has no memory, which ends KVM_RUN, and goes on when there is more to do.
#include "pattern.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>

// Guest-physical, which is what the guest's own addresses are. The device is in the last entry of the one page directory.
enum { CODE = 0, ORDER = PAGE / 2, TABLES = PAGE, DATA = 4 * PAGE, LARGE = 1 << 21, DEVICE = 511 * LARGE, MOST_MIB = 1022 };
enum { CHUNK = 8, CHUNKS_MAX = MOST_MIB * 256 / CHUNK };
enum { CHECK = 1, WRITE = 2 };
// A probe took 2 ms under PVM, and where each instruction is emulated a thousand times that.
enum { PROBE_MIB = 1, PROBE_MS_MAX = 100, PROBE_SECONDS_MAX = 5 };

static const uint64_t MULTIPLIER = 0x9e3779b97f4a7c15u, NONE = ~0ull;

// Of the words from `first` to before `end`, each must be what `key` makes it, or zero under a `mask` of 0, and becomes what `next` makes
// it. `what` is CHECK, WRITE, or both. The guest says where the last wrong word is.
struct order { uint64_t first, end, key, mask, next, what, multiplier, wrong_at; };

// rbx: the device, rsi: the order. Stored to the device is how many words were wrong, above bit 32, and the address that was reached,
// which tells whether it was the right order.
extern const char guest_begin[], guest_end[];
asm(".pushsection .rodata\n"
    ".intel_syntax noprefix\n"
    "guest_begin:\n"
    ".Lreport: mov [rbx], r14\n"
    "          mov r8,  [rsi]\n"
    "          mov r9,  [rsi + 8]\n"
    "          mov r10, [rsi + 16]\n"
    "          mov r11, [rsi + 24]\n"
    "          mov r12, [rsi + 32]\n"
    "          mov r13, [rsi + 40]\n"
    "          mov r15, [rsi + 48]\n"
    "          xor r14d, r14d\n"
    ".Lword:   test r13d, 1\n"
    "          jz .Lwrite\n"
    "          lea rax, [r8 + r10]\n"
    "          imul rax, r15\n"
    "          mov rdx, rax\n"
    "          shr rdx, 29\n"
    "          xor rax, rdx\n"
    "          and rax, r11\n"
    "          cmp rax, [r8]\n"
    "          je .Lwrite\n"
    "          mov [rsi + 56], r8\n"
    "          add r14, 1\n"
    ".Lwrite:  test r13d, 2\n"
    "          jz .Lnext\n"
    "          lea rax, [r8 + r12]\n"
    "          imul rax, r15\n"
    "          mov rdx, rax\n"
    "          shr rdx, 29\n"
    "          xor rax, rdx\n"
    "          mov [r8], rax\n"
    ".Lnext:   add r8, 8\n"
    "          cmp r8, r9\n"
    "          jb .Lword\n"
    "          shl r14, 32\n"
    "          or r14, r8\n"
    "          jmp .Lreport\n"
    "guest_end:\n"
    ".att_syntax\n"
    ".popsection");

// The same in C, for the monitor.
static uint64_t word(uint64_t at, uint64_t key) {
    uint64_t x = (at + key) * MULTIPLIER;
    return x ^ x >> 29;
}

static char *memory;
static uint64_t bytes, chunks;
static int vcpu;
static struct kvm_run *run;

// Of each chunk: which key made it, and whether it was given back since. Nobody but the one that has the lock may change it, and
// nobody may touch the chunk that the guest has in hand.
static struct { uint64_t key; bool gone; } chunk[CHUNKS_MAX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t news = PTHREAD_COND_INITIALIZER;
static bool working;
// The chunk that is looked at next, while everything is to be verified.
static uint64_t verifying = ~0ull, in_hand = ~0ull, worked, wrong, turn;
static bool filled;
// What the guest was told, and where it reads that.
static struct order given, *order;
// Whether it was told to verify.
static bool is_verifying;

static void bad(const char *what) {
    say("BAD %s: %s\n", what, strerror(errno));
    _exit(1);
}

static long call(int fd, unsigned long request, void *argument, const char *what) {
    long given = ioctl(fd, request, argument);
    if (given < 0) bad(what);
    return given;
}

static uint64_t first_of(uint64_t nth) { return DATA + nth * CHUNK * PAGE; }
static uint64_t end_of(uint64_t nth) { return first_of(nth + 1) < bytes ? first_of(nth + 1) : bytes; }

static void found_wrong(const char *who, uint64_t nth, uint64_t at, uint64_t words) {
    wrong += words;
    say("wrong: the %s sees %llu words of chunk %llu, the last at %llx: %016llx\n", who, (unsigned long long)words,
            (unsigned long long)nth, (unsigned long long)at, *(volatile unsigned long long *)(memory + at));
}

// What the guest does, by the monitor.
static void do_it(uint64_t nth, uint64_t what, uint64_t next) {
    uint64_t words = 0, where = 0;
    for (uint64_t at = first_of(nth); at < end_of(nth); at += 8) {
        volatile uint64_t *is = (uint64_t *)(memory + at);
        if (what & CHECK && *is != (chunk[nth].gone ? 0 : word(at, chunk[nth].key))) words++, where = at;
        if (what & WRITE) *is = word(at, next);
    }
    if (words) found_wrong("monitor", nth, where, words);
}

static void became(uint64_t nth, uint64_t what, uint64_t next) {
    if (what & WRITE) chunk[nth].key = next, chunk[nth].gone = false;
}

// The guest's next order. The monitor does some of the work itself, as devices do that write to a guest's memory, and looks at half of
// what it verifies before the guest does.
static void next_order(void) {
    pthread_mutex_lock(&lock);
    for (;;) {
        uint64_t what, nth;
        if (verifying < chunks) {
            nth = verifying, what = filled ? CHECK : WRITE;
            if (filled && nth % 2) do_it(nth, CHECK, 0);
        } else if (working) {
            nth = mix(++turn * MULTIPLIER) % chunks, what = turn % 16 ? turn % 4 ? CHECK | WRITE : WRITE : CHECK;
            if (turn % 8 == 1) {
                do_it(nth, what, chunk[nth].key + 1);
                became(nth, what, chunk[nth].key + 1);
                worked++;
                continue;
            }
        } else {
            pthread_cond_wait(&news, &lock);
            continue;
        }
        in_hand = nth, is_verifying = verifying < chunks;
        uint64_t key = chunk[nth].key, mask = chunk[nth].gone ? 0 : ~0ull;
        *order = given = (struct order){first_of(nth), end_of(nth), key, mask, key + 1, what, MULTIPLIER, 0};
        break;
    }
    pthread_mutex_unlock(&lock);
}

static void reported(uint64_t report) {
    pthread_mutex_lock(&lock);
    uint64_t nth = in_hand;
    if ((uint32_t)report != given.end) {
        say("BAD the guest was told to reach %llx, and reached %llx\n", (unsigned long long)given.end, (unsigned long long)report);
        _exit(1);
    }
    if (report >> 32) found_wrong("guest", nth, order->wrong_at, report >> 32);
    became(nth, given.what, given.next);
    if (is_verifying) {
        if (filled && nth % 2 == 0) do_it(nth, CHECK, 0);
        verifying++;
    } else {
        worked++;
    }
    in_hand = NONE;
    // Whoever waits for more than one chunk sleeps until the last of them.
    if (is_verifying ? verifying == chunks : !working) pthread_cond_broadcast(&news);
    pthread_mutex_unlock(&lock);
}

static void *run_guest(void *nothing) {
    for (;;) {
        if (ioctl(vcpu, KVM_RUN, 0) < 0) {
            // Whoever stops a thread for a moment ends KVM_RUN so, and every monitor goes on.
            if (errno == EINTR) continue;
            bad("KVM_RUN");
        }
        if (run->exit_reason != KVM_EXIT_MMIO || run->mmio.phys_addr != DEVICE || !run->mmio.is_write) {
            say("BAD the guest ended with exit reason %u\n", run->exit_reason);
            _exit(1);
        }
        uint64_t report;
        memcpy(&report, run->mmio.data, sizeof report);
        if (in_hand != NONE) reported(report);
        next_order();
    }
    return nothing;
}

// In huge pages, as monitors ask for them; that also keeps it a mapping of its own, of just this size.
static void map_memory(void) {
    char *at = map_or_die(bytes + LARGE);
    memory = (char *)(((uintptr_t)at + LARGE - 1) & ~(uintptr_t)(LARGE - 1));
    if (memory > at) munmap(at, (size_t)(memory - at));
    if (at + LARGE > memory) munmap(memory + bytes, (size_t)(at + LARGE - memory));
    madvise(memory, bytes, MADV_HUGEPAGE);
}

// Flat segments of long mode at user level; the page tables map all addresses to themselves, in pages of 2 MiB.
static void make_guest(bool deaf) {
    int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
    if (kvm < 0) bad("/dev/kvm cannot be opened");
    int vm = (int)call(kvm, KVM_CREATE_VM, 0, "KVM_CREATE_VM");
    // As monitors do. A guest that has it and takes interrupts is halted while another thread, of the kernel, waits for its page; the
    // virtual CPU of one that is deaf to them waits itself.
    call(vm, KVM_CREATE_IRQCHIP, 0, "KVM_CREATE_IRQCHIP");
    // Three pages that Intel's processors want, far from the guest's own.
    call(vm, KVM_SET_TSS_ADDR, (void *)0xfffbd000, "KVM_SET_TSS_ADDR");
    map_memory();
    struct kvm_userspace_memory_region region = {.memory_size = bytes, .userspace_addr = (uint64_t)memory};
    call(vm, KVM_SET_USER_MEMORY_REGION, &region, "KVM_SET_USER_MEMORY_REGION");
    vcpu = (int)call(vm, KVM_CREATE_VCPU, 0, "KVM_CREATE_VCPU");
    size_t size = (size_t)call(kvm, KVM_GET_VCPU_MMAP_SIZE, 0, "KVM_GET_VCPU_MMAP_SIZE");
    run = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
    if (run == MAP_FAILED) bad("the virtual CPU cannot be mapped");

    order = (struct order *)(memory + ORDER);
    memcpy(memory + CODE, guest_begin, (size_t)(guest_end - guest_begin));
    // Present, writable, for users, accessed, dirty; 0x80: a large page.
    uint64_t *table = (uint64_t *)(memory + TABLES), flags = 0x67;
    table[0] = (TABLES + PAGE) | flags;
    table[WORDS] = (TABLES + 2 * PAGE) | flags;
    for (uint64_t i = 0; i < WORDS; i++) table[2 * WORDS + i] = i * LARGE | flags | 0x80;

    struct kvm_sregs special;
    call(vcpu, KVM_GET_SREGS, &special, "KVM_GET_SREGS");
    struct kvm_segment data = {.limit = ~0u, .selector = 0x13, .type = 3, .present = 1, .dpl = 3, .db = 1, .s = 1, .g = 1};
    special.ds = special.es = special.fs = special.gs = special.ss = data;
    special.cs = data, special.cs.selector = 0x0b, special.cs.type = 11, special.cs.db = 0, special.cs.l = 1;
    special.cr0 = 0x80010033;  // paging, writes are checked, floating point, protected mode
    special.cr3 = TABLES, special.cr4 = 0x20, special.efer = 0x500;
    call(vcpu, KVM_SET_SREGS, &special, "KVM_SET_SREGS");
    struct kvm_regs registers = {.rip = CODE, .rbx = DEVICE, .rsi = ORDER, .rflags = deaf ? 0x2 : 0x202};
    call(vcpu, KVM_SET_REGS, &registers, "KVM_SET_REGS");
    chunks = (bytes - DATA + CHUNK * PAGE - 1) / (CHUNK * PAGE);
    pthread_t thread;
    if (pthread_create(&thread, NULL, run_guest, NULL)) bad("pthread_create");
}

// All chunks have their turn. Returns whether none was wrong, then or before.
static bool all(void) {
    pthread_mutex_lock(&lock);
    verifying = 0;
    pthread_cond_broadcast(&news);
    while (verifying < chunks) pthread_cond_wait(&news, &lock);
    verifying = NONE;
    bool right = !wrong;
    pthread_mutex_unlock(&lock);
    return right;
}

static void fill(void) {
    all();
    filled = true;
}

static bool drop(uint64_t nth) {
    bool done = true;
    pthread_mutex_lock(&lock);
    if (nth != in_hand) {
        chunk[nth].gone = true;
        done = !madvise(memory + first_of(nth), end_of(nth) - first_of(nth), MADV_DONTNEED);
    }
    pthread_mutex_unlock(&lock);
    return done;
}

static bool set_working(bool to) {
    pthread_mutex_lock(&lock);
    working = to;
    pthread_cond_broadcast(&news);
    while (!to && in_hand != NONE) pthread_cond_wait(&news, &lock);
    bool right = !wrong;
    pthread_mutex_unlock(&lock);
    return right;
}

static bool obey(char *line) {
    char name[16] = "";
    unsigned long long n = 0;
    sscanf(line, "%15s %llu", name, &n);
    if (!strcmp(name, "verify")) return all();
    if (!strcmp(name, "work")) return set_working(true);
    if (!strcmp(name, "rest") || !strcmp(name, "worked")) {
        bool right = strcmp(name, "rest") || set_working(false);
        say("worked %llu\n", (unsigned long long)worked);
        return right && !wrong;
    }
    if (!strcmp(name, "drop")) {
        bool done = true;
        for (uint64_t i = 0; i < n; i++) done &= drop(mix(i * MULTIPLIER + worked) % chunks);
        return done;
    }
    if (!strcmp(name, "zap")) {
        bool done = true;
        for (uint64_t i = 0; i < chunks; i++) done &= drop(i);
        return done;
    }
    if (!strcmp(name, "spoil")) return memory[n * PAGE + 1234] ^= 4, true;
    if (!strcmp(name, "spin")) {
        for (double end = seconds_now() + (double)n / 1000; seconds_now() < end;) {}
        return true;
    }
    if (!strcmp(name, "exit")) _exit((int)n);
    say("what is '%s'?\n", name);
    return false;
}

static void too_long(int signal) {
    (void)signal;
    say("BAD a guest of %d MiB was not done within %d s under KVM\n", PROBE_MIB, PROBE_SECONDS_MAX);
    _exit(1);
}

// Once to fill, and then the quickest of a few: that the machine is busy is no reason.
static int probe(void) {
    signal(SIGALRM, too_long);
    alarm(PROBE_SECONDS_MAX);
    bytes = PROBE_MIB << 20;
    make_guest(false);
    fill();
    double least = 1e9;
    for (int i = 0; i < 3; i++) {
        double began = seconds_now();
        if (!all()) return 1;
        double took = seconds_now() - began;
        least = took < least ? took : least;
    }
    if (least * 1000 <= PROBE_MS_MAX) return 0;
    say("BAD KVM takes %.0f ns for a word of 8 bytes here: it emulates each instruction\n", least * 1e9 / (PROBE_MIB << 17));
    return 1;
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "--probe")) return probe();
    bytes = argc > 1 ? strtoull(argv[1], NULL, 10) << 20 : 0;
    if (!bytes || bytes > (uint64_t)MOST_MIB << 20) return fprintf(stderr, "flat: see the top of flat.c\n"), 2;
    make_guest(argc > 2 && !strcmp(argv[2], "deaf"));
    fill();
    say("READY\n");
    char line[256];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (obey(line)) say("OK\n");
        else say("BAD %s\n", line);
    }
    return 0;
}
