// sharers: memory that several processes have mapped, each byte checked.
//
//   sharers anonymous MIB CHILDREN SECONDS SEED   children that are forked, come and go
//   sharers memfd MIB CHILDREN SECONDS SEED       children that exec, get a memfd over a socket, and map it in pieces
//   sharers stranger NAME                         one more, nobody's child: `memfd` was told socket=NAME. Can verify
//   sharers pinned MIB SECONDS SEED               pages that the kernel holds on to: O_DIRECT, io_uring, vmsplice
//   sharers locked MIB LOCKED SECONDS SEED        the first LOCKED MiB are locked when it is told to
//   sharers syscalls MIB SEED                     system calls that read and write what was evicted just before
//
// Each fills its memory and says READY. Told a line, it does what that says, then says OK, or BAD and what is wrong:
//
//   verify | go | resident | lock | unlock | attend | exit STATUS
//
// `go` takes SECONDS. `resident` says RESIDENT, how many pages of those that are to be locked are, and of all. `attend`
// waits for `stranger` and lets it in.
//
// Options, last: native          nothing leaves by itself, so do not wait for it (syscalls)
//                without=OP,OP   leaves out move, cut, drop, remove; leave: children stay until the end;
//                                later: a pipe may have a page as it was given to it
//                with=OP,OP      twin: a second view by mremap of size 0; late: strangers come, wait, look, and go;
//                                removing: more of that than of anything else; killed: children may be, at any time
//                sabotage=KIND   does what a bad pager would: zero, flip, stale, revive, half, orphan
//
// What is expected is kept in a file, the *ledger*, which no pager of shared memory takes. Page P belongs to process
// P % slots, which alone changes it, and notes the number of each change before and after. Everyone looks at everyone's
// pages. Where the ledger shows that nothing changed meanwhile, each word must be the last change's. Otherwise the page
// is a seqlock: its first word is odd while it is being written, and what is read between two equal even ones must be
// of one change, no older than the last that had been made before.
#include "pattern.h"
#include "uring.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>

enum { CHUNKS = 8, MEMBERS_MAX = 16, RUN_MAX = 16, RANGE_MAX = 64, LATE_MS = 2500 };

#define NEED(what) do { if (!(what)) bad("line %d: %s (errno: %s)", __LINE__, #what, strerror(errno)); } while (0)

typedef struct {
    _Atomic uint64_t stop, failed, looks, passed, writes, removals, moves, apart, born, killed;
    uint64_t pages, slots, seed;
    // Of each page: the last change that was begun, that was done, and the last removal that was begun. The first two
    // are a change's number * 2, + 1 for a removal, after which the page is zeros.
    _Atomic uint64_t notes[];
} Ledger;

static Ledger *ledger;
static _Atomic uint64_t *begun, *done, *removed;
static int memory_file = -1, ledger_file;
static uint64_t pages, slots, slot, per_chunk, random_state;
// The process's view of the memory: where each chunk is, none if it has given it up, and where else it may be.
static uint64_t *here[CHUNKS], *there[CHUNKS];
static double seconds;
static const char *without = "", *with = "", *sabotage = "", *socket_name = "";
static bool is_native, is_child;

// Whatever else goes wrong, the first thing that did is told.
__attribute__((format(printf, 1, 2))) static _Noreturn void bad(const char *format, ...) {
    char text[800];
    va_list rest;
    va_start(rest, format);
    vsnprintf(text, sizeof text, format, rest);
    va_end(rest);
    if (!ledger || !atomic_exchange(&ledger->failed, 1))
        say("BAD process %d, slot %" PRIu64 ": %s\n", (int)getpid(), slot, text);
    if (ledger) atomic_store(&ledger->stop, 1);
    _exit(1);
}

static bool names(const char *list, const char *word) {
    size_t n = strlen(word);
    for (const char *at = list; (at = strstr(at, word)); at += n)
        if ((at == list || at[-1] == ',') && (at[n] == ',' || !at[n])) return true;
    return false;
}

static uint64_t below(uint64_t n) { return mix(random_state += 0x9e3779b97f4a7c15u) % n; }

static void seed_with(uint64_t a, uint64_t b) { random_state = mix(ledger->seed ^ mix(a << 20 ^ b)); }

static void nap(unsigned ms) {
    struct timespec rest = { ms / 1000, ms % 1000 * 1000000l };
    nanosleep(&rest, NULL);
}

// ---- the memory and its ledger

// What change `version` of a page has put there; zeros for none. A quarter does not compress, one is nearly empty.
static inline uint64_t word_of(uint64_t page, uint64_t version, unsigned i) {
    if (!version) return 0;
    if (i < 2) return i ? page : version << 1;
    uint64_t key = mix(page << 32 ^ version);
    switch (page % 4) {
    case 0: return mix(key + i);
    case 1: return key + i;
    case 2: return i % 64 ? 0 : key + i;
    default: return i % 16 ? 0x2065676150202d20u : key;
    }
}

static uint64_t *at_page(uint64_t page) { return here[page / per_chunk] + page % per_chunk * WORDS; }
static bool is_here(uint64_t page) { return here[page / per_chunk]; }

static int scratch_file(int flags) {
    char name[] = "sharers-XXXXXX";
    int fd = mkostemp(name, flags);
    if (fd < 0 || unlink(name)) perror(name), exit(2);
    return fd;
}

static void map_ledger(void) {
    size_t bytes = sizeof *ledger + 3 * pages * sizeof *begun;
    ledger = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ledger_file, 0);
    if (ledger == MAP_FAILED) perror("the ledger"), exit(2);
    begun = ledger->notes, done = begun + pages, removed = done + pages;
}

