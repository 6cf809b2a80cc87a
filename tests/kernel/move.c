// MOVE: the one call by which pages leave a target.
#include "kernel.h"

FACT(move_captures_atomically) {
    begin();
    u64 memory = managed(4, 7);
    expect_is(reg(uffd.fd, staging, 4), 0);
    expect_is(move(it, 1, uffd.there, staging, memory, 4, 0), 0);
    expect_is(moved, 4 * PAGE);
    expect_is(present_pages(it, memory, 4), 0);
    expect_is(wrong_words(it, staging, 4, 7), 0);
}

// A store is never lost between the unmapping and the capture: a thread counts in a page that is captured and put back
// all the while.
FACT(move_loses_no_store) {
    begin();
    enum { COUNT = 20000000 };
    static u64 kept[PAGE / 8];
    u64 memory = map(it, 1);
    expect_is(reg(uffd.fd, memory, 1), 0);
    expect_is(zeros(uffd.fd, memory, 1), 0);
    u64 counted = 0;
    // Once is enough, but where we do not run while it counts.
    for (int captures = 0; captures < 10; counted += COUNT) {
        tell(it, 2, (struct order){ COUNT_UP, 0, { memory, COUNT } });
        for (double until = now() + 2; !answered_within(it, 2, 0); captures++) {
            if (now() > until) fail("not done in 2 s, after %d captures", captures);
            expect_is(capture(memory, 1, 0), 0);
            struct iovec here = { kept, PAGE }, there = { (void *)staging, PAGE };
            expect_is(process_vm_readv(it->pid, &here, 1, &there, 1, 0), PAGE);
            expect_is(call(it, 1, SYS_madvise, staging, PAGE, MADV_DONTNEED), 0);
            expect_is(copy(uffd.fd, memory, kept, 1), 0);
        }
        answer_of(it, 2);
    }
    expect_is(load(it, 1, memory), counted);
}

FACT(move_passes_over_holes) {
    begin();
    u64 memory = managed(8, 7);
    evict(memory + 2 * PAGE, 3);
    expect_is(call(it, 1, SYS_madvise, staging, STAGING_PAGES * PAGE, MADV_DONTNEED), 0);
    expect_is(reg(uffd.fd, staging, 8), 0);
    expect_is(move(it, 1, uffd.there, staging, memory + 2 * PAGE, 1, 0), -ENOENT);
    expect_is(move(it, 1, uffd.there, staging, memory, 8, ALLOW_HOLES), 0);
    // Holes count as moved, and leave holes.
    expect_is(moved, 8 * PAGE);
    expect_is(present_pages(it, memory, 8), 0);
    expect_is(present_pages(it, staging, 8), 5);
    expect(!is_present(it, staging + 2 * PAGE) && is_present(it, staging + 5 * PAGE));
}

FACT(a_partial_move_says_again) {
    begin();
    u64 memory = managed(8, 7);
    expect_is(reg(uffd.fd, staging, 8), 0);
    expect_is(zeros(uffd.fd, staging + 3 * PAGE, 1), 0);
    // Whatever stopped it: the reason comes when the page that stopped it is the first.
    expect_is(move(it, 1, uffd.there, staging, memory, 8, 0), -EAGAIN);
    expect_is(moved, 3 * PAGE);
    expect_is(move(it, 1, uffd.there, staging + 3 * PAGE, memory + 3 * PAGE, 1, 0), -EEXIST);
    expect_is(moved, -EEXIST);
    expect_is(present_pages(it, memory, 8), 5);
}

FACT(move_stays_in_one_mapping) {
    begin();
    u64 memory = map(it, 8);
    expect_is(call(it, 0, SYS_madvise, memory + 4 * PAGE, 4 * PAGE, MADV_DONTDUMP), 0);
    fill(it, memory, 8, 7);
    expect_is(reg(uffd.fd, memory, 8), 0);
    expect_is(reg(uffd.fd, staging, 8), 0);
    expect_is(move(it, 1, uffd.there, staging, memory + 2 * PAGE, 4, ALLOW_HOLES), -EINVAL);
    expect_is(present_pages(it, memory, 8), 8);
    expect_is(move(it, 1, uffd.there, staging, memory + 2 * PAGE, 2, ALLOW_HOLES), 0);
}

