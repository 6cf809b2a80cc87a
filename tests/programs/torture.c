// torture: churns memory in every way a program can and checks every byte of it against a shadow.
//
//   torture --seed N --seconds S --mib M --threads T [--ops N] [--without OP,OP] [--killed N]
//           [--sabotage flip|zero|drop|stale|lost|child]
//
// The shadow keeps, for each page, what generates its content (a serial number, a kind, later patches), so any page can
// be recomputed and compared in full. It lives in a MAP_SHARED mapping, which no pager of private memory touches.
// What each thread does follows from the seed alone: neither addresses, timing, refusals nor what MADV_FREE does change
// the sequence; --ops ends it at a fixed length. A forked child gets a snapshot of the shadow taken by the forking thread.
// So many forked children may be killed (SIGKILL), of each that forks.
// SIGUSR1 prints what each thread did last; SIGTERM ends it as the end of its time does. Exit status 0: every byte was right;
// 1: the first wrong one is described.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    PAGE = 4096, WORDS = PAGE / 8, THREADS_MAX = 16, AREAS_MAX = 20, TAIL = 64, KIDS = 2, DEPTH_MAX = 2,
    FAMILY = KIDS + KIDS * KIDS, PATCHES_MAX = 12, RANGE_MAX = 256, PIPE_PAGES = 8, TALLY_PAGES = 192, OPS_MAX = 48,
};
// K_ZERO: never written, or given back. K_ZEROES: zeros that were written.
enum { K_ZERO, K_ZEROES, K_RANDOM, K_SAME, K_TEXT, K_SPARSE, K_BYTE, KINDS };
static const char *const kind_names[] = {"untouched", "zeros", "random", "identical", "text", "sparse", "one byte"};
enum { RW, RO, NONE };
enum { KEEP, WIPE, DROP };  // what fork does with an area

typedef struct {
    uint64_t serial;                  // unique for each write of a whole page
    uint8_t kind, first, count;       // patches first..count have been applied
    uint8_t freed;                    // MADV_FREE: this content or zeros, until written again
    uint8_t prot;                     // of the page, kept here to save space
} Content;
typedef struct { Content now, before; } Entry;
typedef struct {
    uint8_t *base;
    Entry *entries;
    uint32_t pages, id;
    bool live, is_brk, locked, huge;
    bool fragmented;                  // may consist of several kernel mappings, so mremap may refuse it as one piece
    uint8_t on_fork;
} Area;
typedef struct { const char *op; uint64_t number, extra; uint32_t area, lo, n; } Note;
typedef struct {
    uint64_t random, serial, number, verified, written, lost_to_free, apart;
    uint64_t counts[OPS_MAX];
    uint32_t index, depth, used, areas_made;
    uint32_t family;                  // 0; of the k-th child of f: f * KIDS + 1 + k, which names its snapshot's place
    Area areas[AREAS_MAX];
    pid_t kids[KIDS];
    int pipe[2];
    Note tail[TAIL];
    uint64_t scratch[PIPE_PAGES * WORDS];
} Thread;
// All that is expected; the parent has one and each child its own.
typedef struct {
    Thread threads[THREADS_MAX];
    uint32_t included;                // threads whose memory this view describes
    Area common;                      // one area, whose pages belong to the threads in turn
    uint64_t tally[THREADS_MAX][TALLY_PAGES];
    Entry pool[];
} View;

