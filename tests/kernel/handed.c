// A userfaultfd that a target has made itself and hands over, with the features that it chose (Firecracker: REMOVE alone).
#include "kernel.h"

static void begin_handed(u64 features) {
    it = start_target();
    uffd = open_uffd(it, features);
    staging = map(it, STAGING_PAGES);
}

// Whether the line of /proc/self/fdinfo that tells of a userfaultfd has these features.
static bool shows_features(int fd, unsigned long long wanted) {
    char path[64], line[256];
    unsigned long long api, got = 0, calls;
    unsigned int features = 0;
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
    FILE *file = fopen(path, "re");
    bool found = false;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "API:\t%llx:%x:%llx", &api, &features, &calls) == 3) found = true, got = features;
    if (file) fclose(file);
    // The kernel's own mark of an agreement that was made, UFFD_FEATURE_INITIALIZED.
    return found && got == (wanted | 1u << 31);
}

FACT(what_was_agreed_on_can_be_read) {
    begin_handed(FEATURE_REMOVE | FEATURE_THREAD_ID);
    expect(shows_features(uffd.fd, FEATURE_REMOVE | FEATURE_THREAD_ID));
    struct uffd other = open_uffd(it, 0);
    expect(shows_features(other.fd, 0));
    char path[64], name[64] = { 0 };
    snprintf(path, sizeof path, "/proc/self/fd/%d", uffd.fd);
    expect(readlink(path, name, sizeof name - 1) > 0 && !strcmp(name, "anon_inode:[userfaultfd]"));
}

FACT(moves_and_poison_need_no_feature) {
    begin_handed(FEATURE_REMOVE);
    u64 memory = managed(4, 1);
    evict(memory, 2);
    expect_is(poison(uffd.fd, memory, 1), 0);
    expect_is(order(it, 2, ORDER_LOAD(memory)).signal, SIGBUS);
    tell(it, 2, ORDER_LOAD(memory + PAGE));
    struct message fault = next_message(uffd.fd, FAULT);
    // And without that feature a fault names no thread.
    expect_is((uint32_t)fault.c, 0);
    expect_is(copy(uffd.fd, memory + PAGE, page_of(7), 1), 0);
    expect_is(answer_of(it, 2).value, 7);
}

FACT(children_read_zeros_where_no_fork_is_told) {
    begin_handed(FEATURE_REMOVE);
    u64 memory = managed(4, 1);
    evict(memory, 4);
    tell_fork(it, 1);
    struct target *child = child_of(it, 1);
    expect(is_quiet(uffd.fd));
    expect_is(load(child, 0, memory), 0);
}

FACT(mappings_change_silently_where_no_event_was_agreed_on) {
    begin_handed(FEATURE_REMOVE);
    u64 memory = managed(4, 1);
    expect_is(call(it, 0, SYS_munmap, memory, 4 * PAGE), 0);
    expect_is(map_at(it, memory, 4, PROT_READ | PROT_WRITE, MAP_FIXED_NOREPLACE), memory);
    fill(it, memory, 4, 2);
    expect(is_quiet(uffd.fd));
    // The table would take them for the old ones; and who took them would leave zeros.
    expect_is(capture(memory, 4, 0), 0);
    expect_is(load(it, 0, memory), 0);
}

FACT(sealed_memory_keeps_its_place) {
    begin_handed(FEATURE_REMOVE);
    u64 memory = managed(4, 1), elsewhere = map(it, 4);
    if (call(it, 0, NR_mseal, memory, 4 * PAGE, 0) == -ENOSYS) skip("mseal needs Linux 6.10");
    u64 bytes = 4 * PAGE, flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    expect_is(call(it, 0, SYS_munmap, memory, bytes), -EPERM);
    expect_is(call(it, 0, SYS_mmap, memory, bytes, PROT_READ, flags, (u64)-1, 0), -EPERM);
    expect_is(call(it, 0, SYS_mremap, memory, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, elsewhere), -EPERM);
    expect_is(call(it, 0, SYS_mremap, memory, bytes, bytes, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0), -EPERM);
    expect_is(call(it, 0, SYS_mremap, elsewhere, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, memory), -EPERM);
    expect_is(call(it, 0, SYS_mprotect, memory, bytes, PROT_READ), -EPERM);
    expect_is(wrong_words(it, memory, 4, 1), 0);
    // What is left to it is told: it may give pages back.
    tell(it, 1, ORDER_CALL(SYS_madvise, memory, bytes, MADV_DONTNEED));
    expect_message(uffd.fd, REMOVE, memory, memory + bytes, 0);
    expect_is(answer_of(it, 1).value, 0);
    expect_is(present_pages(it, memory, 4), 0);
}

FACT(sealing_needs_mappings_all_the_way) {
    begin_handed(FEATURE_REMOVE);
    u64 memory = map(it, 4);
    if (call(it, 0, NR_mseal, memory, 4 * PAGE, 0) == -ENOSYS) skip("mseal needs Linux 6.10");
    expect_is(call(it, 0, NR_mseal, memory, 8 * PAGE, 0), -ENOMEM);
    expect_is(call(it, 0, SYS_madvise, memory, 8 * PAGE, MADV_DONTFORK), -ENOMEM);
}

FACT(a_read_can_be_told_not_to_wait) {
    begin_handed(FEATURE_REMOVE);
    expect_is(fcntl(uffd.fd, F_SETFL, 0), 0);
    struct message message;
    struct iovec into = { &message, sizeof message };
    expect_is(raw(preadv2(uffd.fd, &into, 1, -1, RWF_NOWAIT)), -EAGAIN);
    u64 memory = map(it, 1);
    expect_is(reg(uffd.fd, memory, 1), 0);
    tell(it, 2, ORDER_LOAD(memory));
    pause_ms(20);
    expect_is(raw(preadv2(uffd.fd, &into, 1, -1, RWF_NOWAIT)), sizeof message);
    expect_is(message.event, FAULT);
    expect_is(copy(uffd.fd, memory, page_of(7), 1), 0);
    expect_is(answer_of(it, 2).value, 7);
}