FACT(move_needs_equal_access) {
    begin();
    u64 memory = managed(8, 7);
    expect_is(call(it, 0, SYS_mprotect, memory + PAGE, PAGE, PROT_READ), 0);
    expect_is(call(it, 0, SYS_mprotect, memory + 2 * PAGE, PAGE, PROT_NONE), 0);
    expect_is(call(it, 0, SYS_mlock, memory + 3 * PAGE, PAGE), 0);
    for (u64 i = 1; i < 4; i++) {
        expect_is(capture(memory + i * PAGE, 1, 0), -EINVAL);
        expect(is_present(it, memory + i * PAGE));
    }
    expect_is(call(it, 0, SYS_mprotect, memory + PAGE, PAGE, PROT_READ | PROT_WRITE), 0);
    expect_is(call(it, 0, SYS_munlock, memory + 3 * PAGE, PAGE), 0);
    expect_is(capture(memory + PAGE, 1, 1), 0);
    expect_is(capture(memory + 3 * PAGE, 1, 3), 0);
}

// Under mlockall(MCL_FUTURE) a staging area is locked and full from its birth: it takes no page and drops none.
FACT(staging_of_a_locked_process_is_useless) {
    begin();
    u64 memory = managed(1, 7);
    expect_is(call(it, 0, SYS_mlockall, MCL_FUTURE), 0);
    u64 area = map(it, 4);
    expect_is(present_pages(it, area, 4), 4);
    expect_is(reg(uffd.fd, area, 4), 0);
    expect_is(move(it, 1, uffd.there, area, memory, 1, ALLOW_HOLES), -EINVAL);
    expect_is(unreg(uffd.fd, area, 4), 0);
    expect_is(call(it, 0, SYS_madvise, area, 4 * PAGE, MADV_DONTNEED), -EINVAL);
}

// A child of the target that shares its pages, and does nothing.
static struct target *fork_it(void) {
    tell_fork(it, 0);
    next_message(uffd.fd, FORK);
    return child_of(it, 0);
}

FACT(move_refuses_pages_shared_by_a_fork) {
    begin();
    u64 memory = managed(4, 7);
    struct target *child = fork_it();
    expect_is(capture(memory, 1, 0), -EBUSY);
    kill(child->pid, SIGKILL);
    call(it, 0, SYS_wait4, (u64)child->pid, 0, 0, 0);
    // The child is gone, and still: a page stays shared until it is written to.
    expect_is(capture(memory, 1, 0), -EBUSY);
    store(it, 0, memory, word_of(7, 0, 0));
    expect_is(capture(memory, 1, 0), 0);
    expect_is(capture(memory + PAGE, 1, 1), -EBUSY);
}

FACT(populating_for_writing_unshares) {
    begin();
    u64 memory = managed(8, 7);
    struct target *child = fork_it();
    expect_is(call(it, 1, SYS_madvise, memory, 4 * PAGE, MADV_POPULATE_WRITE), 0);
    expect_is(wrong_words(it, memory, 8, 7), 0);
    expect_is(capture(memory, 4, 0), 0);
    expect_is(capture(memory + 4 * PAGE, 1, 4), -EBUSY);
    // The child keeps what it had.
    struct answer answer = order(child, 0, (struct order){ CHECK, 0, { memory, 8, 7 } });
    expect(answer.value == 0 && answer.signal == 0);
}

