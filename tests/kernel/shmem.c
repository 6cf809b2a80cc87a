// Shared memory (memfd): how its pages could be taken from outside, and who would read zeros without a word.
#include "kernel.h"

struct uffdio_writeprotect { struct uffdio_range range; u64 mode; };
#define UFFDIO_WRITEPROTECT 0xc018aa06ul
enum { REGISTER_BOTH = 3, PROTECT = 1, FAULT_WRITES = 1, FAULT_PROTECTED = 2 };

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
    uffd = open_uffd(it, FEATURES);
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

// Cloud Hypervisor's hand-off, as proposed: nothing is told, and no fault of a protected page was asked to say so.
FACT(sealed_shared_memory_pages_like_any_other) {
    u64 memory = shared(4);
    expect_is(raw(ioctl(uffd.fd, UFFDIO_UNREGISTER, &(struct uffdio_range){ memory, 4 * PAGE })), 0);
    int few = open_uffd(it, 1 << 5 | 1 << 12).fd;
    expect_is(reg_both(few, memory, 4), 0);
    if (call(it, 0, NR_mseal, memory, 4 * PAGE, 0) == -ENOSYS) skip("mseal needs Linux 6.10");
    expect_is(call(it, 0, SYS_munmap, memory, 4 * PAGE), -EPERM);
    expect_is(reg_both(few, memory, 4), 0);
    expect_is(protect(few, memory, 4, PROTECT), 0);
    tell(it, 2, ORDER_STORE(memory, 7));
    struct message fault = next_message(few, FAULT);
    expect((fault.a & FAULT_PROTECTED) && fault.b == memory);
    u64 taken;
    expect_is(raw(pread(file, &taken, sizeof taken, 0)), sizeof taken);
    expect_is(punch(0, 4), 0);
    expect_is(protect(few, memory, 4, 0), 0);
    fault = next_message(few, FAULT);
    expect_is(fault.a & FAULT_PROTECTED, 0);
    expect_is(copy(few, memory, page_of(taken), 1), 0);
    answer_of(it, 2);
    expect_is(load(it, 1, memory), 7);
    expect_is(poison(few, memory + PAGE, 1), 0);
    expect_is(raw(ioctl(few, UFFDIO_UNREGISTER, &(struct uffdio_range){ memory, 4 * PAGE })), 0);
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

// A mapping of the file in this process, registered with a userfaultfd of this process's own.
static char *home(u64 pages, int *own) {
    *own = raw(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK));
    struct uffdio_api api = { 0xaa, FEATURES_SHARED, 0 };
    expect_is(raw(ioctl(*own, UFFDIO_API, &api)), 0);
    char *there = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    expect_is(reg(*own, (u64)there, pages), 0);
    return there;
}

FACT(what_is_installed_through_one_mapping_is_there_for_all) {
    int own;
    u64 memory = shared(4), content = 42;
    char *ours = home(4, &own);
    expect_is(punch(0, 4), 0);
    tell(it, 1, ORDER_LOAD(memory + PAGE));
    expect_is(next_message(uffd.fd, FAULT).b, memory + PAGE);
    // Here it is copied to another process's mapping, which wakes nobody in the target,
    expect_is(copy(own, (u64)ours + PAGE, page_of(content), 1), 0);
    expect(!answered_within(it, 1, 50));
    // and is found where it waits once it is woken.
    expect_is(wake(uffd.fd, memory + PAGE, 1), 0);
    expect_is(answer_of(it, 1).value, 42);
    expect_is(copy(own, (u64)ours + PAGE, page_of(content), 1), -EEXIST);
    // What is punched leaves that mapping as well.
    expect_is(punch(1, 1), 0);
    expect_is(copy(own, (u64)ours + PAGE, page_of(content), 1), 0);
}

FACT(protection_comes_before_the_page) {
    u64 memory = shared(4);
    // Pages that the file has and the mapping does not show yet.
    tell(it, 1, ORDER_CALL(SYS_madvise, memory, 4 * PAGE, MADV_DONTNEED));
    next_message(uffd.fd, REMOVE);
    answer_of(it, 1);
    expect_is(protect(uffd.fd, memory, 4, PROTECT), 0);
    tell(it, 1, ORDER_STORE(memory + PAGE, 5));
    struct message fault = next_message(uffd.fd, FAULT);
    expect((fault.a & FAULT_PROTECTED) && fault.b == memory + PAGE);
    expect(!answered_within(it, 1, 50));
    expect_is(protect(uffd.fd, memory, 4, 0), 0);
    answer_of(it, 1);
    expect_is(load(it, 1, memory + PAGE), 5);
}

