// What an agent is made of: a thread with a descriptor table of its own, and memory that children do not get.
#include "kernel.h"
#include <dirent.h>
#include <linux/io_uring.h>
#include <sys/file.h>
#include <sys/ptrace.h>

FACT(an_agent_keeps_its_descriptors) {
    begin();
    u64 memory = managed(2, 7);
    evict(memory, 2);
    int file = (int)call(it, 0, SYS_open, (u64)strcpy(argument(it, 0), "/"), O_RDONLY);
    start_agent(it);
    // The target closes everything: it loses its userfaultfd, the agent does not.
    expect_is(call(it, 0, SYS_close_range, 0, 499, 0), 0);
    expect_is(call(it, 0, SYS_fcntl, (u64)uffd.there, F_GETFD), -EBADF);
    expect(call(it, AGENT, SYS_fcntl, (u64)uffd.there, F_GETFD) >= 0);
    close(uffd.fd);
    tell(it, 2, ORDER_LOAD(memory));
    expect(!answered_within(it, 2, 50));
    // The agent keeps only what it wants of its copies, and that closes nothing of the target's.
    expect(call(it, AGENT, SYS_fcntl, (u64)file, F_GETFD) >= 0);
    expect_is(call(it, AGENT, SYS_close, (u64)file), 0);
    expect_is(call(it, AGENT, SYS_close, (u64)uffd.there), 0);
    expect_is(answer_of(it, 2).value, 0);
}

FACT(a_successor_finds_the_agents_descriptors) {
    begin();
    start_agent(it);
    u64 memory = managed(1, 7);
    evict(memory, 1);
    expect_is(call(it, 0, SYS_close_range, 0, 499, 0), 0);
    close(uffd.fd);
    tell(it, 2, ORDER_LOAD(memory));
    // From the process it cannot be had any more; from the thread it can.
    expect_is(raw(syscall(NR_pidfd_getfd, it->pidfd, uffd.there, 0)), -EBADF);
    int thread = (int)raw(syscall(NR_pidfd_open, it->tids[AGENT], O_EXCL /* PIDFD_THREAD */));
    if (thread == -EINVAL) skip("a descriptor of a thread needs Linux 6.9");
    expect(thread >= 0);
    int fd = (int)raw(syscall(NR_pidfd_getfd, thread, uffd.there, 0));
    expect(fd >= 0);
    expect_is(next_message(fd, FAULT).b, memory);
    expect_is(copy(fd, memory, page_of(3), 1), 0);
    expect_is(answer_of(it, 2).value, 3);
}

FACT(an_agent_can_move) {
    begin();
    start_agent(it);
    u64 memory = managed(4, 7);
    expect_is(reg(uffd.fd, staging, 4), 0);
    expect_is(move(it, AGENT, uffd.there, staging, memory, 4, 0), 0);
    expect_is(wrong_words(it, staging, 4, 7), 0);
}

FACT(locks_on_files_survive_a_copied_table) {
    begin();
    char name[] = "/tmp/kernel-facts-XXXXXX";
    int file = mkstemp(name);
    if (file < 0) fail("mkstemp: %m");
    int there = (int)call(it, 0, SYS_open, (u64)strcpy(argument(it, 0), name), O_RDWR);
    unlink(name);
    expect(there >= 0);
    struct flock *lock = argument(it, 0);
    *lock = (struct flock){ .l_type = F_WRLCK };
    expect_is(call(it, 0, SYS_fcntl, (u64)there, F_SETLK, (u64)lock), 0);
    start_agent(it);
    // Closing any descriptor of a file drops the locks of a process on it: here the table is another.
    expect_is(call(it, AGENT, SYS_close, (u64)there), 0);
    struct flock seen = { .l_type = F_WRLCK };
    expect_is(fcntl(file, F_GETLK, &seen), 0);
    expect_is(seen.l_type, F_WRLCK);
    expect_is(seen.l_pid, it->pid);
    // So is ours, when a copy was taken.
    close((int)take_fd(it, there));
    seen = (struct flock){ .l_type = F_WRLCK };
    expect_is(fcntl(file, F_GETLK, &seen), 0);
    expect_is(seen.l_type, F_WRLCK);
    expect_is(call(it, 0, SYS_close, (u64)there), 0);
    seen = (struct flock){ .l_type = F_WRLCK };
    expect_is(fcntl(file, F_GETLK, &seen), 0);
    expect_is(seen.l_type, F_UNLCK);
}

FACT(children_do_not_get_the_agents_memory) {
    begin();
    u64 plain = map(it, 1);
    expect_is(call(it, 0, SYS_madvise, staging, STAGING_PAGES * PAGE, MADV_DONTDUMP), 0);
    tell_fork(it, 0);
    struct target *child = child_of(it, 0);
    expect_is(has_flag(child, staging, "rd"), -1);
    expect_is(has_flag(child, plain, "rd"), 1);
    // And different advice keeps it from merging with its neighbours: its line in the maps is its own.
    expect_is(has_flag(it, staging, "dc"), 1);
    u64 beside = map_at(it, staging + STAGING_PAGES * PAGE, 4, PROT_READ | PROT_WRITE, MAP_FIXED_NOREPLACE);
    expect_is(has_flag(it, beside, "dc"), 0);
}