// On a page that is out it waits for the pager, like any access: an agent that does so may wait for its own pager.
FACT(populating_what_is_out_waits) {
    begin();
    u64 memory = managed(2, 7);
    evict(memory, 1);
    tell(it, 1, ORDER_CALL(SYS_madvise, memory, 2 * PAGE, MADV_POPULATE_WRITE));
    struct message fault = next_message(uffd.fd, FAULT);
    expect_is((uint32_t)fault.c, it->tids[1]);
    expect(!answered_within(it, 1, 50));
    expect_is(copy(uffd.fd, memory, page_of(1), 1), 0);
    expect_is(answer_of(it, 1).value, 0);
}

FACT(move_takes_pages_of_zeros) {
    begin();
    u64 memory = map(it, 2);
    expect_is(reg(uffd.fd, memory, 2), 0);
    expect_is(zeros(uffd.fd, memory, 2), 0);
    expect_is(capture(memory, 2, 0), 0);
    expect_is(moved, 2 * PAGE);
    expect_is(present_pages(it, memory, 2), 0);
    expect_is(load(it, 0, staging), 0);
    // Writing to a page of zeros replaces it, and tells nobody.
    expect_is(zeros(uffd.fd, memory, 1), 0);
    store(it, 0, memory, 5);
    expect(is_quiet(uffd.fd));
}

// Danger: nothing but the pager's own table says which pages are its own.
FACT(move_takes_unregistered_pages) {
    begin();
    u64 memory = map(it, 1);
    fill(it, memory, 1, 7);
    expect_is(capture(memory, 1, 0), 0);
    expect_is(wrong_words(it, staging, 1, 7), 0);
    // And nobody is asked for it then: it reads as zeros.
    expect_is(load(it, 0, memory), 0);
    expect(is_quiet(uffd.fd));
}

FACT(move_needs_a_destination_of_its_own) {
    begin();
    struct uffd other = open_uffd(it, 0);
    u64 memory = managed(2, 7);
    expect_is(move(it, 1, uffd.there, staging, memory, 1, 0), -EINVAL);
    expect_is(reg(other.fd, staging, 2), 0);
    expect_is(move(it, 1, uffd.there, staging, memory, 1, 0), -EINVAL);
    // Whose the source is does not matter.
    expect_is(move(it, 1, other.there, staging, memory, 1, 0), 0);
}

FACT(move_refuses_pinned_pages) {
    begin();
    u64 memory = managed(2, 7);
    long ring = call(it, 0, 425 /* io_uring_setup */, 4, (u64)argument(it, 0));
    if (ring < 0) skip("io_uring_setup: %s", strerror((int)-ring));
    struct iovec *buffer = argument(it, 0);
    *buffer = (struct iovec){ (void *)memory, PAGE };
    expect_is(call(it, 0, 427 /* io_uring_register */, (u64)ring, 0 /* REGISTER_BUFFERS */, (u64)buffer, 1), 0);
    expect_is(capture(memory, 1, 0), -EBUSY);
    expect_is(call(it, 0, 427, (u64)ring, 1 /* UNREGISTER_BUFFERS */, 0, 0), 0);
    expect_is(capture(memory, 1, 0), 0);
}

// A pipe of the target that holds a plain reference to the page at `address`. Returns its reading end.
static long refer_to(u64 address) {
    int *ends = argument(it, 0);
    expect_is(call(it, 0, SYS_pipe2, (u64)ends, 0), 0);
    int reading = ends[0], writing = ends[1];
    struct iovec *page = argument(it, 0);
    *page = (struct iovec){ (void *)address, PAGE };
    expect_is(call(it, 0, SYS_vmsplice, (u64)writing, (u64)page, 1, 0), PAGE);
    return reading;
}

// Danger: only counted pins (FOLL_PIN) stop a move, plain references (FOLL_GET) do not. A device that writes through one
// writes to a page that is not the target's any more. The kernel's own reclaim notices such references.
FACT(move_takes_pages_that_are_referred_to) {
    begin();
    u64 memory = managed(2, 7);
    long reading = refer_to(memory);
    expect_is(capture(memory, 1, 0), 0);
    expect_is(copy(uffd.fd, memory, page_of(1), 1), 0);
    expect_is(call(it, 0, SYS_read, (u64)reading, (u64)argument(it, 0), 8), 8);
    expect_is(*(u64 *)argument(it, 0), word_of(7, 0, 0));
}

