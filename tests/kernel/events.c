// What the kernel tells a pager when a target changes its own memory; what it tells late, wrongly, or not at all.
#include "kernel.h"
#include <sys/resource.h>
#include <sys/shm.h>

// Thread 2 of the target and this process on one CPU, the thread in the idle class: woken, it does not run before we
// sleep. So what lies between an event's reading and its author's going on can be looked at.
static void hold_back_thread_2(void) {
    cpu_set_t *cpus = argument(it, 2);
    CPU_ZERO(cpus);
    CPU_SET(sched_getcpu(), cpus);
    if (sched_setaffinity(0, sizeof *cpus, cpus)) fail("sched_setaffinity: %m");
    expect_is(call(it, 2, SYS_sched_setaffinity, 0, sizeof *cpus, (u64)cpus), 0);
    memset(cpus, 0, sizeof *cpus); // struct sched_param
    expect_is(call(it, 2, SYS_sched_setscheduler, 0, SCHED_IDLE, (u64)cpus), 0);
}

FACT(removal_is_told_before_it_happens) {
    begin();
    hold_back_thread_2();
    int seen = 0;
    for (int round = 0; round < 20 && !seen; round++) {
        u64 memory = managed(1, 7);
        tell(it, 2, ORDER_CALL(SYS_madvise, memory, PAGE, MADV_DONTNEED));
        expect(!answered_within(it, 2, 20));
        expect(is_present(it, memory));
        expect_message(uffd.fd, REMOVE, memory, memory + PAGE, 0);
        // The event is read, the page is still there, and a capture now would keep bytes that are given up.
        seen = is_present(it, memory);
        expect_is(answer_of(it, 2).value, 0);
        expect(!is_present(it, memory));
    }
    expect(seen);
}

FACT(filling_is_refused_while_an_event_is_unread) {
    begin();
    hold_back_thread_2();
    u64 memory = managed(4, 7), elsewhere = managed(2, 8);
    evict(elsewhere, 2);
    int seen = 0;
    for (int round = 0; round < 20 && !seen; round++) {
        tell(it, 2, ORDER_CALL(SYS_madvise, memory, PAGE, MADV_DONTNEED));
        expect(!answered_within(it, 2, 20));
        expect_is(copy(uffd.fd, elsewhere, page_of(1), 1), -EAGAIN);
        expect(copied <= 0);
        expect_is(zeros(uffd.fd, elsewhere, 1), -EAGAIN);
        expect_is(poison(uffd.fd, elsewhere, 1), -EAGAIN);
        next_message(uffd.fd, REMOVE);
        // And on, until the thread that raised it has run: nobody is woken when that is so.
        seen = copy(uffd.fd, elsewhere, page_of(1), 1) == -EAGAIN;
        expect_is(answer_of(it, 2).value, 0);
    }
    expect(seen);
    expect_is(copy(uffd.fd, elsewhere + PAGE, page_of(1), 1), 0);
}

FACT(all_that_removes_is_told) {
    begin();
    int advice[] = { MADV_DONTNEED, MADV_DONTNEED_LOCKED, MADV_FREE };
    for (size_t i = 0; i < sizeof advice / sizeof *advice; i++) {
        u64 memory = managed(4, 7);
        tell(it, 2, ORDER_CALL(SYS_madvise, memory + PAGE, 2 * PAGE, (u64)advice[i]));
        expect_message(uffd.fd, REMOVE, memory + PAGE, memory + 3 * PAGE, 0);
        expect_is(answer_of(it, 2).value, 0);
        // MADV_FREE leaves the pages in place until the kernel wants them.
        expect_is(present_pages(it, memory, 4), advice[i] == MADV_FREE ? 4 : 2);
    }
    // One event for each mapping of the range.
    u64 memory = managed(4, 7);
    expect_is(call(it, 0, SYS_madvise, memory + 2 * PAGE, 2 * PAGE, MADV_DONTDUMP), 0);
    tell(it, 2, ORDER_CALL(SYS_madvise, memory, 4 * PAGE, MADV_DONTNEED));
    expect_message(uffd.fd, REMOVE, memory, memory + 2 * PAGE, 0);
    expect_message(uffd.fd, REMOVE, memory + 2 * PAGE, memory + 4 * PAGE, 0);
    expect_is(answer_of(it, 2).value, 0);
}