static void make_ledger(uint64_t seed) {
    ledger_file = scratch_file(O_CLOEXEC);
    if (ftruncate(ledger_file, (off_t)(sizeof *ledger + 3 * pages * sizeof *begun))) perror("ftruncate"), exit(2);
    map_ledger();
    ledger->pages = pages, ledger->slots = slots, ledger->seed = seed;
    seed_with(slot, 0);
}

static void place(uint64_t chunk, void *at) { here[chunk] = at, there[chunk] = (uint64_t *)((char *)at - (1l << 40)); }

static void write_page(uint64_t page, uint64_t *at) {
    uint64_t version = (atomic_load(&begun[page]) >> 1) + 1;
    atomic_store(&begun[page], version << 1);
    __atomic_store_n(at, version << 1 | 1, __ATOMIC_RELAXED);
    atomic_thread_fence(memory_order_release);
    for (unsigned i = 1; i < WORDS; i++) __atomic_store_n(at + i, word_of(page, version, i), __ATOMIC_RELAXED);
    __atomic_store_n(at, version << 1, __ATOMIC_RELEASE);
    atomic_store(&done[page], version << 1);
    atomic_fetch_add_explicit(&ledger->writes, 1, memory_order_relaxed);
}

// See at the top.
static void look(uint64_t page, const uint64_t *at, const char *how) {
    uint64_t copy[WORDS], before = atomic_load(&done[page]), now = atomic_load(&begun[page]);
    copy[0] = __atomic_load_n(at, __ATOMIC_ACQUIRE);
    for (unsigned i = 1; i < WORDS; i++) copy[i] = __atomic_load_n(at + i, __ATOMIC_RELAXED);
    atomic_thread_fence(memory_order_acquire);
    uint64_t again = __atomic_load_n(at, __ATOMIC_ACQUIRE), after = atomic_load(&begun[page]);
    uint64_t zeroed = atomic_load(&removed[page]);
    bool is_quiet = before == now && now == after;
    uint64_t version = is_quiet ? (now & 1 ? 0 : now >> 1) : copy[0] >> 1;
    atomic_fetch_add_explicit(&ledger->looks, 1, memory_order_relaxed);
    if (!is_quiet) {
        bool is_moot = copy[0] != again || copy[0] & 1 || (!copy[0] && zeroed >= before >> 1);
        if (is_moot) {
            atomic_fetch_add_explicit(&ledger->passed, 1, memory_order_relaxed);
            return;
        }
        if (version < before >> 1 || version > after >> 1)
            bad("page %" PRIu64 " %s is of change %" PRIu64 ", when %" PRIu64 " had been made, and %" PRIu64 " begun",
                page, how, version, before >> 1, after >> 1);
    }
    for (unsigned i = 0; i < WORDS; i++) {
        uint64_t expected = word_of(page, version, i);
        if (copy[i] != expected)
            bad("page %" PRIu64 " %s, change %" PRIu64 "%s, word %u: expected %016" PRIx64 ", found %016" PRIx64,
                page, how, version, is_quiet ? " and nobody at it" : "", i, expected, copy[i]);
    }
}

static bool verify(void) {
    for (uint64_t page = 0; page < pages; page++)
        if (is_here(page)) look(page, at_page(page), "at the end");
    return true;
}

// Not faster than a pager looks for new memory: it is not what a burst costs that is to be seen here.
static void fill(void) {
    for (uint64_t page = 0; page < pages; page++) {
        write_page(page, at_page(page));
        if (page % 256 == 255) nap(5);
    }
}

static void *map_shared(uint64_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) perror("mmap"), exit(2);
    return at;
}

// ---- what a process does with it

static uint64_t some_page(void) {
    uint64_t page;
    do page = below(pages); while (!is_here(page));
    return page;
}

static uint64_t own_page(void) {
    uint64_t page;
    do page = below(pages / slots) * slots + slot; while (!is_here(page));
    return page;
}

static void move_a_chunk(void) {
    uint64_t chunk = some_page() / per_chunk;
    size_t bytes = per_chunk * PAGE;
    void *moved = mremap(here[chunk], bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, there[chunk]);
    if (moved == MAP_FAILED) {
        // README.md, Limits. Natively that is never so.
        if (errno != EFAULT) bad("mremap: %s", strerror(errno));
        atomic_fetch_add(&ledger->apart, 1);
        return;
    }
    there[chunk] = here[chunk], here[chunk] = moved;
    atomic_fetch_add(&ledger->moves, 1);
    uint64_t page = chunk * per_chunk + below(per_chunk);
    look(page, at_page(page), "moved");
}

static void look_through_a_twin(void) {
    uint64_t chunk = some_page() / per_chunk, own = own_page();
    size_t bytes = per_chunk * PAGE;
    uint64_t *twin = mremap(here[chunk], 0, bytes, MREMAP_MAYMOVE);
    if (twin == MAP_FAILED) bad("mremap of size 0: %s", strerror(errno));
    for (int i = 0; i < 8; i++) {
        uint64_t page = chunk * per_chunk + below(per_chunk);
        look(page, twin + page % per_chunk * WORDS, "by another view");
    }
    if (own / per_chunk == chunk) {
        write_page(own, twin + own % per_chunk * WORDS);
        look(own, at_page(own), "written by another view");
    }
    munmap(twin, bytes);
}

static void cut(void) {
    uint64_t left = 0, chunk = some_page() / per_chunk;
    for (int i = 0; i < CHUNKS; i++) left += !!here[i];
    // Strangers stay for long.
    if (left < (memory_file < 0 ? 4 : CHUNKS)) return;
    if (munmap(here[chunk], per_chunk * PAGE)) bad("munmap: %s", strerror(errno));
    here[chunk] = NULL;
}

