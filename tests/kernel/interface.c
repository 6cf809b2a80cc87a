// Reaching a target's memory from outside: numbers, features, rights, whose registration counts.
#include "kernel.h"
#include <linux/capability.h>

#define IO(direction, number, structure) ((u64)(direction) << 30 | sizeof(structure) << 16 | 0xaa << 8 | (number))

FACT(ioctl_numbers_follow_from_sizes) {
    expect(IO(3, 0x3f, struct uffdio_api) == UFFDIO_API && sizeof(struct uffdio_api) == 0x18);
    expect(IO(3, 0, struct uffdio_register) == UFFDIO_REGISTER && sizeof(struct uffdio_register) == 0x20);
    expect(IO(2, 1, struct uffdio_range) == UFFDIO_UNREGISTER && sizeof(struct uffdio_range) == 0x10);
    expect(IO(2, 2, struct uffdio_range) == UFFDIO_WAKE);
    expect(IO(3, 3, struct uffdio_copy) == UFFDIO_COPY && sizeof(struct uffdio_copy) == 0x28);
    expect(IO(3, 4, struct uffdio_fill) == UFFDIO_ZEROPAGE && sizeof(struct uffdio_fill) == 0x20);
    expect(IO(3, 5, struct uffdio_move) == UFFDIO_MOVE && sizeof(struct uffdio_move) == 0x28);
    expect(IO(3, 8, struct uffdio_fill) == UFFDIO_POISON);
    // And the kernel agrees: a call that it knows complains of its arguments, not of its number.
    begin();
    expect_is(zeros(uffd.fd, staging, 1), -ENOENT);
    expect_is(poison(uffd.fd, staging, 1), -ENOENT);
    expect_is(copy(uffd.fd, staging, page_of(1), 1), -ENOENT);
    expect_is(raw(ioctl(uffd.fd, 0xc028aa0f, page_of(1))), -EINVAL);
}

FACT(features_are_offered) {
    it = start_target();
    int there = (int)call(it, 0, SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK), fd = (int)take_fd(it, there);
    struct uffdio_api api = { 0xaa, 0, 0 };
    expect_is(raw(ioctl(fd, UFFDIO_API, &api)), 0);
    expect((api.features & FEATURES) == FEATURES);
    expect_is(api.ioctls, 1ul << 0x3f | 1 << 1 | 1 << 0);
    // The agreement is made once.
    expect_is(raw(ioctl(fd, UFFDIO_API, &api)), -EINVAL);
    fd = (int)take_fd(it, (int)call(it, 0, SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK));
    api = (struct uffdio_api){ 0xaa, 1ul << 40, 0 };
    expect_is(raw(ioctl(fd, UFFDIO_API, &api)), -EINVAL);
}

FACT(serving_works_from_another_process) {
    begin();
    u64 memory = map(it, 8);
    expect_is(reg(uffd.fd, memory, 8), 0);
    expect(is_registered(it, memory));
    tell(it, 2, ORDER_LOAD(memory));
    struct message fault = next_message(uffd.fd, FAULT);
    expect_is(fault.b, memory);
    expect_is((uint32_t)fault.c, it->tids[2]);
    expect_is(copy(uffd.fd, memory, page_of(5), 1), 0);
    expect_is(answer_of(it, 2).value, 5);
    tell(it, 2, ORDER_STORE(memory + PAGE, 6));
    fault = next_message(uffd.fd, FAULT);
    expect_is(fault.a & 1, 1);
    expect_is(zeros(uffd.fd, memory + PAGE, 1), 0);
    answer_of(it, 2);
    expect_is(load(it, 2, memory + PAGE), 6);
    tell(it, 2, ORDER_LOAD(memory + 2 * PAGE));
    next_message(uffd.fd, FAULT);
    expect_is(poison(uffd.fd, memory + 2 * PAGE, 1), 0);
    expect_is(answer_of(it, 2).signal, SIGBUS);
    tell(it, 2, ORDER_LOAD(memory + 3 * PAGE));
    next_message(uffd.fd, FAULT);
    expect_is(unreg(uffd.fd, memory, 8), 0);
    expect_is(answer_of(it, 2).value, 0);
    expect(!is_registered(it, memory));
}

FACT(move_from_outside_is_refused) {
    begin();
    u64 memory = managed(1, 1);
    expect_is(reg(uffd.fd, staging, 1), 0);
    struct uffdio_move argument_ = { staging, memory, PAGE, 0, 0 };
    expect_is(raw(ioctl(uffd.fd, UFFDIO_MOVE, &argument_)), -EINVAL);
    expect_is(move(it, 1, uffd.there, staging, memory, 1, 0), 0);
}

static long advise_from_outside(u64 address, u64 pages, int advice) {
    struct iovec range = { (void *)address, pages * PAGE };
    return raw(syscall(NR_process_madvise, it->pidfd, &range, 1, advice, 0));
}