static u64 huge_page(u64 seed) {
    u64 around = map(it, 1024), memory = (around + 0x1fffff) & ~0x1ffffful;
    if (call(it, 0, SYS_madvise, memory, 512 * PAGE, MADV_HUGEPAGE) < 0) skip("this kernel has no huge pages");
    fill(it, memory, 512, seed);
    char path[64], line[256];
    unsigned long start, end, kib = 0;
    bool inside = false;
    snprintf(path, sizeof path, "/proc/%d/smaps", it->pid);
    FILE *smaps = fopen(path, "re");
    while (smaps && fgets(line, sizeof line, smaps)) {
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2 && strchr(line, '-') < strchr(line, ' ')) inside = start == memory;
        else if (inside) sscanf(line, "AnonHugePages: %lu", &kib);
    }
    if (smaps) fclose(smaps);
    if (kib != 2048) skip("no huge page is to be had now");
    return memory;
}

FACT(move_splits_huge_pages) {
    begin();
    u64 memory = huge_page(7);
    expect_is(reg(uffd.fd, memory, 512), 0);
    evict(memory, 16);
    expect_is(present_pages(it, memory, 512), 496);
    expect_is(wrong_words(it, staging, 16, 7), 0);
    expect_is(load(it, 0, memory + 16 * PAGE), word_of(7, 16, 0));
}

// A huge page that something refers to cannot be split; the answer comes at once and not when the reference is gone.
FACT(move_gives_up_on_referred_huge_pages) {
    begin();
    u64 memory = huge_page(7);
    expect_is(reg(uffd.fd, memory, 512), 0);
    refer_to(memory);
    expect_is(reg(uffd.fd, staging, 1), 0);
    struct uffdio_move *argument_ = argument(it, 1);
    *argument_ = (struct uffdio_move){ staging, memory + PAGE, PAGE, ALLOW_HOLES, 0 };
    tell(it, 1, ORDER_CALL(SYS_ioctl, (u64)uffd.there, UFFDIO_MOVE, (u64)argument_));
    if (!answered_within(it, 1, 1000)) fail("it spins in the kernel until the reference is gone");
    expect_is(answer_of(it, 1).value, -EBUSY);
    expect_is(wrong_words(it, memory, 1, 7), 0);
}

FACT(collapsing_fills_no_holes) {
    begin();
    u64 memory = huge_page(7);
    expect_is(reg(uffd.fd, memory, 512), 0);
    evict(memory + 3 * PAGE, 2);
    expect(call(it, 0, SYS_madvise, memory, 512 * PAGE, MADV_COLLAPSE) < 0);
    expect_is(present_pages(it, memory, 512), 510);
    expect(is_quiet(uffd.fd));
    // With every page there it works, and each page can be moved again.
    expect_is(copy(uffd.fd, memory + 3 * PAGE, page_of(9), 2), 0);
    expect_is(call(it, 0, SYS_madvise, memory, 512 * PAGE, MADV_COLLAPSE), 0);
    evict(memory, 16);
    expect_is(load(it, 0, staging + 3 * PAGE), 9);
}

#ifndef PR_SET_MEMORY_MERGE
#define PR_SET_MEMORY_MERGE 67
#define PR_GET_MEMORY_MERGE 68
#endif

static const char *const KSM = "/sys/kernel/mm/ksm/";
static long ksm_before[3];
static const char *const KSM_KNOBS[] = { "run", "pages_to_scan", "sleep_millisecs" };