FACT(unmapping_is_told_after_it_happened) {
    begin();
    u64 memory = managed(8, 7);
    tell(it, 2, ORDER_CALL(SYS_munmap, memory + 2 * PAGE, 3 * PAGE));
    struct pollfd ready = { uffd.fd, POLLIN, 0 };
    expect_is(poll(&ready, 1, 2000), 1);
    expect_is(has_flag(it, memory + 2 * PAGE, "um"), -1);
    expect(!answered_within(it, 2, 50));
    expect_message(uffd.fd, UNMAP, memory + 2 * PAGE, memory + 5 * PAGE, 0);
    expect_is(answer_of(it, 2).value, 0);
    expect(is_registered(it, memory) && is_registered(it, memory + 5 * PAGE));
    // A new mapping in its place is one of these too.
    tell(it, 2, ORDER_CALL(SYS_mmap, memory, 2 * PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, (u64)-1, 0));
    expect_message(uffd.fd, UNMAP, memory, memory + 2 * PAGE, 0);
    expect_is(answer_of(it, 2).value, memory);
    // The range is that of the call, whatever of it was registered.
    u64 wide = map(it, 8);
    expect_is(reg(uffd.fd, wide + 3 * PAGE, 1), 0);
    tell(it, 2, ORDER_CALL(SYS_munmap, wide, 8 * PAGE));
    expect_message(uffd.fd, UNMAP, wide, wide + 8 * PAGE, 0);
    answer_of(it, 2);
}

// Danger: the event comes for an munmap that failed half-way, too. Everything is still there.
FACT(unmapping_is_told_when_it_failed) {
    needs_kernel(6, 12);
    begin();
    u64 memory = managed(8, 7);
    expect_is(call(it, 0, SYS_madvise, memory + 4 * PAGE, 4 * PAGE, MADV_DONTDUMP), 0);
    if (call(it, 0, NR_mseal, memory + 4 * PAGE, 4 * PAGE, 0) < 0) skip("mseal needs Linux 6.10");
    evict(memory, 1);
    tell(it, 2, ORDER_CALL(SYS_munmap, memory, 8 * PAGE));
    expect_message(uffd.fd, UNMAP, memory, memory + 8 * PAGE, 0);
    expect_is(answer_of(it, 2).value, -EPERM);
    expect(is_registered(it, memory));
    expect_is(present_pages(it, memory, 8), 7);
}

// Danger: and for a mapping over it that was refused for want of address space.
FACT(unmapping_is_told_when_mapping_over_it_failed) {
    needs_kernel(6, 12);
    begin();
    u64 memory = managed(8, 7), pages;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/statm", it->pid);
    FILE *statm = fopen(path, "re");
    expect_is(fscanf(statm, "%lu", &pages), 1);
    fclose(statm);
    struct rlimit *limit = argument(it, 0);
    *limit = (struct rlimit){ (pages + 100) * PAGE, RLIM_INFINITY };
    expect_is(call(it, 0, SYS_prlimit64, 0, RLIMIT_AS, (u64)limit, 0), 0);
    tell(it, 2, ORDER_CALL(SYS_mmap, memory + 4 * PAGE, 1 << 30, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, (u64)-1, 0));
    expect_message(uffd.fd, UNMAP, memory + 4 * PAGE, memory + 4 * PAGE + (1 << 30), 0);
    expect_is(answer_of(it, 2).value, -ENOMEM);
    expect(is_registered(it, memory + 4 * PAGE));
    expect_is(present_pages(it, memory, 8), 8);
}