FACT(removal_from_outside_is_refused) {
    begin();
    u64 memory = managed(4, 1);
    int refused[] = { MADV_DONTNEED, MADV_FREE, MADV_DONTNEED_LOCKED, MADV_POPULATE_WRITE, MADV_GUARD_INSTALL, MADV_MERGEABLE };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) expect_is(advise_from_outside(memory, 4, refused[i]), -EINVAL);
    expect_is(wrong_words(it, memory, 4, 1), 0);
}

FACT(hints_raise_no_event) {
    begin();
    u64 memory = managed(4, 1);
    int hints[] = { MADV_COLD, MADV_PAGEOUT, MADV_WILLNEED };
    for (size_t i = 0; i < sizeof hints / sizeof *hints; i++) {
        expect_is(advise_from_outside(memory, 4, hints[i]), 4 * PAGE);
        expect_is(call(it, 0, SYS_madvise, memory, 4 * PAGE, (u64)hints[i]), 0);
    }
    expect(is_quiet(uffd.fd));
    expect_is(wrong_words(it, memory, 4, 1), 0);
    // And what is missing stays missing.
    evict(memory, 1);
    for (size_t i = 0; i < sizeof hints / sizeof *hints; i++) expect_is(call(it, 0, SYS_madvise, memory, 4 * PAGE, (u64)hints[i]), 0);
    expect(!is_present(it, memory) && is_quiet(uffd.fd));
}

FACT(registering_again_changes_nothing) {
    begin();
    u64 memory = managed(8, 1);
    evict(memory, 2);
    tell(it, 2, ORDER_LOAD(memory));
    next_message(uffd.fd, FAULT);
    expect_is(reg(uffd.fd, memory, 8), 0);
    expect_is(reg(uffd.fd, memory + 2 * PAGE, 3), 0);
    expect(!answered_within(it, 2, 50));
    expect_is(copy(uffd.fd, memory, page_of(3), 1), 0);
    expect_is(answer_of(it, 2).value, 3);
    expect_is(present_pages(it, memory, 8), 7);
}

FACT(a_mapping_has_one_userfaultfd) {
    begin();
    struct uffd other = open_uffd(it, 0);
    u64 ours = managed(2, 1), theirs = map(it, 2);
    expect_is(reg(other.fd, theirs, 2), 0);
    expect_is(reg(other.fd, ours, 2), -EBUSY);
    expect_is(reg(uffd.fd, theirs, 2), -EBUSY);
}

FACT(another_userfaultfd_cannot_unregister) {
    begin();
    struct uffd other = open_uffd(it, 0);
    u64 memory = managed(2, 1);
    evict(memory, 1);
    long answer = unreg(other.fd, memory, 2);
    if (answer == 0) skip("this kernel lets any userfaultfd of the process unregister any other's memory");
    expect_is(answer, -EINVAL);
    expect(is_registered(it, memory));
}

FACT(another_userfaultfd_can_fill) {
    begin();
    struct uffd other = open_uffd(it, 0);
    u64 memory = managed(2, 1);
    evict(memory, 1);
    tell(it, 2, ORDER_LOAD(memory));
    next_message(uffd.fd, FAULT);
    expect_is(copy(other.fd, memory, page_of(9), 1), 0);
    // It wakes its own waiters only.
    expect(!answered_within(it, 2, 50));
    expect_is(wake(uffd.fd, memory, 1), 0);
    expect_is(answer_of(it, 2).value, 9);
}

FACT(what_cannot_be_registered) {
    begin();
    long droppable = call(it, 0, SYS_mmap, 0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_DROPPABLE | MAP_ANONYMOUS, (u64)-1, 0);
    if (droppable > 0) expect_is(reg(uffd.fd, (u64)droppable, 4), -EINVAL);
    long file = call(it, 0, SYS_open, (u64)strcpy(argument(it, 0), "/proc/self/exe"), O_RDONLY);
    long mapped = call(it, 0, SYS_mmap, 0, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, (u64)file, 0);
    expect(mapped > 0);
    expect_is(reg(uffd.fd, (u64)mapped, 1), -EINVAL);
    u64 hole = map(it, 4);
    expect_is(call(it, 0, SYS_munmap, hole, 4 * PAGE), 0);
    expect_is(reg(uffd.fd, hole, 4), -EINVAL);
    // Without any access it can be: an allocator's reserve; and it stays so when it becomes writable.
    u64 reserve = map_at(it, 0, 4, PROT_NONE, 0);
    expect_is(reg(uffd.fd, reserve, 4), 0);
    expect_is(call(it, 0, SYS_mprotect, reserve, 4 * PAGE, PROT_READ | PROT_WRITE), 0);
    expect(is_registered(it, reserve));
    expect_is(call(it, 0, SYS_mprotect, reserve + PAGE, PAGE, PROT_READ), 0);
    expect(is_registered(it, reserve + PAGE));
}