static uint64_t seed = 0, ops_limit = UINT64_MAX;
static double seconds = 10;
static uint32_t mib = 128, threads_n = 2, common_pages, budget_pages, area_pages_max;
static const char *sabotage = "", *without = "";
static int killed_most;
static View *view;
static uint8_t *slots;
static size_t slot_bytes;
static uint8_t *tally_base;
static double deadline;
static volatile sig_atomic_t enough;
static pthread_rwlock_t world = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;  // writer: a fork that verifies all threads
static int failing;
static __thread Thread *self;
static __thread sigjmp_buf landing;
static __thread volatile bool landing_set;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static uint64_t mix(uint64_t x) {
    x ^= x >> 30, x *= 0xbf58476d1ce4e5b9u, x ^= x >> 27, x *= 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static uint64_t draw(Thread *t) { return mix(t->random += 0x9e3779b97f4a7c15u); }
static uint32_t below(Thread *t, uint32_t n) { return (uint32_t)((draw(t) >> 32) * n >> 32); }
static bool chance(Thread *t, uint32_t in) { return below(t, in) == 0; }
// 1..max, small numbers as likely as large ones.
static uint32_t spread(Thread *t, uint32_t max) {
    uint32_t bits = 0;
    while (bits < 31 && max >> bits) bits++;
    uint32_t top = 1u << below(t, bits);
    uint32_t n = top + below(t, top);
    return n > max ? max : n;
}

// ---- failure reports

static void print_tail(const Thread *t, unsigned last) {
    uint64_t from = t->number + 1 > last ? t->number + 1 - last : 0;
    for (uint64_t i = from; i <= t->number; i++) {
        const Note *n = &t->tail[i % TAIL];
        if (n->op)
            dprintf(2, "  thread %u depth %u op %" PRIu64 ": %s area %u pages %u+%u %#" PRIx64 "\n", t->index, t->depth, n->number, n->op,
                    n->area, n->lo, n->n, n->extra);
    }
}

static void stop_others(void) {
    if (__atomic_exchange_n(&failing, 1, __ATOMIC_SEQ_CST))
        for (;;) pause();
}

static _Noreturn void give_up(const char *what, const Area *a, uint32_t page, const void *address) {
    stop_others();
    dprintf(2, "torture: FAILED: %s (errno: %s)\n  address %p, area %u (base %p, %u pages%s%s%s%s), page %u\n", what, strerror(errno), address,
            a ? a->id : 0, a ? (void *)a->base : NULL, a ? a->pages : 0, a && a->is_brk ? ", brk" : "", a && a->huge ? ", huge" : "",
            a && a->fragmented ? ", fragmented" : "", a && a->on_fork ? ", wiped on fork" : "", page);
    dprintf(2, "  thread %u, depth %u, process %d, op %" PRIu64 "; history:\n", self->index, self->depth, getpid(), self->number);
    print_tail(self, 32);
    dprintf(2, "torture: seed %" PRIu64 " (--seed %" PRIu64 " --mib %u --threads %u)\n", seed, seed, mib, threads_n);
    _exit(1);
}

// ---- page contents

static void generate(const Content *c, uint64_t *out) {
    uint64_t key = mix(seed ^ c->serial);
    switch (c->kind) {
    case K_RANDOM:
        for (int i = 0; i < WORDS; i++) out[i] = mix(key += 0x9e3779b97f4a7c15u);
        break;
    case K_SAME: {
        uint64_t which = mix(seed + c->serial % 3);
        for (int i = 0; i < WORDS; i++) out[i] = mix(which += 0x9e3779b97f4a7c15u) & 0x0f0f0f0f0f0f0f0f;
        break;
    }
    case K_TEXT:
        for (int i = 0; i < WORDS; i++) out[i] = i % 16 ? 0x2065676150202d20u + (uint64_t)(i & 7) : key + (uint64_t)i;
        break;
    case K_SPARSE:
        memset(out, 0, PAGE);
        for (int i = 0; i < 5; i++) out[mix(key + (uint64_t)i) % WORDS] = key ^ (uint64_t)i;
        break;
    case K_BYTE:
        memset(out, (int)(key & 0xff) | 1, PAGE);
        break;
    default:
        memset(out, 0, PAGE);
    }
    for (unsigned i = c->first; i <= c->count; i++) out[mix(c->serial + i * 0x51ed2701u) % WORDS] = mix(seed ^ c->serial ^ (uint64_t)i << 56);
}

static bool all_zero(const void *page) {
    const uint64_t *p = page;
    for (int i = 0; i < WORDS; i++)
        if (p[i]) return false;
    return true;
}

static _Noreturn void wrong(Thread *t, const Area *a, uint32_t page, const Content *c, const char *when) {
    stop_others();
    uint8_t found[PAGE], *expected = (uint8_t *)t->scratch, *at = a->base + (size_t)page * PAGE;
    memcpy(found, at, PAGE);
    generate(c, t->scratch);
    unsigned first = PAGE, bytes = 0;
    for (unsigned i = 0; i < PAGE; i++)
        if (found[i] != expected[i]) bytes++, first = first == PAGE ? i : first;
    if (first == PAGE) first = 0, when = "the difference has gone since: it was wrong once, right when looked at again";
    uint64_t e, f;
    memcpy(&e, expected + (first & ~7u), 8), memcpy(&f, found + (first & ~7u), 8);
    generate(&a->entries[page].before, t->scratch);
    const char *like = all_zero(found) ? "all zeros" : !memcmp(found, t->scratch, PAGE) ? "the page's previous content" : "something else";
    dprintf(2, "  expected %016" PRIx64 ", found %016" PRIx64 " at byte %u; %u of 4096 bytes differ; the page now holds %s\n", e, f, first, bytes, like);
    dprintf(2, "  version: serial %#" PRIx64 " kind %s patches %u..%u%s; before: serial %#" PRIx64 " kind %s patches %u..%u\n", c->serial,
            kind_names[c->kind], c->first, c->count, c->freed ? " (freed)" : "", a->entries[page].before.serial,
            kind_names[a->entries[page].before.kind], a->entries[page].before.first, a->entries[page].before.count);
    __atomic_store_n(&failing, 0, __ATOMIC_SEQ_CST);
    errno = 0;
    give_up(when, a, page, at + first);
}

static uint8_t *address(const Area *a, uint32_t page) { return a->base + (size_t)page * PAGE; }

static void become(Entry *e, Content c) {
    c.prot = e->now.prot;
    e->before = e->now;
    e->now = c;
}
static const Content untouched = {.kind = K_ZERO, .first = 1};

static void check(Thread *t, Area *a, uint32_t page) {
    Entry *e = &a->entries[page];
    if (e->now.prot == NONE) return;
    generate(&e->now, t->scratch);
    t->verified++;
    if (!memcmp(address(a, page), t->scratch, PAGE)) return;
    if (!e->now.freed || !all_zero(address(a, page))) wrong(t, a, page, &e->now, "wrong content");
    become(e, untouched), t->lost_to_free++;
}

static void write_page(Thread *t, Area *a, uint32_t page) {
    Entry *e = &a->entries[page];
    if (e->now.prot != RW) return;
    Content c = {.serial = ++t->serial, .first = 1};
    c.kind = (uint8_t)(K_ZEROES + mix(c.serial) % (KINDS - K_ZEROES));
    generate(&c, t->scratch);
    memcpy(address(a, page), t->scratch, PAGE);
    become(e, c), t->written++;
}

// Changes one word of a page; the rest must stay.
static void patch_page(Thread *t, Area *a, uint32_t page) {
    Entry *e = &a->entries[page];
    if (e->now.prot != RW) return;
    if (e->now.count >= PATCHES_MAX) {
        write_page(t, a, page);
        return;
    }
    if (!e->now.freed && mix(e->now.serial + e->now.count) % 2) check(t, a, page);
    Content c = e->now;
    if (c.kind == K_ZERO && c.count < c.first) c.serial = ++t->serial;
    c.count++, c.freed = 0;
    uint64_t at = mix(c.serial + c.count * 0x51ed2701u) % WORDS;
    ((volatile uint64_t *)address(a, page))[at] = mix(seed ^ c.serial ^ (uint64_t)c.count << 56);
    t->written++;
    if (e->now.freed) {  // now the page is one or the other for good
        generate(&c, t->scratch);
        if (memcmp(address(a, page), t->scratch, PAGE)) c.kind = K_ZERO, c.first = c.count, t->lost_to_free++;
    }
    become(e, c);
    check(t, a, page);
}

static void forget(Area *a, uint32_t lo, uint32_t n) {
    for (uint32_t i = lo; i < lo + n; i++) become(&a->entries[i], untouched);
}

static void check_area(Thread *t, Area *a) {
    for (uint32_t i = 0; i < a->pages; i++) check(t, a, i);
}

// ---- areas

static void note(Thread *t, const char *op, const Area *a, uint32_t lo, uint32_t n, uint64_t extra) {
    t->tail[t->number % TAIL] = (Note){op, t->number, extra, a ? a->id : 0, lo, n};
}

static void must(bool ok, const char *what, const Area *a) {
    if (!ok) give_up(what, a, 0, a ? a->base : NULL);
}

static Area *pick(Thread *t, bool mapped_only) {
    Area *found[AREAS_MAX];
    uint32_t n = 0;
    for (int i = 0; i < AREAS_MAX; i++)
        if (t->areas[i].live && t->areas[i].pages && !(mapped_only && t->areas[i].is_brk)) found[n++] = &t->areas[i];
    return n ? found[below(t, n)] : NULL;
}

static Area *vacant(Thread *t) {
    for (int i = 0; i < AREAS_MAX; i++)
        if (!t->areas[i].live) return &t->areas[i];
    return NULL;
}

static void open_area(Thread *t, Area *a, uint8_t *base, uint32_t pages) {
    Entry *entries = a->entries;
    *a = (Area){.base = base, .entries = entries, .pages = pages, .id = t->index * 1000000 + ++t->areas_made, .live = true};
    t->used += pages;
    for (uint32_t i = 0; i < pages; i++) entries[i] = (Entry){untouched, untouched};
}

static void close_area(Thread *t, Area *a) { t->used -= a->pages, a->live = false; }

// Back to one plain read-write, unlocked, inherited area.
static void normalise(Area *a) {
    bool guarded = false;
    for (uint32_t i = 0; i < a->pages; i++) guarded |= a->entries[i].now.prot != RW, a->entries[i].now.prot = RW;
    if (guarded) must(!mprotect(a->base, (size_t)a->pages * PAGE, PROT_READ | PROT_WRITE), "mprotect back to read-write", a);
    if (a->locked) must(!munlock(a->base, (size_t)a->pages * PAGE), "munlock", a);
    // README.md: a child that takes back what empties memory at a fork has to have looked at that memory.
    if (a->on_fork == WIPE) (void)*(volatile uint8_t *)a->base;
    if (a->on_fork != KEEP) must(!madvise(a->base, (size_t)a->pages * PAGE, a->on_fork == WIPE ? MADV_KEEPONFORK : MADV_DOFORK), "madvise keep on fork", a);
    a->locked = false, a->on_fork = KEEP;
}

static uint8_t *map_pages(uint32_t pages, int flags) {
    uint8_t *p = mmap(NULL, (size_t)pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    must(p != MAP_FAILED, "mmap", NULL);
    return p;
}

// Whether an access faults. The access itself changes nothing when it does not fault.
static bool faults(volatile uint8_t *at, bool writing) {
    landing_set = true;
    if (sigsetjmp(landing, 1)) {
        landing_set = false;
        return true;
    }
    uint8_t v = *at;
    if (writing) *at = v;
    landing_set = false;
    return false;
}

static void on_fault(int signal, siginfo_t *info, void *context) {
    (void)context;
    if (landing_set) siglongjmp(landing, 1);
    errno = 0;
    give_up(signal == SIGBUS ? "unexpected SIGBUS" : "unexpected SIGSEGV", NULL, 0, info->si_addr);
}

static void on_ask(int signal) {
    (void)signal;
    for (uint32_t i = 0; i < threads_n; i++) print_tail(&view->threads[i], 6);
}

static void on_end(int signal) {
    (void)signal;
    enough = 1;
}

typedef struct { Area *a; uint32_t lo, n; } Range;
static Range pick_range(Thread *t, uint32_t max) {
    Area *a = pick(t, false);
    if (!a) return (Range){0};
    uint32_t lo = below(t, a->pages), left = a->pages - lo;
    return (Range){a, lo, spread(t, left < max ? left : max)};
}

// ---- operations. Each returns false when there was nothing to do.

static bool op_map(Thread *t) {
    Area *a = vacant(t);
    uint32_t room = budget_pages - t->used;
    if (!a || room == 0) return false;
    uint32_t pages = spread(t, room < area_pages_max ? room : area_pages_max);
    int flags = (chance(t, 4) ? MAP_NORESERVE : 0) | (chance(t, 12) ? MAP_POPULATE : 0);
    bool huge = pages >= 512 && chance(t, 3);
    uint8_t *base = map_pages(pages, flags);
    if (huge) must(!madvise(base, (size_t)pages * PAGE, MADV_HUGEPAGE) || errno == EINVAL, "madvise huge", a);
    open_area(t, a, base, pages);
    a->huge = huge;
    note(t, "mmap", a, 0, pages, (uint64_t)(uintptr_t)base);
    uint32_t how = below(t, 4);  // all, a random half, sparse, none
    uint32_t limit = pages < 2048 ? pages : 2048;
    for (uint32_t i = 0; i < limit && how < 3; i += how == 2 ? 7 : 1)
        if (how != 1 || chance(t, 2)) write_page(t, a, i);
    return true;
}

static bool op_unmap(Thread *t) {
    Area *a = pick(t, true);
    if (!a) return false;
    note(t, "munmap", a, 0, a->pages, 0);
    if (chance(t, 2)) check_area(t, a);
    must(!munmap(a->base, (size_t)a->pages * PAGE), "munmap", a);
    close_area(t, a);
    return true;
}

static bool op_unmap_end(Thread *t) {
    Area *a = pick(t, true);
    if (!a || a->pages < 2) return false;
    uint32_t n = spread(t, a->pages - 1);
    bool head = chance(t, 2);
    note(t, head ? "munmap head" : "munmap tail", a, head ? 0 : a->pages - n, n, 0);
    must(!munmap(head ? a->base : address(a, a->pages - n), (size_t)n * PAGE), "munmap part", a);
    if (head) memmove(a->entries, a->entries + n, (a->pages - n) * sizeof(Entry)), a->base += (size_t)n * PAGE;
    a->pages -= n, t->used -= n;
    return true;
}

static bool op_unmap_hole(Thread *t) {
    Area *a = pick(t, true), *rest = vacant(t);
    if (!a || !rest || a->pages < 3) return false;
    uint32_t lo = 1 + below(t, a->pages - 2), n = spread(t, a->pages - lo - 1), right = a->pages - lo - n;
    note(t, "munmap hole", a, lo, n, rest->id);
    must(!munmap(address(a, lo), (size_t)n * PAGE), "munmap hole", a);
    open_area(t, rest, address(a, lo + n), right);
    memcpy(rest->entries, a->entries + lo + n, right * sizeof(Entry));
    rest->locked = a->locked, rest->huge = a->huge, rest->fragmented = a->fragmented, rest->on_fork = a->on_fork;
    t->used -= n + right, a->pages = lo;
    return true;
}

// A new mapping over part of an area: what was there is gone at once.
static bool op_replace(Thread *t) {
    Range r = pick_range(t, RANGE_MAX);
    if (!r.a || r.a->is_brk) return false;
    note(t, "mmap over", r.a, r.lo, r.n, 0);
    normalise(r.a);
    uint8_t *at = address(r.a, r.lo);
    must(mmap(at, (size_t)r.n * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at, "mmap over", r.a);
    forget(r.a, r.lo, r.n);
    r.a->fragmented = true;
    for (uint32_t i = r.lo; i < r.lo + r.n; i++)
        if (chance(t, 2)) write_page(t, r.a, i);
        else check(t, r.a, i);
    return true;
}

static void resized(Thread *t, Area *a, uint8_t *base, uint32_t pages) {
    a->base = base;
    for (uint32_t i = a->pages; i < pages; i++) a->entries[i] = (Entry){untouched, untouched};
    t->used += pages, t->used -= a->pages, a->pages = pages;
}

// Whether mremap has refused an area as several mappings that the program has mapped as one. README.md: now and then.
static bool is_apart(Thread *t, Area *a, const void *outcome) {
    if (outcome != MAP_FAILED || errno != EFAULT) return false;
    a->fragmented = true;
    return t->apart++, true;
}

// What mremap does, for areas that may be several mappings to the kernel.
static void move_by_copy(Thread *t, Area *a, uint32_t pages) {
    uint8_t *base = map_pages(pages, 0);
    for (uint32_t i = 0; i < pages && i < a->pages; i++) {
        check(t, a, i);
        memcpy(base + (size_t)i * PAGE, address(a, i), PAGE);
        if (a->entries[i].now.freed) {
            a->entries[i].now.freed = 0;
            if (all_zero(base + (size_t)i * PAGE)) become(&a->entries[i], untouched);
        }
    }
    must(!munmap(a->base, (size_t)a->pages * PAGE), "munmap after copy", a);
    resized(t, a, base, pages);
    a->fragmented = false;
}

static bool op_grow(Thread *t) {
    Area *a = pick(t, true);
    if (!a) return false;
    uint32_t room = budget_pages - t->used, space = area_pages_max - a->pages;
    room = room < space ? room : space;
    if (room == 0) return false;
    uint32_t old = a->pages, pages = old + spread(t, room);
    bool may_move = chance(t, 2);
    note(t, may_move ? "mremap grow" : "mremap grow in place", a, old, pages - old, 0);
    normalise(a);
    if (a->fragmented) move_by_copy(t, a, pages);
    else {
        void *p = MAP_FAILED;
        if (!may_move) {
            p = mremap(a->base, (size_t)old * PAGE, (size_t)pages * PAGE, 0);
            if (is_apart(t, a, p)) return true;
            must(p == a->base || (p == MAP_FAILED && errno == ENOMEM), "mremap in place", a);
        }
        if (p == MAP_FAILED) p = mremap(a->base, (size_t)old * PAGE, (size_t)pages * PAGE, MREMAP_MAYMOVE);
        if (is_apart(t, a, p)) return true;
        must(p != MAP_FAILED, "mremap grow", a);
        resized(t, a, p, pages);
    }
    t->tail[t->number % TAIL].extra = (uint64_t)(uintptr_t)a->base;
    for (uint32_t i = old; i < pages && i < old + RANGE_MAX; i++)
        if (chance(t, 2)) write_page(t, a, i);
    if (chance(t, 2)) check_area(t, a);
    return true;
}

static bool op_shrink(Thread *t) {
    Area *a = pick(t, true);
    if (!a || a->pages < 2) return false;
    uint32_t n = spread(t, a->pages - 1);
    note(t, "mremap shrink", a, a->pages - n, n, 0);
    must(mremap(a->base, (size_t)a->pages * PAGE, (size_t)(a->pages - n) * PAGE, 0) == a->base, "mremap shrink", a);
    a->pages -= n, t->used -= n;
    return true;
}

// To an address that holds something else, with or without a change of size.
static bool op_move_fixed(Thread *t) {
    Area *a = pick(t, true);
    if (!a) return false;
    uint32_t pages = a->pages, room = budget_pages - t->used, space = area_pages_max - pages;
    uint32_t how = below(t, 4);
    room = room < space ? room : space;
    if (how == 0 && room && t->depth == 0) pages += spread(t, room);
    if (how == 1 && pages > 1) pages -= spread(t, pages - 1);
    note(t, "mremap fixed", a, 0, pages, 0);
    normalise(a);
    if (a->fragmented) {
        move_by_copy(t, a, pages);
        return true;
    }
    uint8_t *to = map_pages(pages, 0);
    for (uint32_t i = below(t, 8); i < pages; i += 1 + below(t, 16)) memset(to + (size_t)i * PAGE, 0xee, PAGE);
    void *at = mremap(a->base, (size_t)a->pages * PAGE, (size_t)pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to);
    // It may have unmapped what was there before it refused.
    if (is_apart(t, a, at)) return munmap(to, (size_t)pages * PAGE), true;
    must(at == to, "mremap fixed", a);
    resized(t, a, to, pages);
    t->tail[t->number % TAIL].extra = (uint64_t)(uintptr_t)to;
    if (chance(t, 2)) check_area(t, a);
    return true;
}

static bool op_dontunmap(Thread *t) {
    Area *a = pick(t, true), *b = vacant(t);
    if (!a || !b || a->fragmented || a->pages > budget_pages - t->used) return false;
    normalise(a);
    note(t, "mremap dontunmap", a, 0, a->pages, 0);
    size_t bytes = (size_t)a->pages * PAGE;
    void *to = mremap(a->base, bytes, bytes, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
    if (is_apart(t, a, to)) return true;
    must(to != MAP_FAILED, "mremap dontunmap", a);
    open_area(t, b, to, a->pages);
    b->huge = a->huge;
    memcpy(b->entries, a->entries, a->pages * sizeof(Entry));
    forget(a, 0, a->pages);
    t->tail[t->number % TAIL].extra = (uint64_t)(uintptr_t)to;
    if (chance(t, 2)) check_area(t, b);
    if (chance(t, 2)) check_area(t, a);
    return true;
}

static bool op_brk(Thread *t) {
    Area *a = &t->areas[0];
    if (!a->is_brk) return false;
    uint32_t room = budget_pages - t->used, space = area_pages_max - a->pages;
    room = room < space ? room : space;
    bool grow = room && (a->pages == 0 || chance(t, 2));
    if (!grow && a->pages == 0) return false;
    uint32_t old = a->pages, n = spread(t, grow ? room : a->pages);
    note(t, grow ? "sbrk grow" : "sbrk shrink", a, old, n, 0);
    must(sbrk(0) == address(a, old), "the break moved by itself", a);
    must(sbrk((intptr_t)(grow ? (intptr_t)n : -(intptr_t)n) * PAGE) != (void *)-1, "sbrk", a);
    resized(t, a, a->base, grow ? old + n : old - n);
    for (uint32_t i = old; i < a->pages && i < old + RANGE_MAX; i++)
        if (chance(t, 2)) write_page(t, a, i);
        else check(t, a, i);
    return true;
}

static bool op_dontneed(Thread *t) {
    Range r = pick_range(t, RANGE_MAX);
    if (!r.a) return false;
    if (r.a->locked) normalise(r.a);
    note(t, "dontneed", r.a, r.lo, r.n, 0);
    must(!madvise(address(r.a, r.lo), (size_t)r.n * PAGE, MADV_DONTNEED), "madvise dontneed", r.a);
    forget(r.a, r.lo, r.n);
    for (uint32_t i = r.lo; i < r.lo + r.n; i++)
        if (chance(t, 4)) check(t, r.a, i);
        else if (chance(t, 3)) write_page(t, r.a, i);
    return true;
}

static bool op_free(Thread *t) {
    Range r = pick_range(t, RANGE_MAX);
    if (!r.a) return false;
    if (r.a->locked) normalise(r.a);
    note(t, "free", r.a, r.lo, r.n, 0);
    for (uint32_t i = r.lo; i < r.lo + r.n; i++) r.a->entries[i].now.freed = 1;
    must(!madvise(address(r.a, r.lo), (size_t)r.n * PAGE, MADV_FREE), "madvise free", r.a);
    for (uint32_t i = r.lo; i < r.lo + r.n; i++) {
        uint32_t how = below(t, 6);
        if (how == 0) write_page(t, r.a, i);
        else if (how == 1) patch_page(t, r.a, i);
        else if (how == 2) check(t, r.a, i);
    }
    return true;
}

static bool op_protect(Thread *t) {
    Range r = pick_range(t, RANGE_MAX);
    if (!r.a) return false;
    bool none = chance(t, 2);
    note(t, none ? "protect none" : "protect read-only", r.a, r.lo, r.n, 0);
    must(!mprotect(address(r.a, r.lo), (size_t)r.n * PAGE, none ? PROT_NONE : PROT_READ), "mprotect", r.a);
    for (uint32_t i = r.lo; i < r.lo + r.n; i++) r.a->entries[i].now.prot = none ? NONE : RO;
    r.a->fragmented = true;
    return true;
}

static bool op_unprotect(Thread *t) {
    Area *a = pick(t, false);
    if (!a) return false;
    note(t, "unprotect", a, 0, a->pages, 0);
    normalise(a);
    if (chance(t, 2)) check_area(t, a);
    return true;
}

static void probe(Thread *t, Area *a, uint8_t *at, bool readable) {
    if (faults(at, false) == readable) give_up(readable ? "a readable page faults" : "a protected page can be read", a, 0, at);
    if (!faults(at + 8, true)) give_up("a protected page can be written", a, 0, at);
    ssize_t n = write(t->pipe[1], at, 16);
    if (readable) must(n == 16 && read(t->pipe[0], t->scratch, 16) == 16, "write() of a read-only page", a);
    else must(n == -1 && errno == EFAULT, "write() of a protected page", a);
}

static bool op_probe(Thread *t) {
    Area *a = pick(t, false);
    if (!a) return false;
    note(t, "probe", a, 0, a->pages, 0);
    uint32_t start = below(t, a->pages), seen = 0;
    for (uint32_t i = 0; i < a->pages && seen < 2; i++) {
        uint32_t page = (start + i) % a->pages;
        uint8_t prot = a->entries[page].now.prot;
        if (prot != RW) probe(t, a, address(a, page), prot == RO), seen++;
    }
    return seen > 0;
}

static void nap(double ms) {
    struct timespec t = {(time_t)(ms / 1000), (long)(ms * 1e6) % 1000000000};
    nanosleep(&t, NULL);
}

static bool op_guard(Thread *t) {
    uint32_t n = spread(t, 32), sleep_ms = chance(t, 4) ? below(t, 20) : 0;
    uint8_t *p = map_pages(n + 2, 0);
    note(t, "guard", NULL, 0, n, (uint64_t)(uintptr_t)p);
    must(!mprotect(p, PAGE, PROT_NONE) && !mprotect(p + (size_t)(n + 1) * PAGE, PAGE, PROT_NONE), "mprotect guard", NULL);
    uint64_t *words = (uint64_t *)(p + PAGE), key = draw(t);
    for (uint32_t i = 0; i < n * WORDS; i++) words[i] = key + i;
    if (sleep_ms) nap(sleep_ms);
    probe(t, NULL, p + PAGE - 64, false);
    probe(t, NULL, p + (size_t)(n + 1) * PAGE, false);
    for (uint32_t i = 0; i < n * WORDS; i++)
        if (((volatile uint64_t *)words)[i] != key + i) give_up("wrong content between guards", NULL, i / WORDS, &words[i]);
    must(!munmap(p, (size_t)(n + 2) * PAGE), "munmap guard", NULL);
    t->verified += n, t->written += n;
    return true;
}

static bool op_write(Thread *t) {
    Range r = pick_range(t, RANGE_MAX);
    if (!r.a) return false;
    note(t, "write", r.a, r.lo, r.n, 0);
    for (uint32_t i = r.lo; i < r.lo + r.n; i++) write_page(t, r.a, i);
    return true;
}

static bool op_patch(Thread *t) {
    Range r = pick_range(t, RANGE_MAX);
    if (!r.a) return false;
    uint32_t stride = 1 + below(t, 9);
    note(t, "patch", r.a, r.lo, r.n, stride);
    for (uint32_t i = r.lo; i < r.lo + r.n; i += stride) patch_page(t, r.a, i);
    return true;
}

static bool op_verify(Thread *t) {
    Range r = pick_range(t, 4096);
    if (!r.a) return false;
    note(t, "verify", r.a, r.lo, r.n, 0);
    for (uint32_t i = r.lo; i < r.lo + r.n; i++) check(t, r.a, i);
    return true;
}

// Copies pages between areas: by memcpy, by a pipe, or from this process into itself.
static bool op_copy(Thread *t) {
    Range from = pick_range(t, PIPE_PAGES), to = pick_range(t, PIPE_PAGES);
    if (!from.a || !to.a) return false;
    uint32_t how = below(t, 4), n = 0, want = from.n < to.n ? from.n : to.n;
    note(t, how == 0 ? "memcpy" : how == 3 ? "process_vm_readv" : "pipe", from.a, from.lo, want, to.a->id);
    struct iovec out[PIPE_PAGES], in[PIPE_PAGES];
    uint32_t src[PIPE_PAGES], dst[PIPE_PAGES];
    for (uint32_t i = 0; i < want; i++) {
        const Content *s = &from.a->entries[from.lo + i].now, *d = &to.a->entries[to.lo + i].now;
        bool overlap = from.a == to.a && to.lo + i < from.lo + want && from.lo < to.lo + want;
        if (s->prot == NONE || s->freed || d->prot != RW || overlap) continue;
        src[n] = from.lo + i, dst[n] = to.lo + i;
        out[n] = (struct iovec){address(from.a, src[n]), PAGE}, in[n] = (struct iovec){address(to.a, dst[n]), PAGE};
        n++;
    }
    if (!n) return false;
    ssize_t bytes = (ssize_t)n * PAGE;
    if (how == 0)
        for (uint32_t i = 0; i < n; i++) memcpy(in[i].iov_base, out[i].iov_base, PAGE);
    else if (how == 3) must(process_vm_readv(getpid(), in, n, out, n, 0) == bytes, "process_vm_readv", to.a);
    else {
        must(writev(t->pipe[1], out, (int)n) == bytes, "writev to a pipe", from.a);
        must(readv(t->pipe[0], in, (int)n) == bytes, "readv from a pipe", to.a);
    }
    for (uint32_t i = 0; i < n; i++) {
        become(&to.a->entries[dst[i]], from.a->entries[src[i]].now);
        check(t, to.a, dst[i]);
        if (chance(t, 2)) check(t, from.a, src[i]);
    }
    return true;
}

// write() of an unaligned stretch, seen by a reader that is not managed.
static bool op_send(Thread *t) {
    Range r = pick_range(t, 2);
    if (!r.a) return false;
    uint32_t from = below(t, PAGE), n = 1 + below(t, PAGE - from);
    Content c = r.a->entries[r.lo].now;
    if (c.prot == NONE || c.freed) return false;
    note(t, "write() part", r.a, r.lo, 1, (uint64_t)from << 32 | n);
    must(write(t->pipe[1], address(r.a, r.lo) + from, n) == n && read(t->pipe[0], t->scratch + WORDS, n) == n, "write()", r.a);
    generate(&c, t->scratch);
    if (memcmp((uint8_t *)t->scratch + from, t->scratch + WORDS, n)) {
        dprintf(2, "  write() sent other bytes than the page should hold\n");
        wrong(t, r.a, r.lo, &c, "wrong content seen by write()");
    }
    return true;
}

static bool op_lock(Thread *t) {
    Range r = pick_range(t, 64);
    if (!r.a) return false;
    if (r.a->entries[r.lo].now.prot == NONE) return false;
    note(t, "mlock", r.a, r.lo, r.n, 0);
    normalise(r.a);
    if (!mlock(address(r.a, r.lo), (size_t)r.n * PAGE)) r.a->locked = true;
    else must(errno == ENOMEM || errno == EPERM || errno == EAGAIN, "mlock", r.a);
    r.a->fragmented = true;
    for (uint32_t i = r.lo; i < r.lo + r.n; i++) {
        check(t, r.a, i);
        if (chance(t, 2)) write_page(t, r.a, i);
    }
    return true;
}

static bool op_populate(Thread *t) {
    Range r = pick_range(t, RANGE_MAX);
    if (!r.a) return false;
    static const int advice[] = {MADV_WILLNEED, MADV_COLD, 22 /* POPULATE_READ */, 23 /* POPULATE_WRITE */};
    int which = advice[below(t, 4)];
    note(t, "populate", r.a, r.lo, r.n, (uint64_t)which);
    normalise(r.a);
    must(!madvise(address(r.a, r.lo), (size_t)r.n * PAGE, which), "madvise populate", r.a);
    for (uint32_t i = r.lo; i < r.lo + r.n; i++) check(t, r.a, i);
    return true;
}

static bool op_on_fork(Thread *t) {
    Area *a = pick(t, true);
    if (!a || t->depth) return false;
    normalise(a);
    bool wipe = chance(t, 2);
    note(t, wipe ? "wipe on fork" : "drop on fork", a, 0, a->pages, 0);
    must(!madvise(a->base, (size_t)a->pages * PAGE, wipe ? MADV_WIPEONFORK : MADV_DONTFORK), "madvise on fork", a);
    a->on_fork = wipe ? WIPE : DROP, a->fragmented = true;
    return true;
}

static bool op_spawn(Thread *t) {
    char *const argv[] = {"true", NULL}, *const envp[] = {NULL};
    pid_t pid;
    int status;
    note(t, "spawn", NULL, 0, 0, 0);
    must(!posix_spawn(&pid, "/bin/true", NULL, NULL, argv, envp), "posix_spawn", NULL);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
    must(status == 0, "a spawned program failed", NULL);
    return true;
}

static bool op_sleep(Thread *t) {
    double ms = chance(t, 10) ? 50 + below(t, 100) : 1 + below(t, 12);
    note(t, "sleep", NULL, 0, 0, (uint64_t)ms);
    nap(ms);
    return true;
}

static bool op_verify_all(Thread *t) {
    note(t, "verify all", NULL, 0, 0, 0);
    for (int i = 0; i < AREAS_MAX; i++)
        if (t->areas[i].live) check_area(t, &t->areas[i]);
    return true;
}

// ---- memory that all threads use at once: whose page, and whose word

static bool owns(const Thread *t, uint32_t page) {
    return (page < common_pages / 2 ? page : page / 4) % threads_n == t->index;
}

static bool op_common(Thread *t) {
    Area *a = &view->common;
    uint32_t n = spread(t, 64), how = below(t, 5), start = below(t, a->pages);
    note(t, how == 0 ? "common dontneed" : how == 1 ? "common free" : "common write", a, start, n, how);
    for (uint32_t i = start; i < start + n && i < a->pages; i++) {
        if (!owns(t, i)) continue;
        uint32_t run = 1;
        while (i + run < a->pages && owns(t, i + run)) run++;
        switch (how) {
        case 0:
            must(!madvise(address(a, i), (size_t)run * PAGE, MADV_DONTNEED), "madvise dontneed", a);
            forget(a, i, run);
            break;
        case 1:
            for (uint32_t j = i; j < i + run; j++) a->entries[j].now.freed = 1;
            must(!madvise(address(a, i), (size_t)run * PAGE, MADV_FREE), "madvise free", a);
            break;
        case 2: check(t, a, i); break;
        case 3: patch_page(t, a, i); break;
        default: write_page(t, a, i);
        }
        if (how < 2) {
            for (uint32_t j = i; j < i + run; j++)
                if (chance(t, 2)) patch_page(t, a, j);
                else check(t, a, j);
            i += run - 1;
        }
    }
    return true;
}

static volatile uint64_t *tally_word(uint32_t thread, uint32_t page) {
    return (volatile uint64_t *)(tally_base + (size_t)page * PAGE) + thread * 31 % WORDS;
}

static void check_tally(uint32_t thread, uint32_t page) {
    uint64_t found = *tally_word(thread, page);
    if (found == view->tally[thread][page]) return;
    dprintf(2, "  expected count %" PRIu64 " of thread %u, found %" PRIu64 "\n", view->tally[thread][page], thread, found);
    errno = 0;
    give_up("lost update", NULL, page, (const void *)tally_word(thread, page));
}

// Counts in words of pages that every other thread writes to at the same time: a write that a capture loses shows.
static bool op_tally(Thread *t) {
    uint32_t n = spread(t, 2048), span = spread(t, TALLY_PAGES);
    note(t, "tally", NULL, 0, span, n);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t page = below(t, span);
        check_tally(t->index, page);
        *tally_word(t->index, page) = ++view->tally[t->index][page];
    }
    return true;
}

// ---- fork

static void verify_view(Thread *t) {
    for (uint32_t i = 0; i < threads_n; i++) {
        if (!(view->included >> i & 1)) continue;
        for (int k = 0; k < AREAS_MAX; k++)
            if (view->threads[i].areas[k].live) check_area(t, &view->threads[i].areas[k]);
        for (uint32_t page = 0; page < TALLY_PAGES; page++) check_tally(i, page);
        for (uint32_t page = 0; page < common_pages; page++)
            if (owns(&view->threads[i], page)) check(t, &view->common, page);
    }
}

static void snapshot(View *v, const Thread *t, bool all) {
    Entry *next = v->pool;
    v->included = all ? view->included : 1u << t->index;
    for (uint32_t i = 0; i < threads_n; i++) {
        if (!(v->included >> i & 1)) continue;
        v->threads[i] = view->threads[i];
        memcpy(v->tally[i], view->tally[i], sizeof v->tally[i]);
        for (int k = 0; k < AREAS_MAX; k++) {
            Area *a = &v->threads[i].areas[k];
            if (!a->live) continue;
            memcpy(next, a->entries, a->pages * sizeof(Entry));
            a->entries = next, next += a->pages;
        }
    }
    v->common = view->common;
    memcpy(next, view->common.entries, common_pages * sizeof(Entry));
    v->common.entries = next;
}

static void reap(Thread *t, int k) {
    int status;
    while (waitpid(t->kids[k], &status, 0) < 0) must(errno == EINTR, "waitpid", NULL);
    static atomic_int killed;
    if (status && !(status == SIGKILL && killed++ < killed_most)) {
        dprintf(2, "  child %d ended with wait status %#x\n", t->kids[k], status);
        errno = 0;
        give_up("a forked child failed", NULL, 0, NULL);
    }
    t->kids[k] = 0;
}

static void step(Thread *t);

static _Noreturn void child(View *v, uint32_t index, uint32_t family, pid_t parent) {
    view = v, self = &v->threads[index];
    Thread *t = self;
    t->depth++, t->family = family;
    t->random ^= mix(t->random + t->depth), t->serial |= (uint64_t)t->depth << 60;
    memset(t->kids, 0, sizeof t->kids);
    note(t, "forked", NULL, 0, 0, (uint64_t)parent);
    must(!pipe(t->pipe), "pipe", NULL);
    for (uint32_t i = 0; i < threads_n; i++)
        for (int k = 0; v->included >> i & 1 && k < AREAS_MAX; k++) {
            Area *a = &v->threads[i].areas[k];
            if (a->live && a->on_fork == WIPE) forget(a, 0, a->pages);
            if (a->live && a->on_fork == DROP) close_area(&v->threads[i], a);
            a->locked = false;
        }
    if (!strcmp(sabotage, "child")) {
        Area *a = &v->common;
        for (uint32_t i = 0; i < common_pages; i++)
            if (owns(t, i)) address(a, i)[below(t, PAGE)] ^= 0x10;
    }
    if (!chance(t, 4)) verify_view(t);
    uint32_t steps = spread(t, 64);
    for (uint32_t i = 0; i < steps; i++) step(t);
    verify_view(t);
    for (int k = 0; k < KIDS; k++)
        if (t->kids[k]) reap(t, k);
    verify_view(t);
    _exit(0);
}

static bool fork_and_check(Thread *t, bool all) {
    if (t->depth >= DEPTH_MAX) return false;
    int k = chance(t, 2);
    bool wait = chance(t, 2);
    if (t->kids[k]) reap(t, k);
    View *v = (View *)(slots + slot_bytes * (t->index * FAMILY + t->family * KIDS + (uint32_t)k));
    note(t, all ? "fork all" : "fork own", NULL, 0, 0, (uint64_t)wait);
    snapshot(v, t, all);
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) child(v, t->index, t->family * KIDS + 1 + (uint32_t)k, parent);
    must(pid > 0, "fork", NULL);
    t->kids[k] = pid;
    if (!all && wait) reap(t, k);
    return true;
}
static bool op_fork(Thread *t) { return fork_and_check(t, false); }
static bool op_fork_all(Thread *t) { return fork_and_check(t, true); }

// ---- choosing

// Where: C = also in a forked child, A = alone (no other thread is within an operation), U = outside the lock.
static const struct Op { const char *name; bool (*run)(Thread *); uint16_t weight; const char *where; } ops[] = {
    {"mmap", op_map, 60, ""}, {"munmap", op_unmap, 28, "C"}, {"munmap_end", op_unmap_end, 15, "C"}, {"munmap_hole", op_unmap_hole, 20, ""},
    {"mmap_over", op_replace, 15, "C"}, {"mremap_grow", op_grow, 40, ""}, {"mremap_shrink", op_shrink, 15, "C"},
    {"mremap_fixed", op_move_fixed, 20, "C"}, {"mremap_dontunmap", op_dontunmap, 20, ""}, {"brk", op_brk, 60, ""},
    {"dontneed", op_dontneed, 50, "C"}, {"free", op_free, 40, "C"}, {"protect", op_protect, 30, "C"}, {"unprotect", op_unprotect, 30, "C"},
    {"probe", op_probe, 20, "C"}, {"guard", op_guard, 10, "C"}, {"write", op_write, 140, "C"}, {"patch", op_patch, 140, "C"},
    {"verify", op_verify, 140, "C"}, {"copy", op_copy, 80, "C"}, {"send", op_send, 40, "C"}, {"lock", op_lock, 12, "C"},
    {"populate", op_populate, 12, "C"}, {"on_fork", op_on_fork, 8, ""}, {"spawn", op_spawn, 1, ""}, {"sleep", op_sleep, 14, "CU"},
    {"verify_all", op_verify_all, 3, "C"}, {"common", op_common, 120, "C"}, {"tally", op_tally, 80, "C"}, {"fork", op_fork, 5, "C"},
    {"fork_all", op_fork_all, 2, "A"},
};
enum { OPS = sizeof ops / sizeof *ops };
_Static_assert(sizeof ops / sizeof *ops <= OPS_MAX, "room for the counters");

static void sabotage_now(Thread *t) {
    Range r = pick_range(t, 1);
    if (!strcmp(sabotage, "lost")) {
        (*tally_word(t->index, below(t, TALLY_PAGES)))--;
        return;
    }
    if (!r.a || r.a->locked) return;
    Entry *e = &r.a->entries[r.lo];
    uint8_t *at = address(r.a, r.lo);
    generate(&e->now, t->scratch);
    if (e->now.prot != RW || all_zero(t->scratch)) return;
    note(t, "sabotage", r.a, r.lo, 1, 0);
    if (!strcmp(sabotage, "flip")) at[below(t, PAGE)] ^= (uint8_t)(1 << below(t, 8)), e->now.freed = 0;
    else if (e->now.freed) return;
    else if (!strcmp(sabotage, "zero")) memset(at, 0, PAGE);
    else if (!strcmp(sabotage, "drop")) madvise(at, PAGE, MADV_DONTNEED);
    else if (!strcmp(sabotage, "stale")) generate(&e->before, (uint64_t *)at);
}

// To find which operation a failure needs.
static bool left_out(const char *name) {
    size_t length = strlen(name);
    for (const char *at = without; (at = strstr(at, name)); at += length)
        if ((at == without || at[-1] == ',') && (at[length] == 0 || at[length] == ',')) return true;
    return false;
}

static void step(Thread *t) {
    t->number++;
    t->tail[t->number % TAIL].op = NULL;
    uint32_t total = 0, k = 0;
    for (int i = 0; i < OPS; i++) total += ops[i].weight;
    for (uint32_t left = below(t, total); left >= ops[k].weight; k++) left -= ops[k].weight;
    const struct Op *op = &ops[k];
    if (left_out(op->name)) return;
    bool alone = strchr(op->where, 'A'), outside = strchr(op->where, 'U');
    if (t->depth) {
        if (strchr(op->where, 'C')) op->run(t);
        return;
    }
    if (*sabotage && strcmp(sabotage, "child") && t->index == 0 && t->number > 300 && t->number % 29 == 0) sabotage_now(t);
    if (alone) pthread_rwlock_wrlock(&world);
    else if (!outside) pthread_rwlock_rdlock(&world);
    if (op->run(t)) t->counts[k]++;
    if (!outside) pthread_rwlock_unlock(&world);
}

static void *work(void *argument) {
    Thread *t = self = argument;
    while (t->number < ops_limit && now() < deadline && !enough) step(t);
    return NULL;
}

static void *share(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) perror("torture: shadow"), exit(2);
    return p;
}

int main(int argc, char **argv) {
    struct timespec clock;
    clock_gettime(CLOCK_REALTIME, &clock);
    seed = (uint64_t)clock.tv_sec * 1000 + (uint64_t)clock.tv_nsec / 1000000 % 1000;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--seed")) seed = strtoull(argv[i + 1], NULL, 0);
        else if (!strcmp(argv[i], "--seconds")) seconds = strtod(argv[i + 1], NULL);
        else if (!strcmp(argv[i], "--mib")) mib = (uint32_t)atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--threads")) threads_n = (uint32_t)atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--ops")) ops_limit = strtoull(argv[i + 1], NULL, 0);
        else if (!strcmp(argv[i], "--sabotage")) sabotage = argv[i + 1];
        else if (!strcmp(argv[i], "--without")) without = argv[i + 1];
        else if (!strcmp(argv[i], "--killed")) killed_most = atoi(argv[i + 1]);
        else fprintf(stderr, "torture: unknown option %s\n", argv[i]), exit(2);
    }
    if (argc % 2 == 0 || threads_n < 1 || threads_n > THREADS_MAX || mib < 4) fprintf(stderr, "torture: see the top of torture.c\n"), exit(2);
    dprintf(1, "torture: seed %" PRIu64 "\n", seed);

    common_pages = mib * 256 / 16 / 8 * 8 + 64;
    budget_pages = (mib * 256 - common_pages) / threads_n;
    area_pages_max = budget_pages / 3 < 16 ? 16 : budget_pages / 3;
    size_t all_pages = (size_t)budget_pages * threads_n + common_pages;
    slot_bytes = (sizeof(View) + (all_pages + 64) * sizeof(Entry) + PAGE - 1) / PAGE * PAGE;
    slots = share(slot_bytes * threads_n * FAMILY);
    view = share(sizeof(View) + ((size_t)threads_n * AREAS_MAX * area_pages_max + common_pages) * sizeof(Entry));
    view->included = (1u << threads_n) - 1;
    self = &view->threads[0];
    Entry *next = view->pool;
    for (uint32_t i = 0; i < threads_n; i++) {
        Thread *t = &view->threads[i];
        t->index = i, t->random = mix(seed + i * 0x1234567u), t->serial = (uint64_t)i << 52;
        must(!pipe(t->pipe), "pipe", NULL);
        for (int k = 0; k < AREAS_MAX; k++) t->areas[k].entries = next, next += area_pages_max;
    }
    view->common = (Area){.base = map_pages(common_pages, 0), .entries = next, .pages = common_pages, .live = true};
    for (uint32_t i = 0; i < common_pages; i++) next[i] = (Entry){untouched, untouched};
    tally_base = map_pages(TALLY_PAGES, 0);

    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL), sigaction(SIGBUS, &action, NULL);
    action = (struct sigaction){.sa_handler = on_ask, .sa_flags = SA_RESTART};
    sigaction(SIGUSR1, &action, NULL);
    action.sa_handler = on_end;
    sigaction(SIGTERM, &action, NULL);

    deadline = now() + seconds;
    pthread_t ids[THREADS_MAX];
    for (uint32_t i = 1; i < threads_n; i++) must(!pthread_create(&ids[i], NULL, work, &view->threads[i]), "pthread_create", NULL);
    uintptr_t end = (uintptr_t)sbrk(0);  // after pthread_create, whose memory comes from there
    must(sbrk((intptr_t)(-end % PAGE)) != (void *)-1, "sbrk", NULL);
    open_area(self, &self->areas[0], sbrk(0), 0);
    self->areas[0].is_brk = true;
    work(self);
    for (uint32_t i = 1; i < threads_n; i++) pthread_join(ids[i], NULL);
    for (uint32_t i = 0; i < threads_n; i++)
        for (int k = 0; k < KIDS; k++)
            if (view->threads[i].kids[k]) reap(&view->threads[i], k);
    for (uint32_t i = 0; i < threads_n; i++)
        for (int k = 0; k < AREAS_MAX; k++)
            if (view->threads[i].areas[k].live) normalise(&view->threads[i].areas[k]);
    verify_view(self);

    uint64_t verified = 0, written = 0, lost = 0, apart = 0, steps = 0;
    for (uint32_t i = 0; i < threads_n; i++) {
        const Thread *t = &view->threads[i];
        verified += t->verified, written += t->written, lost += t->lost_to_free, apart += t->apart, steps += t->number;
    }
    char line[2048];
    int n = snprintf(line, sizeof line, "{\"seed\":%" PRIu64 ",\"mib\":%u,\"threads\":%u,\"steps\":%" PRIu64 ",\"pages_verified\":%" PRIu64
                     ",\"pages_written\":%" PRIu64 ",\"freed_pages_gone\":%" PRIu64 ",\"found_apart\":%" PRIu64 ",\"ops\":{", seed, mib, threads_n, steps, verified, written,
                     lost, apart);
    for (int k = 0; k < OPS; k++) {
        uint64_t sum = 0;
        for (uint32_t i = 0; i < threads_n; i++) sum += view->threads[i].counts[k];
        n += snprintf(line + n, sizeof line - (size_t)n, "%s\"%s\":%" PRIu64, k ? "," : "", ops[k].name, sum);
    }
    dprintf(1, "%s}}\n", line);
    return 0;
}
