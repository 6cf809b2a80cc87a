// Shared memory (memfd): how its pages could be taken from outside, and who would read zeros without a word.
#include "kernel.h"

struct uffdio_writeprotect { struct uffdio_range range; u64 mode; };
#define UFFDIO_WRITEPROTECT 0xc018aa06ul
enum { REGISTER_BOTH = 3, PROTECT = 1, FAULT_WRITES = 1, FAULT_PROTECTED = 2 };
enum { FEATURE_WP_SHMEM = 1 << 12 };

static int file, file_there; // in this process, and in the target

static long reg_both(int fd, u64 address, u64 pages) {
    struct uffdio_register argument_ = { { address, pages * PAGE }, REGISTER_BOTH, 0 };
    return raw(ioctl(fd, UFFDIO_REGISTER, &argument_));
}

static long protect(int fd, u64 address, u64 pages, u64 mode) {
    struct uffdio_writeprotect argument_ = { { address, pages * PAGE }, mode };
    return raw(ioctl(fd, UFFDIO_WRITEPROTECT, &argument_));
}

static long punch(u64 page, u64 pages) {
    return raw(fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(page * PAGE), (off_t)(pages * PAGE)));
}

// The scene: a target with pages of a memfd, filled and registered for missing pages and write protection.
static u64 shared(u64 pages) {
    it = start_target();
    uffd = open_uffd(it, FEATURES | FEATURE_WP_SHMEM);
    strcpy(argument(it, 0), "memory");
    file_there = (int)call(it, 0, SYS_memfd_create, (u64)argument(it, 0), MFD_CLOEXEC);
    expect_is(call(it, 0, SYS_ftruncate, (u64)file_there, pages * PAGE), 0);
    file = (int)take_fd(it, file_there);
    long mapped = call(it, 0, SYS_mmap, 0, pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, (u64)file_there, 0);
    if (mapped < 0 && mapped > -4096) fail("mmap: %s", strerror((int)-mapped));
    u64 memory = (u64)mapped;
    fill(it, memory, pages, 1);
    expect_is(reg_both(uffd.fd, memory, pages), 0);
    return memory;
}

FACT(move_refuses_shared_memory) {
    u64 memory = shared(4);
    staging = map(it, STAGING_PAGES);
    expect_is(capture(memory, 4, 0), -EINVAL);
    expect_is(wrong_words(it, memory, 4, 1), 0);
}

FACT(shared_pages_can_be_taken_from_outside) {
    u64 memory = shared(4);
    expect_is(protect(uffd.fd, memory, 4, PROTECT), 0);
    tell(it, 2, ORDER_STORE(memory, 7));
    struct message fault = next_message(uffd.fd, FAULT);
    expect((fault.a & FAULT_PROTECTED) && fault.b == memory);
    // Reads go on; what is read from the file is what there is.
    expect_is(load(it, 1, memory), word_of(1, 0, 0));
    u64 taken;
    expect_is(raw(pread(file, &taken, sizeof taken, 0)), sizeof taken);
    expect_is(taken, word_of(1, 0, 0));
    expect_is(punch(0, 4), 0);
    expect_is(wake(uffd.fd, memory, 4), 0);
    // The store is tried again, and the page is missing now.
    fault = next_message(uffd.fd, FAULT);
    expect_is(fault.a & FAULT_PROTECTED, 0);
    expect_is(copy(uffd.fd, memory, page_of(taken), 1), 0);
    answer_of(it, 2);
    expect_is(load(it, 1, memory), 7);
    expect_is(raw(pread(file, &taken, sizeof taken, 0)), sizeof taken);
    expect_is(taken, 7);
}

FACT(protection_holds_in_one_process_only) {
    u64 memory = shared(2);
    tell_fork(it, 1);
    struct message told = next_message(uffd.fd, FORK);
    struct target *child = child_of(it, 1);
    expect_is(protect(uffd.fd, memory, 2, PROTECT), 0);
    store(child, 0, memory, 9);
    expect_is(load(it, 1, memory), 9);
    expect_is(protect((int)told.a, memory, 2, PROTECT), 0);
    tell(child, 2, ORDER_STORE(memory, 10));
    expect(next_message((int)told.a, FAULT).a & FAULT_PROTECTED);
}

FACT(holes_are_zeros_to_whoever_is_not_registered) {
    u64 memory = shared(4);
    expect_is(punch(0, 4), 0);
    expect(is_quiet(uffd.fd));
    // By the file,
    u64 got = 1;
    expect_is(raw(pread(file, &got, sizeof got, 0)), sizeof got);
    expect_is(got, 0);
    // by another mapping of the same process or any other, which was made before or later,
    char *other = mmap(NULL, 4 * PAGE, PROT_READ, MAP_SHARED, file, 0);
    expect_is(*(volatile u64 *)(other + PAGE), 0);
    // which fills the hole for good: nobody is asked any more.
    expect_is(load(it, 2, memory + PAGE), 0);
    expect(is_quiet(uffd.fd));
    // And a write by the file is one of zeros around it.
    expect_is(raw(pwrite(file, &got, 1, 2 * PAGE)), 1);
    expect_is(load(it, 2, memory + 2 * PAGE), 0);
    expect(is_quiet(uffd.fd));
    // The registered mapping itself asks, where there is a hole.
    tell(it, 2, ORDER_LOAD(memory + 3 * PAGE));
    expect_is(next_message(uffd.fd, FAULT).b, memory + 3 * PAGE);
}

FACT(punching_is_not_told) {
    u64 memory = shared(4), how = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    // By the target itself, of pages that are there, and of holes: what was out before would come back to life.
    for (int i = 0; i < 2; i++) {
        expect_is(call(it, 0, SYS_fallocate, (u64)file_there, how, PAGE, 2 * PAGE), 0);
        expect(is_quiet(uffd.fd));
    }
    expect_is(wrong_words(it, memory, 1, 1), 0);
}

FACT(giving_up_a_mapping_and_its_file_is_told_alike) {
    u64 memory = shared(4), bytes = 2 * PAGE;
    // DONTNEED leaves the file as it is,
    tell(it, 1, ORDER_CALL(SYS_madvise, memory, bytes, MADV_DONTNEED));
    expect_message(uffd.fd, REMOVE, memory, memory + bytes, 0);
    answer_of(it, 1);
    expect_is(wrong_words(it, memory, 2, 1), 0);
    // and REMOVE makes holes.
    tell(it, 1, ORDER_CALL(SYS_madvise, memory, bytes, MADV_REMOVE));
    expect_message(uffd.fd, REMOVE, memory, memory + bytes, 0);
    answer_of(it, 1);
    u64 got = 1;
    expect_is(raw(pread(file, &got, sizeof got, 0)), sizeof got);
    expect_is(got, 0);
}

FACT(what_is_in_the_file_needs_no_fault) {
    u64 memory = shared(4);
    // Present in the file, and not in the page table: a scan of the mapping does not see it, nor does a touch ask.
    tell(it, 1, ORDER_CALL(SYS_madvise, memory, 4 * PAGE, MADV_DONTNEED));
    next_message(uffd.fd, REMOVE);
    answer_of(it, 1);
    expect_is(present_pages(it, memory, 4), 0);
    expect_is(wrong_words(it, memory, 4, 1), 0);
    expect(is_quiet(uffd.fd));
}
