// What an access to a missing page does: who waits, who is told, who gets an error instead.
#include "kernel.h"
#include <elf.h>
#include <linux/futex.h>
#include <sys/ptrace.h>
#include <sys/resource.h>

FACT(an_unserved_fault_waits) {
    begin();
    u64 memory = managed(2, 7);
    evict(memory, 2);
    tell(it, 2, ORDER_LOAD(memory));
    next_message(uffd.fd, FAULT);
    tell(it, 3, ORDER_LOAD(memory + PAGE));
    pause_ms(100);
    expect(!answered_within(it, 2, 0) && !answered_within(it, 3, 0));
    // Closing one of two descriptors of the same userfaultfd changes nothing.
    close(uffd.fd);
    pause_ms(50);
    expect(!answered_within(it, 2, 0) && !answered_within(it, 3, 0));
}

FACT(closing_the_last_descriptor_gives_zeros) {
    begin();
    u64 memory = managed(2, 7);
    evict(memory, 2);
    tell(it, 2, ORDER_LOAD(memory));
    next_message(uffd.fd, FAULT);
    close(uffd.fd);
    expect(!answered_within(it, 2, 50));
    expect_is(call(it, 0, SYS_close, (u64)uffd.there), 0);
    expect_is(answer_of(it, 2).value, 0);
    expect_is(load(it, 3, memory + PAGE), 0);
    expect(!is_registered(it, memory));
}

FACT(poison_raises_sigbus) {
    begin();
    u64 memory = managed(2, 7);
    evict(memory, 1);
    tell(it, 2, ORDER_LOAD(memory));
    next_message(uffd.fd, FAULT);
    expect_is(poison(uffd.fd, memory, 1), 0);
    expect_is(answer_of(it, 2).signal, SIGBUS);
    // System calls get an error.
    expect_is(call(it, 2, SYS_access, memory, 0), -EFAULT);
    expect_is(poison(uffd.fd, memory + PAGE, 1), -EEXIST);
    // Given back, it is memory again.
    tell(it, 2, ORDER_CALL(SYS_madvise, memory, PAGE, MADV_DONTNEED));
    next_message(uffd.fd, REMOVE);
    answer_of(it, 2);
    tell(it, 2, ORDER_LOAD(memory));
    next_message(uffd.fd, FAULT);
    expect_is(zeros(uffd.fd, memory, 1), 0);
    expect_is(answer_of(it, 2).value, 0);
}

FACT(faults_in_system_calls_are_served) {
    begin();
    u64 memory = managed(2, 7);
    evict(memory, 2);
    int *ends = argument(it, 0);
    expect_is(call(it, 0, SYS_pipe2, (u64)ends, 0), 0);
    int reading = ends[0], writing = ends[1];
    expect_is(call(it, 0, SYS_write, (u64)writing, (u64)argument(it, 0), 8), 8);
    tell(it, 2, ORDER_CALL(SYS_read, (u64)reading, memory + 8, 8));
    struct message fault = next_message(uffd.fd, FAULT);
    expect(fault.b == memory && fault.a == 1);
    expect_is(copy(uffd.fd, memory, page_of(3), 1), 0);
    expect_is(answer_of(it, 2).value, 8);
    expect_is(load(it, 2, memory), 3);
    // The kernel reads a path from a missing page just so.
    tell(it, 2, ORDER_CALL(SYS_access, memory + PAGE, 0));
    fault = next_message(uffd.fd, FAULT);
    expect(fault.b == memory + PAGE && fault.a == 0);
    expect_is(copy(uffd.fd, memory + PAGE, "/", 1), 0);
    expect_is(answer_of(it, 2).value, 0);
}

FACT(filling_what_is_there_is_refused) {
    begin();
    u64 memory = managed(8, 7);
    evict(memory, 4);
    expect_is(copy(uffd.fd, memory + 2 * PAGE, page_of(1), 1), 0);
    expect_is(copy(uffd.fd, memory + 2 * PAGE, page_of(2), 1), -EEXIST);
    expect_is(zeros(uffd.fd, memory + 2 * PAGE, 1), -EEXIST);
    // A run ends where a page is: with what was done, and EAGAIN as for any other reason.
    expect_is(copy(uffd.fd, memory, page_of(3), 4), -EAGAIN);
    expect_is(copied, 2 * PAGE);
    expect_is(zeros(uffd.fd, memory + 3 * PAGE, 2), -EAGAIN);
    expect_is(copied, PAGE);
    expect_is(load(it, 0, memory + 2 * PAGE), 1);
    expect_is(load(it, 0, memory + PAGE), 3);
    expect_is(load(it, 0, memory + 3 * PAGE), 0);
    expect_is(load(it, 0, memory + 4 * PAGE), word_of(7, 4, 0));
}