// Danger: stopping a process (job control, a debugger) stops its agent too, between two calls of a list.
FACT(stopping_a_process_stops_its_agent) {
    begin();
    start_agent(it);
    expect(call(it, AGENT, SYS_getpid, 0) == it->pid);
    // Every signal blocked, as the pager leaves it.
    u64 *all = argument(it, 0);
    *all = ~0ul;
    expect_is(call(it, AGENT, SYS_rt_sigprocmask, SIG_SETMASK, (u64)all, 0, 8), 0);
    kill(it->pid, SIGSTOP);
    siginfo_t stopped;
    expect_is(waitid(P_PID, (id_t)it->pid, &stopped, WSTOPPED), 0);
    tell(it, AGENT, ORDER_CALL(SYS_getpid, 0));
    expect(!answered_within(it, AGENT, 100));
    kill(it->pid, SIGCONT);
    expect_is(answer_of(it, AGENT).value, it->pid);
}

// Unless it is traced: its tracer is told of the stop, and may let it go on while all other threads stay stopped.
FACT(a_traced_agent_goes_on_in_a_stopped_process) {
    begin();
    start_agent(it);
    expect(call(it, AGENT, SYS_getpid, 0) == it->pid);
    pid_t agent = it->tids[AGENT];
    if (ptrace(PTRACE_SEIZE, agent, 0, 0)) skip("ptrace: %m");
    kill(it->pid, SIGSTOP);
    int status = 0;
    expect_is(waitpid(agent, &status, __WALL), agent);
    expect(status >> 8 == (SIGSTOP | PTRACE_EVENT_STOP << 8));
    expect_is(ptrace(PTRACE_CONT, agent, 0, 0), 0);
    expect_is(call(it, AGENT, SYS_getpid, 0), it->pid);
    tell(it, 2, ORDER_CALL(SYS_getpid, 0));
    expect(!answered_within(it, 2, 50));
    kill(it->pid, SIGCONT);
    expect_is(answer_of(it, 2).value, it->pid);
}

enum { LINE = 512 };

static void first_line(pid_t thread, const char *name, char line[LINE]) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", thread, name);
    FILE *file = fopen(path, "r");
    if (!file || !fgets(line, LINE, file)) fail("%s: %m", path);
    fclose(file);
}

static char state_of(pid_t thread) {
    char line[LINE];
    first_line(thread, "stat", line);
    return strrchr(line, ')')[2];
}

// Danger: what was stopped when it had read a byte is told of as what waits for one.
FACT(a_stop_behind_read_looks_like_waiting_there) {
    begin();
    int *pipe = argument(it, 0);
    expect_is(call(it, 0, SYS_pipe2, (u64)pipe, 0), 0);
    start_agent(it);
    pid_t agent = it->tids[AGENT];
    tell(it, AGENT, ORDER_CALL(SYS_read, (u64)pipe[0], (u64)(pipe + 2), 1));
    char waits[LINE], stopped[LINE], descriptor[32];
    snprintf(descriptor, sizeof descriptor, "0 0x%x ", pipe[0]);
    for (double until = now() + 2; first_line(agent, "syscall", waits), strncmp(waits, descriptor, strlen(descriptor));)
        if (now() > until) fail("it does not read: %s", waits);
    expect(state_of(agent) == 'S');

    int status = 0;
    if (ptrace(PTRACE_SEIZE, agent, 0, 0)) skip("ptrace: %m");
    expect_is(ptrace(PTRACE_INTERRUPT, agent, 0, 0), 0);
    expect_is(waitpid(agent, &status, __WALL), agent);
    // Into the call, which is made again, and out of it.
    expect_is(ptrace(PTRACE_SYSCALL, agent, 0, 0), 0);
    expect_is(waitpid(agent, &status, __WALL), agent);
    expect_is(ptrace(PTRACE_SYSCALL, agent, 0, 0), 0);
    expect_is(call(it, 2, SYS_write, (u64)pipe[1], (u64)pipe, 1), 1);
    expect_is(waitpid(agent, &status, __WALL), agent);
    kill(it->pid, SIGSTOP);
    expect_is(ptrace(PTRACE_DETACH, agent, 0, 0), 0);
    for (double until = now() + 2; state_of(agent) != 'T';)
        if (now() > until) fail("it does not stop: %c", state_of(agent));
    first_line(agent, "syscall", stopped);
    expect(!strcmp(stopped, waits));
    kill(it->pid, SIGCONT);
    expect_is(answer_of(it, AGENT).value, 1);
}