static long ksm(const char *knob, long value) {
    char path[64];
    long before = -1;
    snprintf(path, sizeof path, "%s%s", KSM, knob);
    FILE *file = fopen(path, "r+e");
    if (!file) return -1;
    if (fscanf(file, "%ld", &before) != 1) before = -1;
    rewind(file);
    if (value >= 0) fprintf(file, "%ld\n", value);
    fclose(file);
    return before;
}
static void restore_ksm(void) {
    for (int i = 0; i < 3; i++) ksm(KSM_KNOBS[i], ksm_before[i]);
}

static long merged_pages(void) {
    char path[64];
    long pages = 0;
    snprintf(path, sizeof path, "/proc/%d/ksm_merging_pages", it->pid);
    FILE *file = fopen(path, "re");
    if (!file || fscanf(file, "%ld", &pages) != 1) skip("%s: %m", path);
    fclose(file);
    return pages;
}

// Equal pages in the target, merged by the kernel, whose thread is at rest again; `ask` is what the target does for it.
static u64 merged(void (*ask)(u64 memory)) {
    u64 memory = map(it, 16);
    for (u64 i = 0; i < 16; i++) store(it, 0, memory + i * PAGE, 77);
    ask(memory);
    expect_is(reg(uffd.fd, memory, 16), 0);
    for (int i = 0; i < 3; i++)
        if ((ksm_before[i] = ksm(KSM_KNOBS[i], -1)) < 0) skip("no right to let the kernel merge pages");
    atexit(restore_ksm);
    ksm("pages_to_scan", 10000), ksm("sleep_millisecs", 5), ksm("run", 1);
    for (double until = now() + 3; merged_pages() < 15; pause_ms(10))
        if (now() > until) skip("the kernel did not merge the pages in time");
    ksm("run", 0);
    return memory;
}

static void ask_for_mapping(u64 memory) {
    if (call(it, 0, SYS_madvise, memory, 16 * PAGE, MADV_MERGEABLE) < 0) skip("this kernel merges no pages");
}

static void ask_for_process(u64 memory) {
    (void)memory;
    if (call(it, 0, SYS_prctl, PR_SET_MEMORY_MERGE, 1) < 0) skip("this kernel merges no processes");
}

FACT(move_refuses_merged_pages) {
    begin();
    u64 memory = merged(ask_for_mapping);
    expect_is(capture(memory, 1, 0), -EBUSY);
    expect_is(call(it, 1, SYS_madvise, memory, PAGE, MADV_POPULATE_WRITE), 0);
    expect_is(capture(memory, 1, 0), 0);
    expect_is(load(it, 0, staging), 77);
}

FACT(a_process_is_merged_as_a_whole) {
    begin();
    expect_is(call(it, 0, SYS_prctl, PR_GET_MEMORY_MERGE), 0);
    // Registered memory is merged, too, and nothing is told of it.
    u64 memory = merged(ask_for_process);
    expect_is(call(it, 0, SYS_prctl, PR_GET_MEMORY_MERGE), 1);
    expect(is_quiet(uffd.fd));
    // Copies of its own keep their bytes, and those that stay merged keep theirs.
    expect_is(call(it, 1, SYS_madvise, memory, 4 * PAGE, MADV_POPULATE_WRITE), 0);
    expect_is(capture(memory, 4, 0), 0);
    expect_is(capture(memory + 4 * PAGE, 1, 4), -EBUSY);
    expect_is(load(it, 0, memory + 4 * PAGE), 77);
    // When it is taken back, what was merged is the target's own again.
    expect_is(call(it, 0, SYS_prctl, PR_SET_MEMORY_MERGE, 0), 0);
    expect_is(call(it, 0, SYS_prctl, PR_GET_MEMORY_MERGE), 0);
    expect_is(capture(memory + 4 * PAGE, 12, 4), 0);
    for (u64 i = 0; i < 16; i++) expect_is(load(it, 0, staging + i * PAGE), 77);
}