FACT(moving_is_told_as_remap_then_unmap) {
    begin();
    u64 memory = managed(8, 7), to = map(it, 8);
    evict(memory, 1);
    tell(it, 2, ORDER_CALL(SYS_mremap, memory, 8 * PAGE, 8 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to));
    expect_message(uffd.fd, REMAP, memory, to, 8 * PAGE);
    // Nothing can be captured or filled in between.
    expect_is(zeros(uffd.fd, to, 1), -EAGAIN);
    expect_message(uffd.fd, UNMAP, memory, memory + 8 * PAGE, 0);
    expect_is(answer_of(it, 2).value, to);
    expect(is_registered(it, to) && !is_present(it, to));
    expect_is(has_flag(it, memory, "um"), -1);
    expect_is(load(it, 0, to + PAGE), word_of(7, 1, 0));
}

FACT(moving_over_a_mapping_is_told_first) {
    begin();
    u64 memory = managed(8, 7), to = managed(8, 8);
    // Shrunk on the way: the destination goes, what is kept moves, then the tail goes, then the source.
    tell(it, 2, ORDER_CALL(SYS_mremap, memory, 8 * PAGE, 4 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to));
    expect_message(uffd.fd, UNMAP, to, to + 4 * PAGE, 0);
    expect_message(uffd.fd, REMAP, memory, to, 4 * PAGE);
    expect_message(uffd.fd, UNMAP, memory + 4 * PAGE, memory + 8 * PAGE, 0);
    expect_message(uffd.fd, UNMAP, memory, memory + 4 * PAGE, 0);
    expect_is(answer_of(it, 2).value, to);
    // Grown on the way: the old length is told, and the new tail is registered all the same.
    u64 wide = map(it, 16);
    tell(it, 2, ORDER_CALL(SYS_mremap, to, 4 * PAGE, 8 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, wide));
    expect_message(uffd.fd, REMAP, to, wide, 4 * PAGE);
    expect_message(uffd.fd, UNMAP, to, to + 4 * PAGE, 0);
    expect_is(answer_of(it, 2).value, wide);
    expect(is_registered(it, wide + 7 * PAGE));
}

FACT(moving_without_unmapping_keeps_both_registered) {
    begin();
    u64 memory = managed(8, 7);
    tell(it, 2, ORDER_CALL(SYS_mremap, memory, 8 * PAGE, 8 * PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0));
    struct message remap = next_message(uffd.fd, REMAP);
    expect(remap.a == memory && remap.c == 8 * PAGE);
    expect_is(answer_of(it, 2).value, remap.b);
    expect(is_quiet(uffd.fd));
    expect(is_registered(it, memory) && is_registered(it, remap.b));
    expect_is(present_pages(it, memory, 8), 0);
    tell(it, 2, ORDER_LOAD(memory));
    expect_is(next_message(uffd.fd, FAULT).b, memory);
}

FACT(growth_in_place_is_silent) {
    begin();
    u64 memory = managed(8, 7);
    expect_is(call(it, 2, SYS_mremap, memory, 8 * PAGE, 12 * PAGE, 0), memory);
    expect(is_quiet(uffd.fd));
    expect(is_registered(it, memory + 11 * PAGE));
    tell(it, 2, ORDER_LOAD(memory + 11 * PAGE));
    expect_is(next_message(uffd.fd, FAULT).b, memory + 11 * PAGE);
}