FACT(protection_waits_for_changes_to_be_heard_of) {
    u64 memory = shared(4);
    tell(it, 1, ORDER_CALL(SYS_munmap, memory + 3 * PAGE, PAGE));
    while (protect(uffd.fd, memory, 4, PROTECT) == 0) pause_ms(1);
    expect_is(protect(uffd.fd, memory, 1, PROTECT), -EAGAIN);
    expect_message(uffd.fd, UNMAP, memory + 3 * PAGE, memory + 4 * PAGE, 0);
    answer_of(it, 1);
    // What is not mapped any more is passed over; where nothing is, that is said.
    expect_is(protect(uffd.fd, memory, 4, PROTECT), 0);
    expect_is(protect(uffd.fd, memory + 3 * PAGE, 1, PROTECT), -ENOENT);
}

// What /proc says of how many faults of `fd` are not read yet.
static int faults_unread(int fd) {
    char path[64], line[128];
    int pending = -1;
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
    FILE *about = fopen(path, "r");
    while (about && fgets(line, sizeof line, about)) sscanf(line, "pending: %d", &pending);
    fclose(about);
    return pending;
}

FACT(a_userfaultfd_tells_how_many_faults_wait) {
    u64 memory = shared(4);
    expect_is(punch(0, 4), 0);
    expect_is(faults_unread(uffd.fd), 0);
    for (int i = 1; i <= 2; i++) tell(it, i, ORDER_LOAD(memory + (u64)i * PAGE));
    while (faults_unread(uffd.fd) < 2) pause_ms(1);
    // A change that waits is not counted, and is read after the faults.
    tell(it, 3, ORDER_CALL(SYS_madvise, memory, PAGE, MADV_DONTNEED));
    pause_ms(20);
    expect_is(faults_unread(uffd.fd), 2);
    next_message(uffd.fd, FAULT), next_message(uffd.fd, FAULT);
    expect_is(faults_unread(uffd.fd), 0);
    next_message(uffd.fd, REMOVE);
    answer_of(it, 3);
    expect_is(copy(uffd.fd, memory + PAGE, page_of(1), 1), 0);
    expect_is(copy(uffd.fd, memory + 2 * PAGE, page_of(1), 1), 0);
    for (int i = 1; i <= 2; i++) answer_of(it, i);
}

// Danger: who makes holes on the thread that serves faults waits for itself.
FACT(who_writes_holds_the_files_lock_while_it_waits) {
    u64 memory = shared(4), source = map(it, 1);
    expect_is(reg(uffd.fd, source, 1), 0);
    tell(it, 1, ORDER_CALL(SYS_pwrite64, (u64)file_there, source, PAGE, 0));
    expect_is(next_message(uffd.fd, FAULT).b, source);
    tell(it, 2, ORDER_CALL(SYS_fallocate, (u64)file_there, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, PAGE, PAGE));
    tell(it, 3, ORDER_CALL(SYS_lseek, (u64)file_there, 0, SEEK_DATA));
    expect(!answered_within(it, 2, 50) && !answered_within(it, 3, 50));
    // Reading and installing go on.
    u64 seen;
    expect_is(raw(pread(file, &seen, sizeof seen, 2 * PAGE)), sizeof seen);
    expect_is(copy(uffd.fd, memory + 2 * PAGE, page_of(7), 1), -EEXIST);
    expect_is(copy(uffd.fd, source, page_of(7), 1), 0);
    expect_is(answer_of(it, 1).value, PAGE);
    expect_is(answer_of(it, 2).value, 0);
    answer_of(it, 3);
}

FACT(who_is_not_heard_of_yet_shows_what_it_is_at) {
    u64 memory = shared(4);
    long advices[] = { MADV_REMOVE, MADV_DONTNEED };
    for (int i = 0; i < 2; i++) {
        tell(it, 1, ORDER_CALL(SYS_madvise, memory + PAGE, 2 * PAGE, (u64)advices[i]));
        char path[64], line[256] = "", wanted[128];
        snprintf(path, sizeof path, "/proc/%d/task/%d/syscall", it->pid, it->tids[1]);
        snprintf(wanted, sizeof wanted, "%d 0x%llx 0x%llx 0x%lx ", SYS_madvise, (unsigned long long)(memory + PAGE), 2ull * PAGE, advices[i]);
        struct pollfd told = { .fd = uffd.fd, .events = POLLIN };
        expect_is(poll(&told, 1, 1000), 1);
        // It may not be asleep in the very moment in which it is in the queue.
        for (int tries = 0; tries < 100 && strncmp(line, wanted, strlen(wanted)); tries++) {
            FILE *call_ = fopen(path, "r");
            expect(call_ && fgets(line, sizeof line, call_));
            fclose(call_);
        }
        expect(!strncmp(line, wanted, strlen(wanted)));
        expect_message(uffd.fd, REMOVE, memory + PAGE, memory + 3 * PAGE, 0);
        answer_of(it, 1);
    }
}