// Whoever gives up pages of memory that is shared gives up nothing.
static void drop(void) {
    uint64_t page = some_page(), left = per_chunk - page % per_chunk, n = 1 + below(RANGE_MAX);
    if (n > left) n = left;
    if (madvise(at_page(page), n * PAGE, MADV_DONTNEED)) bad("MADV_DONTNEED: %s", strerror(errno));
    for (uint64_t i = 0; i < n; i += 1 + below(8)) look(page + i, at_page(page + i), "given up");
}

static void remove_one(void) {
    uint64_t page = own_page(), version = (atomic_load(&begun[page]) >> 1) + 1, kept[WORDS];
    bool revives = names(sabotage, "revive");
    if (revives) memcpy(kept, at_page(page), PAGE);
    atomic_store(&removed[page], version);
    atomic_store(&begun[page], version << 1 | 1);
    if (madvise(at_page(page), PAGE, MADV_REMOVE)) bad("MADV_REMOVE: %s", strerror(errno));
    if (revives) memcpy(at_page(page), kept, PAGE);
    atomic_store(&done[page], version << 1 | 1);
    atomic_fetch_add(&ledger->removals, 1);
    look(page, at_page(page), "removed");
}

static void step(void) {
    uint64_t what = below(64), page;
    if (what == 0 && !names(without, "move")) move_a_chunk();
    else if (what == 1 && !names(without, "drop")) drop();
    else if ((what == 2 && !names(without, "remove")) || (what > 31 && names(with, "removing"))) remove_one();
    else if (what == 3 && is_child && !names(without, "cut") && !below(8)) cut();
    else if (what == 4 && names(with, "twin")) look_through_a_twin();
    else if (what < 28) {
        page = own_page();
        for (uint64_t n = 1 + below(RUN_MAX / 2); n-- && page < pages && is_here(page); page += slots)
            write_page(page, at_page(page));
    } else {
        page = some_page();
        for (uint64_t n = 1 + below(RUN_MAX); n-- && page < pages && is_here(page); page++)
            look(page, at_page(page), "at work");
    }
}

// Behind the back of whoever the page belongs to.
static void do_harm(void) {
    static uint64_t kept[WORDS], of = UINT64_MAX, version, tries;
    uint64_t page = some_page(), *at = at_page(page);
    if (page % slots == slot) return;
    if (names(sabotage, "zero")) memset(at, 0, PAGE);
    if (names(sabotage, "flip")) at[300] ^= 1 << 20;
    if (names(sabotage, "half")) memset(at + WORDS / 2, 0x55, PAGE / 2);
    if (!names(sabotage, "stale")) return;
    // Whoever the page belongs to may have given it up.
    if (++tries % 64 == 0) of = UINT64_MAX;
    if (of != UINT64_MAX && atomic_load(&done[of]) > version) memcpy(at_page(of), kept, PAGE), of = UINT64_MAX;
    else if (of == UINT64_MAX && page % slots != slots - 1 && atomic_load(&done[page]) == atomic_load(&begun[page]))
        memcpy(kept, at, PAGE), of = page, version = atomic_load(&done[page]);
}

static bool tell_counts(void) {
    const struct { const char *name; uint64_t count; } all[] = {
        { "looks", ledger->looks }, { "passed", ledger->passed }, { "writes", ledger->writes },
        { "removals", ledger->removals }, { "moves", ledger->moves }, { "apart", ledger->apart },
        { "born", ledger->born }, { "killed", ledger->killed },
    };
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++) say("%s %" PRIu64 "\n", all[i].name, all[i].count);
    return true;
}

// ---- children that are forked

static pid_t kids[MEMBERS_MAX];

static void bear(uint64_t child) {
    uint64_t number = atomic_fetch_add(&ledger->born, 1);
    pid_t pid = fork();
    if (pid < 0) bad("fork: %s", strerror(errno));
    kids[child] = pid;
    if (pid) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    slot = child, is_child = true;
    seed_with(slot, number + 1);
    double end = names(without, "leave") ? 1e18 : seconds_now() + 0.05 + (double)below(1000) / 1000;
    while (!atomic_load(&ledger->stop) && seconds_now() < end)
        for (int i = 0; i < 16; i++) step();
    _exit(0);
}

static void bury(uint64_t child, int how) {
    int status;
    if (waitpid(kids[child], &status, how) != kids[child]) return;
    kids[child] = 0;
    if (names(with, "killed") && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) atomic_fetch_add(&ledger->killed, 1);
    else if (status) bad("a child has ended with status %#x", status);
}

static bool go_with_children(void) {
    atomic_store(&ledger->stop, 0);
    for (double end = seconds_now() + seconds; seconds_now() < end && !atomic_load(&ledger->failed);) {
        for (uint64_t child = 1; child < slots - 1; child++) {
            if (kids[child]) bury(child, WNOHANG);
            if (!kids[child]) bear(child);
        }
        for (int i = 0; i < 16; i++) step();
        do_harm();
    }
    atomic_store(&ledger->stop, 1);
    for (uint64_t child = 1; child < slots - 1; child++)
        if (kids[child]) bury(child, 0);
    if (atomic_load(&ledger->failed)) _exit(1);
    return verify() && tell_counts();
}

static void prepare(uint64_t mib, uint64_t children, uint64_t seed) {
    pages = mib * (1 << 20) / PAGE, per_chunk = pages / CHUNKS;
    // The last slot is a stranger's.
    slots = children + 2;
    if (!per_chunk || slots > MEMBERS_MAX) exit(2);
    make_ledger(seed);
}

static void prepare_anonymous(void) {
    char *at = map_shared(pages * PAGE);
    for (uint64_t i = 0; i < CHUNKS; i++) place(i, at + i * per_chunk * PAGE);
    fill();
}