// Danger: a mapping made beside a registered one does not merge with it, as it would otherwise. It does so when it is
// registered too, but not if it was touched before. mremap works on one mapping: who takes both for one gets EFAULT.
FACT(growth_beside_is_another_mapping) {
    begin();
    for (int touched = 0; touched < 2; touched++) {
        u64 memory = managed(4, 7), to = map(it, 8);
        map_at(it, memory + 4 * PAGE, 4, PROT_READ | PROT_WRITE, MAP_FIXED_NOREPLACE);
        expect_is(has_flag(it, memory + 4 * PAGE, "um"), 0);
        expect_is(call(it, 2, SYS_mremap, memory, 8 * PAGE, 8 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to), -EFAULT);
        if (touched) store(it, 2, memory + 4 * PAGE, 1);
        expect_is(reg(uffd.fd, memory, 8), 0);
        tell(it, 2, ORDER_CALL(SYS_mremap, memory, 8 * PAGE, 8 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to));
        struct message ignored;
        while (!answered_within(it, 2, 20)) read_message(uffd.fd, &ignored);
        expect_is(answer_of(it, 2).value, touched ? -EFAULT : (long)to);
    }
    // The heap grows so as well.
    u64 top = (u64)call(it, 0, SYS_brk, 0), end = (top + PAGE - 1) & ~(u64)(PAGE - 1);
    expect_is(call(it, 0, SYS_brk, end + 4 * PAGE), end + 4 * PAGE);
    expect_is(reg(uffd.fd, end, 4), 0);
    expect_is(call(it, 0, SYS_brk, end + 8 * PAGE), end + 8 * PAGE);
    expect(is_registered(it, end) && !is_registered(it, end + 4 * PAGE));
    tell(it, 0, ORDER_CALL(SYS_brk, end));
    expect_message(uffd.fd, UNMAP, end, end + 8 * PAGE, 0);
    answer_of(it, 0);
}

// Since 6.17 mremap moves several mappings in one go; not if one of them is registered.
FACT(several_mappings_do_not_move_together) {
    begin();
    u64 memory = map(it, 8), to = map(it, 8);
    fill(it, memory, 8, 7);
    expect_is(call(it, 0, SYS_madvise, memory + 4 * PAGE, 4 * PAGE, MADV_DONTDUMP), 0);
    long moves = call(it, 0, SYS_mremap, memory, 8 * PAGE, 8 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to);
    if (moves < 0) skip("mremap of several mappings needs Linux 6.17");
    expect_is(reg(uffd.fd, to, 8), 0);
    tell(it, 2, ORDER_CALL(SYS_mremap, to, 8 * PAGE, 8 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, map(it, 8)));
    struct message ignored;
    while (!answered_within(it, 2, 20)) read_message(uffd.fd, &ignored);
    expect_is(answer_of(it, 2).value, -EFAULT);
}

FACT(a_fork_hands_over_a_descriptor) {
    begin();
    u64 memory = managed(4, 7);
    evict(memory, 1);
    tell_fork(it, 0);
    struct pollfd ready = { uffd.fd, POLLIN, 0 };
    expect_is(poll(&ready, 1, 2000), 1);
    // Neither parent nor child goes on, and nothing is captured or filled, until it is read.
    expect(!answered_within(it, 0, 50));
    expect_is(capture(memory + PAGE, 1, 8), -EAGAIN);
    expect_is(copy(uffd.fd, memory, page_of(1), 1), -EAGAIN);
    struct message fork_ = next_message(uffd.fd, FORK);
    int child_fd = (int)(uint32_t)fork_.a;
    expect(fcntl(child_fd, F_GETFD) >= 0 && (fcntl(child_fd, F_GETFL) & O_NONBLOCK));
    struct target *child = child_of(it, 0);
    // The child's faults arrive there and only there, and are served there.
    tell(child, 2, ORDER_LOAD(memory));
    struct message fault = next_message(child_fd, FAULT);
    expect_is(fault.b, memory);
    expect_is((uint32_t)fault.c, child->tids[2]);
    expect(is_quiet(uffd.fd));
    expect_is(copy(child_fd, memory, page_of(11), 1), 0);
    expect_is(answer_of(child, 2).value, 11);
    expect(!is_present(it, memory));
    expect_is(load(child, 2, memory + PAGE), word_of(7, 1, 0));
    // So are its own changes.
    tell(child, 2, ORDER_CALL(SYS_munmap, memory, PAGE));
    expect_message(child_fd, UNMAP, memory, memory + PAGE, 0);
    answer_of(child, 2);
}