FACT(a_range_with_holes_registers_what_is_there) {
    begin();
    u64 memory = map(it, 8);
    expect_is(call(it, 0, SYS_munmap, memory + 2 * PAGE, 4 * PAGE), 0);
    expect_is(reg(uffd.fd, memory, 8), 0);
    expect(is_registered(it, memory) && is_registered(it, memory + 6 * PAGE));
    map_at(it, memory + 2 * PAGE, 4, PROT_READ | PROT_WRITE, MAP_FIXED_NOREPLACE);
    expect_is(has_flag(it, memory + 2 * PAGE, "um"), 0);
}

// mremap of `pages` from `memory` on, by one more in place.
static long grow(u64 memory, u64 pages) { return call(it, 2, SYS_mremap, memory, pages * PAGE, (pages + 1) * PAGE, 0); }

FACT(registering_a_part_makes_two_mappings) {
    begin();
    u64 memory = map(it, 16);
    expect_is(call(it, 0, SYS_munmap, memory + 8 * PAGE, 8 * PAGE), 0);
    fill(it, memory, 8, 7);
    expect_is(reg(uffd.fd, memory, 4), 0);
    expect_is(grow(memory, 8), -EFAULT);
    expect_is(reg(uffd.fd, memory, 8), 0);
    expect_is(grow(memory, 8), memory);
    expect_is(unreg(uffd.fd, memory, 4), 0);
    expect_is(grow(memory, 9), -EFAULT);
    // A call that reaches into the free space behind takes what has grown by now.
    expect_is(unreg(uffd.fd, memory, 12), 0);
    expect_is(grow(memory, 9), memory);
    expect_is(reg(uffd.fd, memory, 12), 0);
    expect(is_registered(it, memory) && is_registered(it, memory + 9 * PAGE));
    expect_is(grow(memory, 10), memory);
}

FACT(a_process_outlives_its_first_thread) {
    begin();
    u64 memory = managed(2, 7);
    int thread = (int)raw(syscall(NR_pidfd_open, it->tids[2], O_EXCL /* PIDFD_THREAD */));
    tell(it, 0, (struct order){ QUIT, 0, { 0 } });
    expect(!answered_within(it, 0, 50));
    // Its number has nothing behind it any more; a thread's has.
    char path[64], line[16];
    u64 word = 0;
    struct iovec ours = { &word, sizeof word }, theirs = { (void *)memory, sizeof word };
    for (int first = 1; first >= 0; first--) {
        pid_t id = first ? it->pid : it->tids[2];
        snprintf(path, sizeof path, "/proc/%d/maps", id);
        FILE *maps = fopen(path, "re");
        expect(maps && (fgets(line, sizeof line, maps) == NULL) == first);
        fclose(maps);
        expect_is(raw(process_vm_readv(id, &ours, 1, &theirs, 1, 0)), first ? -ESRCH : (long)sizeof word);
    }
    expect_is(word, word_of(7, 0, 0));
    expect(raw(syscall(NR_pidfd_getfd, it->pidfd, uffd.there, 0)) < 0);
    expect_is(raw(waitpid(it->pid, NULL, WNOHANG)), 0);
    if (thread == -EINVAL) skip("a descriptor of a thread needs Linux 6.9");
    expect(raw(syscall(NR_pidfd_getfd, thread, uffd.there, 0)) >= 0);
    // And it ends with the last one.
    for (int at = THREADS - 1; at > 1; at--) tell(it, at, (struct order){ QUIT, 0, { 0 } });
    pause_ms(20);
    tell(it, 1, ORDER_CALL(SYS_exit, 7));
    int status = 0;
    expect_is(waitpid(it->pid, &status, 0), it->pid);
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 7);
}

FACT(a_dead_address_space_says_so) {
    begin();
    expect_is(zeros(uffd.fd, 0, 1), -ENOENT);
    kill(it->pid, SIGKILL);
    expect_is(waitpid(it->pid, NULL, 0), it->pid);
    expect_is(zeros(uffd.fd, 0, 1), -ESRCH);
    expect_is(copy(uffd.fd, staging, page_of(1), 1), -ESRCH);
}