// ---- strangers: they get a memfd, and the ledger, over a socket

typedef struct { uint64_t slot, pages, slots; } Hello;

static int members[MEMBERS_MAX], door;
static bool is_mapped[MEMBERS_MAX], is_at_work[MEMBERS_MAX];

static socklen_t name_of(struct sockaddr_un *address, const char *name) {
    *address = (struct sockaddr_un){ .sun_family = AF_UNIX };
    size_t n = strlen(name);
    if (n + 2 > sizeof address->sun_path) exit(2);
    memcpy(address->sun_path + 1, name, n);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
}

static void map_chunks(void) {
    // Some have it as a whole, others in pieces, the last one first.
    if (slot % 2 == 0) {
        char *at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, memory_file, 0);
        if (at == MAP_FAILED) bad("mmap: %s", strerror(errno));
        for (uint64_t i = 0; i < CHUNKS; i++) place(i, at + i * per_chunk * PAGE);
        return;
    }
    for (uint64_t i = CHUNKS; i-- > 0;) {
        size_t bytes = per_chunk * PAGE;
        void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory_file, (off_t)(i * bytes));
        if (at == MAP_FAILED) bad("mmap: %s", strerror(errno));
        place(i, at);
    }
}

static void introduce(int to, uint64_t who) {
    Hello hello = { who, pages, slots };
    struct iovec text = { &hello, sizeof hello };
    union { struct cmsghdr header; char room[CMSG_SPACE(2 * sizeof(int))]; } control = { 0 };
    struct msghdr message = { .msg_iov = &text, .msg_iovlen = 1 };
    message.msg_control = &control, message.msg_controllen = sizeof control;
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_len = CMSG_LEN(2 * sizeof(int)), head->cmsg_level = SOL_SOCKET, head->cmsg_type = SCM_RIGHTS;
    memcpy(CMSG_DATA(head), (int[]){ memory_file, ledger_file }, 2 * sizeof(int));
    NEED(sendmsg(to, &message, MSG_NOSIGNAL) == sizeof hello);
}

static void be_introduced(int from) {
    Hello hello;
    struct iovec text = { &hello, sizeof hello };
    union { struct cmsghdr header; char room[CMSG_SPACE(2 * sizeof(int))]; } control;
    struct msghdr message = { .msg_iov = &text, .msg_iovlen = 1 };
    message.msg_control = &control, message.msg_controllen = sizeof control;
    NEED(recvmsg(from, &message, MSG_CMSG_CLOEXEC) == sizeof hello && CMSG_FIRSTHDR(&message));
    int files[2];
    memcpy(files, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof files);
    memory_file = files[0], ledger_file = files[1];
    slot = hello.slot, pages = hello.pages, slots = hello.slots, per_chunk = pages / CHUNKS;
}

// Obeys the one that has the memory: 'g' for work until the ledger says stop; and, if nobody's child, lines as well.
static int be_stranger(const char *name, int as) {
    struct sockaddr_un address;
    socklen_t bytes = name_of(&address, name);
    int home = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    NEED(home >= 0 && connect(home, (struct sockaddr *)&address, bytes) == 0);
    uint8_t mine = (uint8_t)as;
    NEED(write(home, &mine, 1) == 1);
    be_introduced(home);
    map_ledger(), map_chunks();
    is_child = as != 0, seed_with(slot, (uint64_t)getpid());
    bool is_late = names(with, "late") && as;
    // Who maps a memfd of which some has left is found by looking: docs/decisions/0030.
    if (is_late && atomic_load(&ledger->born) >= slots) nap(LATE_MS);
    if (!as) say("READY\n");
    if (write(home, "m", 1) != 1) return 0;
    struct pollfd told[2] = { { .fd = home, .events = POLLIN }, { .fd = as ? -1 : 0, .events = POLLIN } };
    for (char line[32];;) {
        NEED(poll(told, 2, -1) > 0 || errno == EINTR);
        if (told[1].revents) {
            if (read(0, line, sizeof line) < 1 || line[0] == 'e') return 0;
            verify();
            say("OK\n");
        }
        if (!told[0].revents) continue;
        if (read(home, line, 1) != 1) return 0;
        double end = is_late ? seconds_now() + 0.3 + (double)below(700) / 1000 : 1e18;
        while (!atomic_load(&ledger->stop) && seconds_now() < end)
            for (int i = 0; i < 16; i++) step();
        if (atomic_load(&ledger->failed)) return 1;
        if (!atomic_load(&ledger->stop)) return 0;
        NEED(write(home, "d", 1) == 1);
    }
}

static void start_stranger(uint64_t as) {
    char number[8];
    snprintf(number, sizeof number, "%u", (unsigned)as);
    char more[128], less[128];
    snprintf(more, sizeof more, "with=%s", with), snprintf(less, sizeof less, "without=%s", without);
    atomic_fetch_add(&ledger->born, 1);
    pid_t pid = fork();
    if (pid < 0) bad("fork: %s", strerror(errno));
    kids[as] = pid;
    if (pid) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    execl("/proc/self/exe", "sharers", "stranger", socket_name, number, more, less, NULL);
    _exit(127);
}