// A child of clone(CLONE_VM), as posix_spawn and vfork make it, is the same address space: nothing is told.
FACT(a_child_that_shares_memory_is_not_told) {
    begin();
    managed(1, 7);
    pid_t *child = argument(it, 0);
    tell(it, 0, ORDER_CALL(SYS_clone, CLONE_VM | CLONE_VFORK | CLONE_PARENT_SETTID | SIGCHLD, 0, (u64)child));
    // It is the child that answers: its parent waits for it.
    expect_is(answer_of(it, 0).value, 0);
    expect(is_quiet(uffd.fd));
    kill(*child, SIGKILL);
}

// Danger: a mapping under MADV_WIPEONFORK is registered and empty in the child, and its pages of the parent's must not be
// given to the child: generators of random numbers notice forks so.
FACT(wiped_mappings_are_registered_in_children) {
    begin();
    u64 memory = managed(4, 7);
    expect_is(call(it, 0, SYS_madvise, memory, 4 * PAGE, MADV_WIPEONFORK), 0);
    evict(memory, 1);
    tell_fork(it, 0);
    int child_fd = (int)(uint32_t)next_message(uffd.fd, FORK).a;
    struct target *child = child_of(it, 0);
    expect(is_registered(child, memory));
    expect_is(has_flag(child, memory, "wf"), 1);
    expect_is(present_pages(child, memory, 4), 0);
    for (u64 i = 0; i < 2; i++) {
        tell(child, 2, ORDER_LOAD(memory + i * PAGE));
        expect_is(next_message(child_fd, FAULT).b, memory + i * PAGE);
        expect_is(zeros(child_fd, memory + i * PAGE, 1), 0);
        expect_is(answer_of(child, 2).value, 0);
    }
}

// Danger: a mapping under MADV_DONTFORK is absent in the child, and no event says so.
FACT(mappings_kept_from_children_are_absent_there) {
    begin();
    u64 kept = managed(4, 7), shared = managed(1, 8);
    expect_is(call(it, 0, SYS_madvise, kept, 4 * PAGE, MADV_DONTFORK), 0);
    tell_fork(it, 0);
    int child_fd = (int)(uint32_t)next_message(uffd.fd, FORK).a;
    struct target *child = child_of(it, 0);
    expect_is(has_flag(child, kept, "um"), -1);
    expect_is(has_flag(child, staging, "um"), -1);
    expect(is_registered(child, shared));
    map_at(child, kept, 4, PROT_READ | PROT_WRITE, MAP_FIXED_NOREPLACE);
    expect(is_quiet(child_fd));
    expect_is(has_flag(child, kept, "um"), 0);
}

FACT(faults_are_read_before_events) {
    begin();
    u64 memory = managed(4, 7), elsewhere = managed(2, 8);
    evict(elsewhere, 2);
    tell(it, 2, ORDER_CALL(SYS_madvise, memory, PAGE, MADV_DONTNEED));
    expect(!answered_within(it, 2, 20));
    tell(it, 3, ORDER_LOAD(elsewhere));
    expect(!answered_within(it, 3, 20));
    // The event is older; the fault comes first. Both in one read.
    struct message both[2];
    expect_is(read(uffd.fd, both, sizeof both), sizeof both);
    expect_is(both[0].event, FAULT);
    expect_is(both[1].event, REMOVE);
    answer_of(it, 2);
    expect_is(copy(uffd.fd, elsewhere, page_of(1), 1), 0);
    answer_of(it, 3);
}

FACT(reading_needs_room_for_a_message) {
    begin();
    managed(1, 7);
    char small[31];
    expect_is(raw(read(uffd.fd, small, sizeof small)), -EINVAL);
    struct message message;
    expect_is(raw(read(uffd.fd, &message, sizeof message)), -EAGAIN);
}