// What was refused with EEXIST wakes nobody.
FACT(a_refused_filling_wakes_nobody) {
    begin();
    struct uffd other = open_uffd(it, 0);
    u64 memory = managed(1, 7);
    evict(memory, 1);
    tell(it, 2, ORDER_LOAD(memory));
    next_message(uffd.fd, FAULT);
    expect_is(copy(other.fd, memory, page_of(5), 1), 0);
    expect_is(copy(uffd.fd, memory, page_of(6), 1), -EEXIST);
    expect(!answered_within(it, 2, 50));
    expect_is(wake(uffd.fd, memory, 1), 0);
    expect_is(answer_of(it, 2).value, 5);
}

FACT(a_fault_that_was_read_is_raised_again_by_a_wake) {
    begin();
    u64 memory = managed(1, 7);
    evict(memory, 1);
    tell(it, 2, ORDER_LOAD(memory));
    next_message(uffd.fd, FAULT);
    // Its reader died. The next one hears nothing of it …
    int successor = (int)take_fd(it, uffd.there);
    close(uffd.fd);
    expect(is_quiet(successor));
    // … until it wakes the range.
    expect_is(wake(successor, memory, 1), 0);
    expect_is(next_message(successor, FAULT).b, memory);
    expect_is(copy(successor, memory, page_of(5), 1), 0);
    expect_is(answer_of(it, 2).value, 5);
}

// A thread that is asked to stop or handles a signal raises its fault anew, although the first was read.
FACT(a_signal_repeats_a_fault) {
    begin();
    u64 memory = managed(1, 7);
    evict(memory, 1);
    tell(it, 2, ORDER_LOAD(memory));
    next_message(uffd.fd, FAULT);
    expect_is(raw(syscall(SYS_tgkill, it->pid, it->tids[2], SIGSTOP)), 0);
    siginfo_t stopped;
    expect_is(waitid(P_PID, (id_t)it->pid, &stopped, WSTOPPED), 0);
    kill(it->pid, SIGCONT);
    expect_is(next_message(uffd.fd, FAULT).b, memory);
    expect_is(copy(uffd.fd, memory, page_of(5), 1), 0);
    expect_is(answer_of(it, 2).value, 5);
}

// Thread 3 of the target ends, with its robust list and the word that is cleared at its end in `memory`, and holding a
// robust lock. Returns that lock.
static uint32_t end_a_thread(u64 memory, bool out) {
    uint32_t *lock = argument(it, 3);
    u64 *entry = argument(it, 3) + 64;
    *lock = (uint32_t)it->tids[3];
    *entry = memory; // the list's head: this is its last entry
    store(it, 3, memory, (u64)entry);
    store(it, 3, memory + 8, (u64)lock - (u64)entry);
    store(it, 3, memory + 16, 0);
    store(it, 3, memory + 64, 1);
    expect_is(call(it, 3, SYS_set_robust_list, memory, 24), 0);
    call(it, 3, SYS_set_tid_address, memory + 64);
    u64 kept[PAGE / 8];
    struct iovec here = { kept, PAGE }, there = { (void *)memory, PAGE };
    expect_is(process_vm_readv(it->pid, &here, 1, &there, 1, 0), PAGE);
    if (out) evict(memory, 1);
    tell(it, 3, (struct order){ QUIT, 0, { 0 } });
    char task[64];
    snprintf(task, sizeof task, "/proc/%d/task/%d", it->pid, it->tids[3]);
    for (double until = now() + 2; !access(task, F_OK); pause_ms(1))
        if (now() > until) fail("the thread does not end");
    expect(is_quiet(uffd.fd));
    if (out) expect_is(copy(uffd.fd, memory, kept, 1), 0);
    return *lock;
}

FACT(an_ending_thread_clears_its_words) {
    begin();
    u64 memory = managed(1, 7);
    expect_is(end_a_thread(memory, false), FUTEX_OWNER_DIED);
    expect_is((uint32_t)load(it, 0, memory + 64), 0);
}