// Lets in who knocks, and hears what members say.
static void attend(int wait_ms, bool is_working) {
    struct pollfd all[MEMBERS_MAX + 1] = { { .fd = door, .events = POLLIN } };
    for (uint64_t i = 1; i < slots; i++)
        all[i] = (struct pollfd){ .fd = members[i] ? members[i] : -1, .events = POLLIN };
    NEED(poll(all, slots, wait_ms) >= 0 || errno == EINTR);
    if (all[0].revents) {
        int new = accept4(door, NULL, NULL, SOCK_CLOEXEC);
        uint8_t as;
        NEED(new >= 0 && read(new, &as, 1) == 1);
        uint64_t who = as ? as : slots - 1;
        NEED(who < slots && !members[who]);
        members[who] = new;
        introduce(new, who);
    }
    for (uint64_t i = 1; i < slots; i++) {
        char said;
        if (!members[i] || !all[i].revents || all[i].fd != members[i]) continue;
        ssize_t n = read(members[i], &said, 1);
        if (n == 1 && said == 'm') is_mapped[i] = true;
        if (n == 1 && said == 'd') is_at_work[i] = false;
        if (n == 1) continue;
        close(members[i]);
        members[i] = 0, is_mapped[i] = is_at_work[i] = false;
        if (kids[i]) bury(i, 0);
        if (i < slots - 1 && is_working) start_stranger(i);
    }
    for (uint64_t i = 1; i < slots && is_working; i++)
        if (is_mapped[i] && !is_at_work[i]) is_at_work[i] = write(members[i], "g", 1) == 1;
}

static bool go_with_strangers(void) {
    atomic_store(&ledger->stop, 0);
    for (uint64_t i = 1; i < slots - 1; i++)
        if (!kids[i]) start_stranger(i);
    for (double end = seconds_now() + seconds; seconds_now() < end && !atomic_load(&ledger->failed);) {
        attend(0, true);
        for (int i = 0; i < 16; i++) step();
        do_harm();
    }
    atomic_store(&ledger->stop, 1);
    for (uint64_t i = 1; i < slots; i++)
        while (is_at_work[i]) attend(100, false);
    if (atomic_load(&ledger->failed)) _exit(1);
    return verify() && tell_counts();
}

static bool let_in(void) {
    while (door && !is_mapped[slots - 1]) attend(100, false);
    return true;
}

static void prepare_memfd(void) {
    static char own_name[32];
    snprintf(own_name, sizeof own_name, "sharers-%d", (int)getpid());
    if (!*socket_name) socket_name = own_name;
    memory_file = memfd_create("sharers", MFD_CLOEXEC);
    NEED(memory_file >= 0 && ftruncate(memory_file, (off_t)(pages * PAGE)) == 0);
    map_chunks();
    struct sockaddr_un address;
    socklen_t bytes = name_of(&address, socket_name);
    door = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    NEED(door >= 0 && bind(door, (struct sockaddr *)&address, bytes) == 0 && listen(door, 8) == 0);
    for (uint64_t i = 1; i < slots - 1; i++) start_stranger(i);
    for (uint64_t i = 1; i < slots - 1; i++)
        while (!is_mapped[i]) attend(1000, false);
    // These are not late: they have it mapped before there is anything that could leave.
    atomic_store(&ledger->born, slots);
    fill();
}

// ---- pages that the kernel holds on to

enum { ZONE = 256, FILE_PAGES = 1024, FIXED = 64, SPLICED = 16 };
static uint64_t *memory;
static double work_ends;
static bool is_over(void) { return seconds_now() >= work_ends || atomic_load(&ledger->failed); }

static void expect_pattern(const uint64_t *at, uint64_t key, uint64_t first, uint64_t n, const char *what) {
    for (uint64_t i = 0; i < n; i++)
        for (unsigned k = 0; k < WORDS; k++) {
            uint64_t found = ((const volatile uint64_t *)at)[i * WORDS + k], expected = pattern_word(key, first + i, k);
            if (found != expected)
                bad("%s, page %" PRIu64 " of %" PRIu64 ", word %u: expected %016" PRIx64 ", found %016" PRIx64,
                    what, i, n, k, expected, found);
        }
}

static void fill_pattern(uint64_t *at, uint64_t key, uint64_t first, uint64_t n) {
    for (uint64_t i = 0; i < n; i++)
        for (unsigned k = 0; k < WORDS; k++) at[i * WORDS + k] = pattern_word(key, first + i, k);
}

// What a pager does that takes out what is pinned: the page has its bytes, and is another one.
static void orphan(uint64_t *at) {
    uint64_t kept[WORDS];
    memcpy(kept, at, PAGE);
    NEED(!madvise(at, PAGE, MADV_REMOVE));
    memcpy(at, kept, PAGE);
}

static int pattern_file(int flags) {
    int fd = scratch_file(flags);
    uint64_t *text = map_or_die(FILE_PAGES * PAGE);
    fill_pattern(text, 5, 0, FILE_PAGES);
    NEED(pwrite(fd, text, FILE_PAGES * PAGE, 0) == FILE_PAGES * PAGE);
    munmap(text, FILE_PAGES * PAGE);
    return fd;
}

static void *work_directly(void *unused) {
    (void)unused;
    int fd = pattern_file(O_DIRECT), other = scratch_file(O_DIRECT);
    uint64_t random = 1, *plain = map_or_die(32 * PAGE);
    for (uint64_t round = 10; !is_over(); round++) {
        uint64_t dice = mix(random += 0x9e3779b97f4a7c15u), n = 1 + dice % 32, from = dice / 64 % (FILE_PAGES - 32);
        uint64_t *at = memory + dice / 65536 % (ZONE - 32) * WORDS;
        NEED(pread(fd, at, n * PAGE, (off_t)(from * PAGE)) == (ssize_t)(n * PAGE));
        if (names(sabotage, "zero") && round % 64 == 63) memset(at, 0, PAGE);
        expect_pattern(at, 5, from, n, "read with O_DIRECT");
        nap(dice >> 62);
        expect_pattern(at, 5, from, n, "read with O_DIRECT, a while ago");
        fill_pattern(at, round, from, n);
        nap(dice >> 62);
        NEED(pwrite(other, at, n * PAGE, 0) == (ssize_t)(n * PAGE));
        NEED(pread(other, plain, n * PAGE, 0) == (ssize_t)(n * PAGE));
        expect_pattern(plain, round, from, n, "written with O_DIRECT");
    }
    return NULL;
}