FACT(children_are_merged_like_their_parents) {
    begin();
    managed(1, 7);
    ask_for_process(0);
    struct target *child = fork_it();
    expect_is(call(child, 0, SYS_prctl, PR_GET_MEMORY_MERGE), 1);
    expect_is(call(child, 0, SYS_prctl, PR_SET_MEMORY_MERGE, 0), 0);
    expect_is(call(it, 0, SYS_prctl, PR_GET_MEMORY_MERGE), 1);
}

// Why pages leave through the userfaultfd that carries the target's events: while one of them is unread, the kernel
// refuses; through any other it would take pages of a mapping that the pager has never heard of.
FACT(move_waits_for_events_to_be_read) {
    begin();
    struct uffd other = open_uffd(it, 0);
    u64 memory = managed(4, 7), elsewhere = managed(1, 8);
    expect_is(reg(uffd.fd, staging, 1), 0);
    expect_is(reg(other.fd, staging + PAGE, 1), 0);
    tell(it, 0, ORDER_CALL(SYS_munmap, memory, 4 * PAGE));
    while (!answered_within(it, 0, 5) && has_flag(it, memory, "um") >= 0) pause_ms(1);
    // Another thread maps the same addresses meanwhile.
    expect_is(call(it, 2, SYS_mmap, memory, 4 * PAGE, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, (u64)-1, 0), memory);
    store(it, 2, memory, 42);
    expect_is(move(it, 1, uffd.there, staging, memory, 1, 0), -EAGAIN);
    expect(moved <= 0);
    expect_is(move(it, 1, uffd.there, staging, elsewhere, 1, 0), -EAGAIN);
    // Registering is not refused, so a table must not learn of a mapping before it has heard of what went before.
    expect_is(reg(uffd.fd, memory, 4), 0);
    expect_is(move(it, 1, other.there, staging + PAGE, memory, 1, 0), 0);
    expect_is(load(it, 2, staging + PAGE), 42);
    expect_message(uffd.fd, UNMAP, memory, memory + 4 * PAGE, 0);
    expect_is(answer_of(it, 0).value, 0);
    expect_is(move(it, 1, uffd.there, staging, elsewhere, 1, 0), 0);
}

FACT(dropping_unregistered_staging_raises_no_event) {
    begin();
    u64 memory = managed(4, 7);
    expect_is(capture(memory, 4, 0), 0);
    expect_is(call(it, 1, SYS_madvise, staging, STAGING_PAGES * PAGE, MADV_DONTNEED), 0);
    expect(is_quiet(uffd.fd));
    // Registered, it does, and the agent waits for the pager to read it.
    expect_is(reg(uffd.fd, staging, 4), 0);
    tell(it, 1, ORDER_CALL(SYS_madvise, staging, 4 * PAGE, MADV_DONTNEED));
    expect(!answered_within(it, 1, 50));
    expect_message(uffd.fd, REMOVE, staging, staging + 4 * PAGE, 0);
    expect_is(answer_of(it, 1).value, 0);
}

FACT(a_hole_in_unregistered_staging_reads_as_zeros) {
    begin();
    u64 word = 5;
    struct iovec here = { &word, 8 }, there = { (void *)staging, 8 };
    expect_is(process_vm_readv(it->pid, &here, 1, &there, 1, 0), 8);
    expect_is(word, 0);
    // Registered, the reader waits like a thread of the target, and its id is in the fault.
    expect_is(reg(uffd.fd, staging + PAGE, 1), 0);
    there.iov_base = (void *)(staging + PAGE);
    pid_t reader = fork();
    if (reader == 0) _exit(process_vm_readv(it->pid, &here, 1, &there, 1, 0) == 8 && word == 6 ? 0 : 1);
    struct message fault = next_message(uffd.fd, FAULT);
    expect_is((uint32_t)fault.c, reader);
    expect_is(waitpid(reader, NULL, WNOHANG), 0);
    expect_is(copy(uffd.fd, staging + PAGE, page_of(6), 1), 0);
    int status = 1;
    expect_is(waitpid(reader, &status, 0), reader);
    expect_is(status, 0);
}