// Danger: guard markers (glibc's thread stacks, since 2.42) drop pages without an event. What was out before comes back as
// missing once the marker is gone, and should then read as zeros.
FACT(guards_are_silent) {
    begin();
    u64 memory = managed(4, 7);
    evict(memory, 1);
    if (call(it, 0, SYS_madvise, memory, 2 * PAGE, MADV_GUARD_INSTALL) < 0) skip("guard markers need Linux 6.13");
    expect(is_quiet(uffd.fd));
    expect_is(order(it, 2, ORDER_LOAD(memory)).signal, SIGSEGV);
    expect_is(order(it, 2, ORDER_LOAD(memory + PAGE)).signal, SIGSEGV);
    expect(is_quiet(uffd.fd));
    expect_is(capture(memory, 1, 8), -EFAULT);
    expect_is(call(it, 0, SYS_madvise, memory, 2 * PAGE, MADV_GUARD_REMOVE), 0);
    for (u64 i = 0; i < 2; i++) {
        tell(it, 2, ORDER_LOAD(memory + i * PAGE));
        expect_is(next_message(uffd.fd, FAULT).b, memory + i * PAGE);
        expect_is(zeros(uffd.fd, memory + i * PAGE, 1), 0);
        expect_is(answer_of(it, 2).value, 0);
    }
}

// Danger: COPY takes a marker for a hole and replaces it; ZEROPAGE and POISON do not. Kernels that know better answer EEXIST.
FACT(copy_overwrites_guards) {
    begin();
    u64 memory = managed(4, 7);
    if (call(it, 0, SYS_madvise, memory, 4 * PAGE, MADV_GUARD_INSTALL) < 0) skip("guard markers need Linux 6.13");
    expect_is(zeros(uffd.fd, memory, 1), -EEXIST);
    expect_is(poison(uffd.fd, memory, 1), -EEXIST);
    expect_is(order(it, 2, ORDER_LOAD(memory)).signal, SIGSEGV);
    long answer = copy(uffd.fd, memory, page_of(3), 1);
    if (answer == -EEXIST) skip("this kernel keeps guards");
    expect_is(answer, 0);
    expect_is(load(it, 2, memory), 3);
}

FACT(copy_overwrites_poison) {
    begin();
    u64 memory = map(it, 2);
    expect_is(reg(uffd.fd, memory, 2), 0);
    expect_is(poison(uffd.fd, memory, 1), 0);
    expect_is(zeros(uffd.fd, memory, 1), -EEXIST);
    expect_is(poison(uffd.fd, memory, 1), -EEXIST);
    expect_is(order(it, 2, ORDER_LOAD(memory)).signal, SIGBUS);
    long answer = copy(uffd.fd, memory, page_of(3), 1);
    if (answer == -EEXIST) skip("this kernel keeps poison");
    expect_is(answer, 0);
    expect_is(load(it, 2, memory), 3);
}

// Danger: shmat(SHM_REMAP) replaces a mapping and tells nobody.
FACT(shared_memory_over_a_mapping_is_silent) {
    begin();
    u64 memory = managed(4, 7);
    int id = shmget(IPC_PRIVATE, 4 * PAGE, IPC_CREAT | 0600);
    if (id < 0) skip("shmget: %m");
    long attached = call(it, 2, SYS_shmat, (u64)id, memory, SHM_REMAP);
    shmctl(id, IPC_RMID, NULL);
    expect_is(attached, memory);
    expect(is_quiet(uffd.fd));
    expect_is(has_flag(it, memory, "um"), 0);
    expect_is(call(it, 2, SYS_shmdt, memory), 0);
    expect(is_quiet(uffd.fd));
    map_at(it, memory, 4, PROT_READ | PROT_WRITE, MAP_FIXED_NOREPLACE);
    expect(is_quiet(uffd.fd));
}