// Danger: from exit_signals on, a missing page is an error and nobody is asked for it. The word that pthread_join waits
// for is not cleared, robust locks stay locked for ever.
FACT(an_ending_thread_cannot_fault) {
    begin();
    u64 memory = managed(1, 7);
    expect_is(end_a_thread(memory, true), it->tids[3]);
    expect_is((uint32_t)load(it, 0, memory + 64), 1);
}

// Whoever wants to know where those words are may ask.
FACT(a_robust_list_can_be_asked_for) {
    begin();
    u64 head = 0, length = 0;
    expect_is(raw(syscall(SYS_get_robust_list, it->tids[2], &head, &length)), 0);
    expect(head && length == 24);
}

// Danger: /proc/PID/mem and ptrace do not wait for a page: a debugger reads and writes errors where a page is out.
FACT(debuggers_cannot_fault) {
    begin();
    u64 memory = managed(1, 7), word = 0;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/mem", it->pid);
    int mem = open(path, O_RDWR | O_CLOEXEC);
    expect_is(pread(mem, &word, 8, (off_t)memory), 8);
    evict(memory, 1);
    expect_is(raw(pread(mem, &word, 8, (off_t)memory)), -EIO);
    expect_is(raw(pwrite(mem, &word, 8, (off_t)memory)), -EIO);
    if (ptrace(PTRACE_SEIZE, it->tids[2], 0, 0)) skip("ptrace: %m");
    expect_is(ptrace(PTRACE_INTERRUPT, it->tids[2], 0, 0), 0);
    expect_is(waitpid(it->tids[2], NULL, __WALL), it->tids[2]);
    errno = 0;
    expect(ptrace(PTRACE_PEEKDATA, it->tids[2], memory, 0) == -1 && errno == EIO);
    expect(is_quiet(uffd.fd));
}

// Danger: the kernel's own atomic operations on a lock do not wait either: EFAULT, which a C library takes for the end.
FACT(locks_with_inheritance_cannot_fault) {
    begin();
    u64 memory = managed(1, 7), lock = memory + 8;
    store(it, 0, lock, 0);
    evict(memory, 1);
    expect_is(call(it, 2, SYS_futex, lock, FUTEX_LOCK_PI_PRIVATE, 0, 0), -EFAULT);
    u64 other = (u64)argument(it, 0);
    expect_is(call(it, 2, SYS_futex, other, FUTEX_WAKE_OP_PRIVATE, 1, 1, lock, FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_EQ, 0)), -EFAULT);
    expect(is_quiet(uffd.fd));
    // Plain waiting does.
    tell(it, 2, ORDER_CALL(SYS_futex, lock, FUTEX_WAIT_PRIVATE, 5, 0));
    expect_is(next_message(uffd.fd, FAULT).b, memory);
    expect_is(copy(uffd.fd, memory, page_of(0), 1), 0);
    expect_is(answer_of(it, 2).value, -EAGAIN);
    expect_is(call(it, 2, SYS_futex, lock, FUTEX_LOCK_PI_PRIVATE, 0, 0), 0);
}

// process_vm_readv and process_vm_writev do wait.
FACT(another_process_can_fault) {
    begin();
    u64 memory = managed(1, 7), word = 9;
    evict(memory, 1);
    pid_t writer = fork();
    if (writer == 0) {
        struct iovec here = { &word, 8 }, there = { (void *)memory, 8 };
        _exit(process_vm_writev(it->pid, &here, 1, &there, 1, 0) == 8 ? 0 : 1);
    }
    struct message fault = next_message(uffd.fd, FAULT);
    // The thread in the message need not be one of the target's.
    expect(fault.b == memory && (uint32_t)fault.c == (uint32_t)writer);
    expect_is(copy(uffd.fd, memory, page_of(5), 1), 0);
    int status = 1;
    expect_is(waitpid(writer, &status, 0), writer);
    expect_is(status, 0);
    expect_is(load(it, 0, memory), 9);
    expect_is(load(it, 0, memory + 8), 5);
}