// Runs in a process that gave up its rights: uid 65534, no capabilities.
static int without_rights(int (*what)(void)) {
    pid_t pid = fork();
    if (pid == 0) {
        if (setresuid(65534, 65534, 65534)) _exit(99);
        _exit(what());
    }
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int device;
static int ask_for_forks(void) {
    int fd = ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
    struct uffdio_api api = { 0xaa, FEATURES, 0 };
    return fd < 0 ? 98 : ioctl(fd, UFFDIO_API, &api) ? errno : 0;
}
static int ask_without_forks(void) {
    int fd = ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
    struct uffdio_api api = { 0xaa, FEATURES & ~FEATURE_FORK, 0 };
    return fd < 0 ? 98 : ioctl(fd, UFFDIO_API, &api) ? errno : 0;
}

// An open /dev/userfaultfd gives a userfaultfd that serves faults in system calls, whoever holds it; fork events are
// for whoever agrees on them with CAP_SYS_PTRACE.
FACT(rights_are_those_of_who_agrees) {
    device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
    if (device < 0) skip("/dev/userfaultfd: %m");
    expect_is(without_rights(ask_without_forks), 0);
    expect_is(without_rights(ask_for_forks), EPERM);
}

struct scan { u64 size, flags, start, end, walk_end, vector, vector_len, pages_max, inverted, all_of, any_of, returned; };
struct found { u64 start, end, categories; };

FACT(a_scan_finds_what_is_resident) {
    begin();
    u64 memory = managed(16, 1);
    evict(memory + 4 * PAGE, 2);
    expect_is(zeros(uffd.fd, memory + 5 * PAGE, 1), 0);
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/pagemap", it->pid);
    int pagemap = open(path, O_RDONLY | O_CLOEXEC);
    struct found found[8];
    struct scan scan = { sizeof scan, 0, memory, memory + 16 * PAGE, 0, (u64)found, 8, 0, 0, 0, 1 << 3 | 1 << 4, 1 << 3 | 1 << 4 };
    expect_is(raw(ioctl(pagemap, 0xc0606610, &scan)), 2);
    expect_is(scan.walk_end, memory + 16 * PAGE);
    expect(found[0].start == memory && found[0].end == memory + 4 * PAGE);
    // The page of zeros at 5 counts as resident.
    expect(found[1].start == memory + 5 * PAGE && found[1].end == memory + 16 * PAGE);
    // A guard marker looks like a page in the kernel's swap.
    if (call(it, 0, SYS_madvise, memory + 9 * PAGE, PAGE, MADV_GUARD_INSTALL) < 0) return;
    scan.start = memory, scan.any_of = scan.returned = 1 << 4;
    expect_is(raw(ioctl(pagemap, 0xc0606610, &scan)), 1);
    expect(found[0].start == memory + 9 * PAGE && found[0].end == memory + 10 * PAGE);
}

// struct procmap_query
struct query { u64 size, flags, at, start, end, vma_flags, page_size, offset, inode; unsigned device[2], name_size, build_id_size; u64 name, build_id; };

FACT(a_query_tells_of_one_mapping_as_it_is) {
    begin();
    u64 memory = map(it, 16);
    expect_is(call(it, 0, SYS_munmap, memory + 8 * PAGE, 4 * PAGE), 0);
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/maps", it->pid);
    int maps = open(path, O_RDONLY | O_CLOEXEC);
    struct query query = { .size = sizeof query, .flags = 0x10 /* COVERING_OR_NEXT_VMA */, .at = memory + 9 * PAGE };
    if (raw(ioctl(maps, 0xc0686611, &query)) == -ENOTTY) skip("PROCMAP_QUERY needs Linux 6.11");
    expect(query.start == memory + 12 * PAGE && query.inode == 0 && query.vma_flags == 3);
    // What a registration has made of a mapping shows at once.
    expect_is(reg(uffd.fd, memory, 4), 0);
    query.at = memory;
    expect_is(raw(ioctl(maps, 0xc0686611, &query)), 0);
    expect(query.start == memory && query.end == memory + 4 * PAGE);
    expect_is(reg(uffd.fd, memory, 8), 0);
    expect_is(raw(ioctl(maps, 0xc0686611, &query)), 0);
    expect(query.start == memory && query.end == memory + 8 * PAGE);
    query.at = 0x7fffffffe000;
    expect_is(raw(ioctl(maps, 0xc0686611, &query)), -ENOENT);
}

FACT(sealed_memory_pages_like_any_other) {
    begin();
    u64 memory = map(it, 4);
    fill(it, memory, 4, 1);
    if (call(it, 0, NR_mseal, memory, 4 * PAGE, 0) == -ENOSYS) skip("mseal needs Linux 6.10");
    expect_is(reg(uffd.fd, memory, 4), 0);
    evict(memory, 2);
    tell(it, 2, ORDER_LOAD(memory));
    next_message(uffd.fd, FAULT);
    expect_is(copy(uffd.fd, memory, page_of(4), 1), 0);
    expect_is(answer_of(it, 2).value, 4);
    expect_is(unreg(uffd.fd, memory, 4), 0);
    expect_is(call(it, 0, SYS_munmap, memory, 4 * PAGE), -EPERM);
}