// Registered buffers stay pinned: the kernel reads from and writes to those very pages for as long.
static void *work_fixed(void *unused) {
    (void)unused;
    Uring u;
    uint64_t *at = memory + ZONE * WORDS, *plain = map_or_die(FIXED * PAGE);
    if (uring_open(&u)) return say("NOTE no io_uring\n"), NULL;
    NEED(!uring_register(&u, at, FIXED * PAGE));
    int fd = pattern_file(O_DIRECT), other = scratch_file(0);
    for (uint64_t round = 1; !is_over(); round++) {
        uint64_t from = mix(round) % (FILE_PAGES - FIXED);
        nap(5);
        if (names(sabotage, "orphan")) orphan(at + 3 * WORDS);
        NEED(uring_do(&u, IORING_OP_READ_FIXED, 0, fd, at, FIXED * PAGE, from * PAGE) == FIXED * PAGE);
        expect_pattern(at, 5, from, FIXED, "read into a registered buffer");
        nap(5);
        expect_pattern(at, 5, from, FIXED, "read into a registered buffer a while ago");
        fill_pattern(at, round, from, FIXED);
        nap(5);
        NEED(uring_do(&u, IORING_OP_WRITE_FIXED, 0, other, at, FIXED * PAGE, 0) == FIXED * PAGE);
        NEED(pread(other, plain, FIXED * PAGE, 0) == FIXED * PAGE);
        expect_pattern(plain, round, from, FIXED, "written out of a registered buffer");
    }
    return NULL;
}

// The pipe has the pages themselves, so that what is written to shared memory after vmsplice is what is read.
static void *work_spliced(void *unused) {
    (void)unused;
    uint64_t *at = memory + (ZONE + FIXED) * WORDS, *plain = map_or_die(SPLICED * PAGE);
    int ends[2];
    NEED(!pipe(ends));
    for (uint64_t round = 1; !is_over(); round += 2) {
        fill_pattern(at, round, 0, SPLICED);
        nap(round % 8);
        struct iovec whole = { at, SPLICED * PAGE };
        NEED(vmsplice(ends[1], &whole, 1, 0) == SPLICED * PAGE);
        nap(3 + round % 16);
        if (names(sabotage, "orphan")) orphan(at + 3 * WORDS);
        expect_pattern(at, round, 0, SPLICED, "given to a pipe");
        fill_pattern(at, round + 1, 0, SPLICED);
        nap(round % 8);
        for (size_t got = 0; got < SPLICED * PAGE;) {
            ssize_t n = read(ends[0], (char *)plain + got, SPLICED * PAGE - got);
            NEED(n > 0);
            got += (size_t)n;
        }
        for (uint64_t i = 0; i < SPLICED; i++) {
            bool earlier = names(without, "later");
            for (unsigned k = 0; earlier && k < WORDS; k++) earlier = plain[i * WORDS + k] == pattern_word(round, i, k);
            expect_pattern(plain + i * WORDS, round + !earlier, i, 1, "written after vmsplice, and read from the pipe");
        }
        expect_pattern(at, round + 1, 0, SPLICED, "after the pipe");
    }
    return NULL;
}

// The rest is used all the time, so that all that can leave does.
static uint64_t first_used;
static void use_the_rest(void) {
    while (!is_over()) {
        uint64_t page = first_used + below(pages - first_used);
        for (uint64_t n = 1 + below(RUN_MAX); n-- && page < pages; page++) {
            look(page, at_page(page), "at work");
            if (below(2)) write_page(page, at_page(page));
        }
    }
}

static bool go_pinned(void) {
    void *(*const work[])(void *) = { work_directly, work_fixed, work_spliced };
    pthread_t threads[3];
    work_ends = seconds_now() + seconds;
    for (int i = 0; i < 3; i++) NEED(!pthread_create(&threads[i], NULL, work[i], NULL));
    use_the_rest();
    for (int i = 0; i < 3; i++) NEED(!pthread_join(threads[i], NULL));
    return true;
}

static bool verify_rest(void) {
    for (uint64_t page = first_used; page < pages; page++) look(page, at_page(page), "at the end");
    return true;
}

static void prepare_rest(uint64_t first) {
    prepare_anonymous();
    memory = here[0], first_used = first;
}

// ---- locked pages

static uint64_t locked_pages;

static uint64_t resident(uint64_t from, uint64_t n) {
    static unsigned char there_now[1 << 20];
    uint64_t found = 0;
    for (uint64_t page = from; page < from + n; page += per_chunk - page % per_chunk) {
        uint64_t some = per_chunk - page % per_chunk;
        if (some > from + n - page) some = from + n - page;
        NEED(some <= sizeof there_now && !mincore(at_page(page), some * PAGE, there_now));
        for (uint64_t i = 0; i < some; i++) found += there_now[i] & 1;
    }
    return found;
}

static bool go_locked(void) {
    work_ends = seconds_now() + seconds;
    use_the_rest();
    return true;
}

// ---- system calls on memory that was evicted just before

enum { AREA = 384, FILLER = 24 << 20 };
static const size_t BYTES = AREA * PAGE;
static uint64_t *area, *filler, *mirror, cold_pages;