// A thread of the process with any of these flags in /proc/PID/stat; 0 when there is none.
static pid_t thread_with(pid_t pid, unsigned flags) {
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    pid_t found = 0;
    for (struct dirent *task; !found && tasks && (task = readdir(tasks));) {
        snprintf(path, sizeof path, "/proc/%d/task/%.20s/stat", pid, task->d_name);
        FILE *stat = fopen(path, "r");
        if (!stat) continue;
        unsigned has = 0;
        if (fgets(line, sizeof line, stat) && sscanf(strrchr(line, ')') + 1, " %*c %*d %*d %*d %*d %*d %u", &has) == 1 && has & flags)
            found = atoi(task->d_name);
        fclose(stat);
    }
    if (tasks) closedir(tasks);
    return found;
}

FACT(a_thread_of_the_kernels_own_stops_and_makes_no_step) {
    begin();
    struct io_uring_params *how = memset(argument(it, 0), 0, sizeof *how);
    how->flags = IORING_SETUP_SQPOLL;
    long ring = call(it, 0, SYS_io_uring_setup, 8, (u64)how);
    if (ring < 0) skip("io_uring_setup: %s", strerror((int)-ring));
    // PF_IO_WORKER before 6.4, PF_USER_WORKER since.
    pid_t own = thread_with(it->pid, 0x10 | 0x4000);
    expect(own > 0);
    if (ptrace(PTRACE_SEIZE, own, 0, 0)) skip("ptrace: %m");
    expect_is(ptrace(PTRACE_INTERRUPT, own, 0, 0), 0);
    int status = 0;
    expect_is(waitpid(own, &status, __WALL), own);
    expect(WIFSTOPPED(status));
    expect_is(ptrace(PTRACE_SINGLESTEP, own, 0, 0), 0);
    usleep(50 * 1000);
    expect_is(waitpid(own, &status, __WALL | WNOHANG), 0);
}

FACT(a_new_program_ends_the_agent) {
    begin();
    start_agent(it);
    u64 memory = managed(1, 7);
    evict(memory, 1);
    char *words = argument(it, 0);
    strcpy(words, "/bin/sleep");
    strcpy(words + 64, "60");
    char **list = (char **)(words + 128);
    list[0] = words, list[1] = words + 64, list[2] = NULL;
    tell(it, 0, ORDER_CALL(SYS_execve, (u64)words, (u64)list, 0));
    char byte;
    struct pollfd gone = { it->ours[AGENT], POLLIN, 0 };
    // The socket's other end is inherited by nobody: close-on-exec.
    expect_is(poll(&gone, 1, 2000), 1);
    expect_is(read(it->ours[AGENT], &byte, 1), 0);
    expect_is(zeros(uffd.fd, memory, 1), -ESRCH);
}

// One thread that writes to its end of a pair, and then waits there; how often it is woken by the other end's reading what it wrote.
struct end { int fd; int tid; };

static void *writes_and_waits(void *argument) {
    struct end *end = argument;
    char byte = 0;
    __atomic_store_n(&end->tid, (int)syscall(SYS_gettid), __ATOMIC_RELEASE);
    while (send(end->fd, &byte, 1, MSG_NOSIGNAL) == 1 && read(end->fd, &byte, 1) == 1) {}
    return NULL;
}

static long field_of(int tid, const char *name) {
    char path[64], line[256], value[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/status", tid);
    FILE *file = fopen(path, "r");
    if (!file) fail("%s: %m", path);
    long found = -1;
    while (found < 0 && fgets(line, sizeof line, file)) {
        if (strncmp(line, name, strlen(name)) == 0 && sscanf(line + strlen(name), " %63s", value) == 1) {
            found = value[0] >= 'A' ? value[0] : atol(value);
        }
    }
    fclose(file);
    return found;
}

static long wakes_by_reading(int type) {
    enum { ROUNDS = 20 };
    int pair[2];
    pthread_t thread;
    expect_is(socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, pair), 0);
    struct end end = { pair[1], 0 };
    expect_is(pthread_create(&thread, NULL, writes_and_waits, &end), 0);
    while (__atomic_load_n(&end.tid, __ATOMIC_ACQUIRE) == 0) pause_ms(1);
    long wakes = 0;
    for (int round = 0; round < ROUNDS; round++) {
        char byte;
        struct pollfd written = { pair[0], POLLIN, 0 };
        expect_is(poll(&written, 1, 5000), 1);
        while (field_of(end.tid, "State:") != 'S') pause_ms(1);
        // It is counted after it can be seen.
        pause_ms(2);
        long before = field_of(end.tid, "voluntary_ctxt_switches:");
        expect_is(read(pair[0], &byte, 1), 1);
        pause_ms(2);
        while (field_of(end.tid, "State:") != 'S') pause_ms(1);
        wakes += field_of(end.tid, "voluntary_ctxt_switches:") > before;
        expect_is(write(pair[0], &byte, 1), 1);
    }
    close(pair[0]);
    pthread_join(thread, NULL);
    close(pair[1]);
    return wakes;
}

FACT(reading_from_a_stream_wakes_its_writer) {
    long stream = wakes_by_reading(SOCK_STREAM), packets = wakes_by_reading(SOCK_SEQPACKET);
    printf("of 20 times, %ld for a stream and %ld for packets\n", stream, packets);
    expect_is(packets, 0);
    if (stream < 10) fail("only %ld", stream);
}