// Danger: the thread id in a message is the one in the pid namespace of who faults, not of who reads.
FACT(thread_ids_are_those_of_the_targets_namespace) {
    begin();
    u64 memory = managed(1, 7);
    evict(memory, 1);
    tell(it, 0, (struct order){ FORK_OFF, 0, { CLONE_NEWPID } });
    struct pollfd ready = { uffd.fd, POLLIN, 0 };
    if (poll(&ready, 1, 500) != 1) skip("no right to make a pid namespace");
    int child_fd = (int)(uint32_t)next_message(uffd.fd, FORK).a;
    struct target *child = child_of(it, 0);
    tell(child, 0, ORDER_LOAD(memory));
    struct message fault = next_message(child_fd, FAULT);
    expect_is((uint32_t)fault.c, 1);
    expect(child->pid != 1);
    expect_is(copy(child_fd, memory, page_of(5), 1), 0);
    answer_of(child, 0);
}

FACT(locking_brings_pages_home) {
    begin();
    u64 memory = managed(4, 7);
    evict(memory + PAGE, 1);
    tell(it, 2, ORDER_CALL(SYS_mlock, memory, 4 * PAGE));
    expect_is(next_message(uffd.fd, FAULT).b, memory + PAGE);
    expect(!answered_within(it, 2, 20));
    expect_is(copy(uffd.fd, memory + PAGE, page_of(5), 1), 0);
    expect_is(answer_of(it, 2).value, 0);
    expect_is(load(it, 2, memory + PAGE), 5);
}

static char core_pattern_before[256], core_directory[64];
static void restore_core_pattern(void) {
    FILE *pattern = fopen("/proc/sys/kernel/core_pattern", "we");
    if (pattern) fputs(core_pattern_before, pattern), fclose(pattern);
    if (!strncmp(core_directory, "/tmp/", 5)) {
        char command[96];
        snprintf(command, sizeof command, "rm -r %s", core_directory);
        if (system(command)) puts("a directory is left");
    }
}

// The bytes at `address` in a core file; false where the file has none.
static bool in_core(FILE *core, u64 address, void *into, size_t bytes) {
    Elf64_Ehdr head;
    Elf64_Phdr segment;
    if (fread(&head, sizeof head, 1, core) != 1) fail("an empty core file");
    for (int i = 0; i < head.e_phnum; i++) {
        fseek(core, (long)(head.e_phoff + (u64)i * sizeof segment), SEEK_SET);
        if (fread(&segment, sizeof segment, 1, core) != 1) fail("a short core file");
        u64 within = address - segment.p_vaddr;
        if (segment.p_type != PT_LOAD || address < segment.p_vaddr || within + bytes > segment.p_filesz) continue;
        fseek(core, (long)(segment.p_offset + within), SEEK_SET);
        return fread(into, bytes, 1, core) == 1;
    }
    return false;
}

// Danger: a core file has zeros where a page was out.
FACT(core_files_have_holes) {
    begin();
    u64 memory = managed(3, 7), words[PAGE / 8 + 1];
    evict(memory + PAGE, 1);
    FILE *pattern = fopen("/proc/sys/kernel/core_pattern", "r+e");
    if (!pattern || !fgets(core_pattern_before, sizeof core_pattern_before, pattern)) skip("no right to choose where core files go");
    strcpy(core_directory, "/tmp/kernel-facts-XXXXXX");
    if (!mkdtemp(core_directory)) fail("mkdtemp: %m");
    atexit(restore_core_pattern);
    rewind(pattern);
    fprintf(pattern, "%s/core", core_directory);
    if (fclose(pattern)) skip("no right to choose where core files go");
    struct rlimit *limit = argument(it, 0);
    *limit = (struct rlimit){ RLIM_INFINITY, RLIM_INFINITY };
    expect_is(call(it, 0, SYS_prlimit64, 0, RLIMIT_CORE, (u64)limit, 0), 0);
    kill(it->pid, SIGABRT);
    int status = 0;
    expect_is(waitpid(it->pid, &status, 0), it->pid);
    if (!WCOREDUMP(status)) skip("no core file was written");
    expect(is_quiet(uffd.fd));
    char name[160];
    snprintf(name, sizeof name, "%s/core", core_directory);
    FILE *core = fopen(name, "re");
    if (!core) {
        snprintf(name, sizeof name, "%s/core.%d", core_directory, it->pid);
        core = fopen(name, "re");
    }
    if (!core) fail("%s: %m", name);
    expect(in_core(core, memory, words, 8) && words[0] == word_of(7, 0, 0));
    rewind(core);
    expect(in_core(core, memory + 2 * PAGE, words, 8) && words[0] == word_of(7, 2, 0));
    rewind(core);
    if (in_core(core, memory + PAGE, words, PAGE))
        for (int i = 0; i < PAGE / 8; i++) expect(words[i] == 0);
}