// Pushes the area out by using other memory. How much was out is what the test can claim to have tested.
static void cool(void) {
    unsigned char there_now[AREA];
    uint64_t out = 0;
    if (is_native) return;
    for (double end = seconds_now() + 8; seconds_now() < end && out < AREA;) {
        for (uint64_t i = 0; i < FILLER / PAGE; i++)
            filler[i * WORDS] = mix(++random_state), filler[i * WORDS + 7] = random_state;
        NEED(!mincore(area, BYTES, there_now));
        out = 0;
        for (int i = 0; i < AREA; i++) out += !(there_now[i] & 1);
    }
    cold_pages += out;
}

static void cool_with(uint64_t key) { fill_pattern(area, key, 0, AREA), cool(); }

// In pieces whose order is not that of their addresses.
static struct iovec *backwards(void) {
    static struct iovec v[AREA];
    for (int i = 0; i < AREA; i++) v[i] = (struct iovec){ area + (AREA - 1 - i) * WORDS, PAGE };
    return v;
}

static void expect_backwards(const uint64_t *at, uint64_t key, const char *what) {
    for (uint64_t i = 0; i < AREA; i++) expect_pattern(at + i * WORDS, key, AREA - 1 - i, 1, what);
}

static void use_files(void) {
    int fd = scratch_file(0);
    cool_with(1);
    NEED(pwrite(fd, area, BYTES, 0) == (ssize_t)BYTES && pread(fd, mirror, BYTES, 0) == (ssize_t)BYTES);
    expect_pattern(mirror, 1, 0, AREA, "pwrite");
    cool_with(2);
    NEED(pread(fd, area, BYTES, 0) == (ssize_t)BYTES);
    expect_pattern(area, 1, 0, AREA, "pread");
    // A part of a page: the rest of it is what it was.
    cool_with(2);
    NEED(pread(fd, (char *)area + 2048, 100, 2048) == 100);
    for (unsigned k = 0; k < WORDS; k++)
        if (k < 256 || k > 268) NEED(area[k] == pattern_word(2, 0, k));
    close(fd);
}

static void use_vectors(void) {
    int fd = scratch_file(0);
    cool_with(3);
    NEED(pwritev(fd, backwards(), AREA, 0) == (ssize_t)BYTES && pread(fd, mirror, BYTES, 0) == (ssize_t)BYTES);
    expect_backwards(mirror, 3, "pwritev");
    cool_with(4);
    NEED(lseek(fd, 0, SEEK_SET) == 0 && readv(fd, backwards(), AREA) == (ssize_t)BYTES);
    expect_pattern(area, 3, 0, AREA, "readv");
    close(fd);
}

static void *write_mirror(void *to) {
    for (size_t sent = 0; sent < BYTES;) {
        ssize_t n = write(*(int *)to, (char *)mirror + sent, BYTES - sent);
        NEED(n > 0);
        sent += (size_t)n;
    }
    return NULL;
}

static void *read_mirror(void *from) {
    for (size_t got = 0; got < BYTES;) {
        ssize_t n = read(*(int *)from, (char *)mirror + got, BYTES - got);
        NEED(n > 0);
        got += (size_t)n;
    }
    return NULL;
}

static void use_ends(int in, int out, const char *what) {
    pthread_t thread;
    cool_with(5);
    memset(mirror, 1, BYTES);
    NEED(!pthread_create(&thread, NULL, read_mirror, &out));
    for (size_t sent = 0; sent < BYTES;) {
        ssize_t n = write(in, (char *)area + sent, BYTES - sent);
        NEED(n > 0);
        sent += (size_t)n;
    }
    pthread_join(thread, NULL);
    expect_pattern(mirror, 5, 0, AREA, what);
    fill_pattern(mirror, 6, 0, AREA);
    cool_with(7);
    NEED(!pthread_create(&thread, NULL, write_mirror, &in));
    for (size_t got = 0; got < BYTES;) {
        ssize_t n = read(out, (char *)area + got, BYTES - got);
        NEED(n > 0);
        got += (size_t)n;
    }
    pthread_join(thread, NULL);
    expect_pattern(area, 6, 0, AREA, what);
    close(in), close(out);
}

static void use_rings(void) {
    Uring u;
    if (uring_open(&u)) return say("NOTE no io_uring\n"), (void)0;
    int files[2] = { scratch_file(0), scratch_file(O_DIRECT) };
    for (unsigned round = 0; round < 4; round++) {
        int fd = files[round & 1];
        uint8_t flags = round & 2 ? IOSQE_ASYNC : 0;
        cool_with(8 + round);
        NEED(uring_do(&u, IORING_OP_WRITE, flags, fd, area, BYTES, 0) == (int)BYTES);
        NEED(pread(fd, mirror, BYTES, 0) == (ssize_t)BYTES);
        expect_pattern(mirror, 8 + round, 0, AREA, round & 1 ? "io_uring's direct write" : "io_uring's write");
        cool_with(3);
        NEED(uring_do(&u, IORING_OP_READV, flags, fd, backwards(), AREA, 0) == (int)BYTES);
        expect_backwards(area, 8 + round, round & 1 ? "io_uring's direct readv" : "io_uring's readv");
    }
    close(u.fd), close(files[0]), close(files[1]);
}

static long futex(uint32_t *at, int what, uint32_t value, const struct timespec *until) {
    return syscall(SYS_futex, at, what, value, until, NULL, 0);
}

// A process waits at a word of shared memory that leaves meanwhile; another one wakes it.
static void use_futexes(void) {
    uint32_t *word = (uint32_t *)area;
    for (uint32_t round = 1; round <= 2; round++) {
        fill_pattern(area, 9, 0, AREA);
        word[0] = 0;
        pid_t pid = fork();
        NEED(pid >= 0);
        if (pid == 0) {
            const struct timespec patience = { 20, 0 };
            while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == 0)
                if (futex(word, FUTEX_WAIT, 0, &patience) && errno == ETIMEDOUT)
                    bad("nobody woke who waits at a futex");
            _exit(*word != round);
        }
        nap(50);
        cool();
        __atomic_store_n(word, round, __ATOMIC_RELEASE);
        // Only a child that waits already must be woken, which it is after so long.
        long woken = futex(word, FUTEX_WAKE, 1, NULL);
        NEED(woken >= 0 && woken <= 1);
        int status;
        NEED(waitpid(pid, &status, 0) == pid && status == 0);
    }
    // Locks that processes share.
    struct { pthread_mutex_t lock; uint64_t count; } *both = (void *)area;
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind), pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    NEED(!pthread_mutex_init(&both->lock, &kind));
    both->count = 0;
    enum { TURNS = 20000 };
    pid_t pid = fork();
    NEED(pid >= 0);
    for (int i = 0; i < TURNS; i++) {
        NEED(!pthread_mutex_lock(&both->lock));
        both->count++;
        NEED(!pthread_mutex_unlock(&both->lock));
        if (pid && i % (TURNS / 4) == 0) cool();
    }
    if (pid == 0) _exit(0);
    int status;
    NEED(waitpid(pid, &status, 0) == pid && status == 0 && both->count == 2 * TURNS);
}

static bool go_syscalls(void) {
    int ends[2], pair[2];
    if (names(sabotage, "zero")) {
        cool_with(1);
        memset(area + 96 * WORDS, 0, PAGE);
        expect_pattern(area, 1, 0, AREA, "sabotage");
    }
    use_files(), use_vectors();
    NEED(!pipe(ends));
    use_ends(ends[1], ends[0], "a pipe");
    NEED(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    use_ends(pair[0], pair[1], "a socket");
    use_rings(), use_futexes();
    say("COLD %" PRIu64 "\n", cold_pages);
    return verify_rest();
}

static void prepare_syscalls(void) {
    prepare_rest(AREA);
    area = memory, filler = map_or_die(FILLER);
    int fd = scratch_file(0);
    NEED(!ftruncate(fd, (off_t)BYTES));
    // Of a file, which no pager takes.
    mirror = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    NEED(mirror != MAP_FAILED);
}

// ---- what it is told

static bool obey(const char *line, bool (*go)(void), bool (*check)(void)) {
    if (!strcmp(line, "go")) return go();
    if (!strcmp(line, "verify")) return check();
    if (!strcmp(line, "lock")) return !mlock(memory, locked_pages * PAGE);
    if (!strcmp(line, "unlock")) return !munlock(memory, locked_pages * PAGE);
    if (!strcmp(line, "attend")) return let_in();
    if (strcmp(line, "resident")) return errno = ENOSYS, false;
    say("RESIDENT %" PRIu64 " %" PRIu64 "\n", resident(0, locked_pages), resident(0, pages));
    return true;
}

static int listen_to(bool (*go)(void), bool (*check)(void)) {
    char line[64];
    say("READY\n");
    // Nothing of what follows is read ahead of its turn: it may be let go in between.
    for (size_t n = 0; read(0, line + n, 1) == 1;) {
        if (line[n] != '\n' && ++n < sizeof line) continue;
        line[n] = 0, n = 0;
        if (!strncmp(line, "exit ", 5)) return atoi(line + 5);
        if (!obey(line, go, check)) return say("BAD %s: %s\n", line, strerror(errno)), 1;
        say("OK\n");
    }
    return 0;
}

static uint64_t number(char **argv, int i) { return strtoull(argv[i], NULL, 10); }

int main(int argc, char **argv) {
    static const struct { const char *text, **to; } options[] = {
        { "without=", &without }, { "with=", &with }, { "sabotage=", &sabotage }, { "socket=", &socket_name },
    };
    for (; argc > 2; argc--) {
        const char *last = argv[argc - 1];
        bool known = !strcmp(last, "native");
        is_native |= known;
        for (unsigned i = 0; i < 4; i++) {
            size_t n = strlen(options[i].text);
            if (!strncmp(last, options[i].text, n)) known = true, *options[i].to = last + n;
        }
        if (!known) break;
    }
    const char *mode = argc > 1 ? argv[1] : "";
    signal(SIGPIPE, SIG_IGN);
    if (!strcmp(mode, "stranger") && argc >= 3) return be_stranger(argv[2], argc > 3 ? atoi(argv[3]) : 0);
    if ((!strcmp(mode, "anonymous") || !strcmp(mode, "memfd")) && argc == 6) {
        bool is_memfd = mode[0] == 'm';
        seconds = strtod(argv[4], NULL);
        prepare(number(argv, 2), number(argv, 3), number(argv, 5));
        if (is_memfd) prepare_memfd();
        else prepare_anonymous();
        return listen_to(is_memfd ? go_with_strangers : go_with_children, verify);
    }
    if (!strcmp(mode, "pinned") && argc == 5) {
        seconds = strtod(argv[3], NULL);
        prepare(number(argv, 2), 0, number(argv, 4));
        prepare_rest(ZONE + FIXED + SPLICED);
        return listen_to(go_pinned, verify_rest);
    }
    if (!strcmp(mode, "locked") && argc == 6) {
        seconds = strtod(argv[4], NULL);
        prepare(number(argv, 2), 0, number(argv, 5));
        prepare_rest(locked_pages = number(argv, 3) * (1 << 20) / PAGE);
        return listen_to(go_locked, verify);
    }
    if (!strcmp(mode, "syscalls") && argc == 4) {
        prepare(number(argv, 2), 0, number(argv, 3));
        prepare_syscalls();
        return listen_to(go_syscalls, verify_rest);
    }
    return 2;
}
