// fill: holds memory with known content and does what it is told, a command a line on standard input.
//
//   fill MIB [--once]     prints READY when filled, then an answer a command: OK, or BAD and what is wrong
//
// verify | rewrite | churn MS | hammer THREADS | fork | snapshot PAGES MS | close | seccomp [threads] | mlock PAGE COUNT | mlockall FLAGS |
// munlock PAGE COUNT | drop PAGE COUNT | grow MIB | blank MIB | where | dump FILE | exec | abort | exit STATUS.   --once: verify, and be done.
#include "pattern.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static uint64_t *memory, pages, key = 1;

// That it is installed is seen from outside.
static void take_note(int signal) { (void)signal; }

static bool verify(void) {
    for (uint64_t i = 0; i < pages; i++)
        if (!pattern_right(memory, key, i)) return false;
    return true;
}

static void fill(uint64_t from) {
    for (uint64_t i = from; i < pages; i++) pattern_write(memory, key, i);
}

// Reads and rewrites pages at random, which under a budget is a fault each.
static bool churn(double seconds, uint64_t random) {
    for (double end = seconds_now() + seconds; seconds_now() < end;)
        for (int i = 0; i < 32; i++) {
            uint64_t page = mix(random += 0x9e3779b97f4a7c15u) % pages;
            if (!pattern_right(memory, key, page)) return false;
            if (random >> 63) memory[page * WORDS + 9] = pattern_word(key, page, 9);
        }
    return true;
}

static void *hammer(void *seed) {
    if (!churn(1e9, (uint64_t)(uintptr_t)seed)) _exit(1);
    return NULL;
}

// The child writes what only it may see, while the parent looks at its own.
static bool ended_well(pid_t pid) {
    int status;
    return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

// The child has what its parent had at the fork, and looks at it last. The parent writes to half of what was resident then,
// which the kernel copies for it.
static bool keep_a_snapshot(uint64_t resident, unsigned ms) {
    for (uint64_t i = 0; i < resident; i++)
        if (!pattern_right(memory, key, i)) return false;
    pid_t pid = fork();
    if (pid == 0) {
        usleep(ms * 1000);
        _exit(verify() ? 0 : 1);
    }
    for (uint64_t i = 0; i < resident / 2; i++) memory[i * WORDS + 9] = pattern_word(key, i, 9);
    return ended_well(pid) && verify();
}

static bool fork_and_verify(void) {
    pid_t pid = fork();
    if (pid == 0) {
        if (!verify()) _exit(1);
        key += 1000;
        fill(pages / 2);
        for (uint64_t i = 0; i < pages; i++)
            if (!pattern_right(memory, i < pages / 2 ? key - 1000 : key, i)) _exit(1);
        _exit(0);
    }
    bool right = pid > 0 && verify();
    return ended_well(pid) && right;
}

// All but a few system calls kill the process; `threads`: also when other threads make them.
static bool confine(bool threads) {
    static const uint32_t allowed[] = {SYS_read, SYS_write, SYS_futex, SYS_nanosleep, SYS_clock_nanosleep, SYS_exit, SYS_exit_group,
                                       SYS_rt_sigreturn, SYS_restart_syscall, SYS_mmap, SYS_munmap, SYS_brk, SYS_madvise};
    enum { N = sizeof allowed / sizeof *allowed };
    struct sock_filter filter[N + 3];
    filter[0] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (unsigned i = 0; i < N; i++) filter[1 + i] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i], (uint8_t)(N - i), 0);
    filter[N + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    filter[N + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {N + 3, filter};
    return !prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) &&
           !syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, threads ? SECCOMP_FILTER_FLAG_TSYNC : 0, &program);
}

static bool dump(const char *path) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    for (uint64_t at = 0; fd >= 0 && at < pages * PAGE;) {
        ssize_t n = write(fd, (char *)memory + at, pages * PAGE - at < 1 << 20 ? pages * PAGE - at : 1 << 20);
        if (n <= 0) return false;
        at += (uint64_t)n;
    }
    return fd >= 0 && !close(fd);
}

static bool obey(char *line) {
    char word[16] = "", rest[512] = "";
    unsigned long long a = 0, n = 0;
    sscanf(line, "%15s %511s", word, rest);
    sscanf(line, "%*s %llu %llu", &a, &n);
    if (!strcmp(word, "verify")) return verify();
    if (!strcmp(word, "rewrite")) return key++, fill(0), verify();
    if (!strcmp(word, "churn")) return churn((double)a / 1000, key);
    if (!strcmp(word, "fork")) return fork_and_verify();
    if (!strcmp(word, "snapshot")) return keep_a_snapshot(a, (unsigned)n);
    if (!strcmp(word, "close")) return !syscall(SYS_close_range, 3, ~0u, 0);
    if (!strcmp(word, "seccomp")) return confine(!strcmp(rest, "threads"));
    if (!strcmp(word, "mlock")) return !mlock(memory + a * WORDS, n * PAGE);
    if (!strcmp(word, "munlock")) return !munlock(memory + a * WORDS, n * PAGE);
    if (!strcmp(word, "mlockall")) return !mlockall((int)a);
    if (!strcmp(word, "munlockall")) return !munlockall();
    if (!strcmp(word, "dump")) return dump(rest);
    if (!strcmp(word, "abort")) abort();
    if (!strcmp(word, "blank")) {  // touched, and all zeros
        volatile char *blank = map_or_die(a << 20);
        for (uint64_t i = 0; i < a << 20; i += PAGE) blank[i] = 0;
        return true;
    }
    if (!strcmp(word, "exec")) {
        char mib[16];
        snprintf(mib, sizeof mib, "%u", (unsigned)(pages / 256));
        return execl("/proc/self/exe", "fill", mib, "--once", NULL), false;
    }
    if (!strcmp(word, "exit")) _exit((int)a);
    if (!strcmp(word, "where")) return say("AT %p %llu\n", (void *)memory, (unsigned long long)pages * PAGE), true;
    if (!strcmp(word, "hammer")) {
        pthread_t id;
        for (uint64_t i = 1; i <= a; i++)
            if (pthread_create(&id, NULL, hammer, (void *)(uintptr_t)(i * 77))) return false;
        return true;
    }
    if (!strcmp(word, "drop")) {  // given back: zeros, then filled again
        if (madvise(memory + a * WORDS, n * PAGE, MADV_DONTNEED)) return false;
        for (uint64_t i = a * WORDS; i < (a + n) * WORDS; i++)
            if (((volatile uint64_t *)memory)[i]) return false;
        for (uint64_t i = a; i < a + n; i++) pattern_write(memory, key, i);
        return true;
    }
    if (!strcmp(word, "grow")) {
        uint64_t old = pages;
        void *p = mremap(memory, pages * PAGE, pages * PAGE + (a << 20), MREMAP_MAYMOVE);
        if (p == MAP_FAILED) return false;
        memory = p, pages += a * 256;
        return fill(old), true;
    }
    say( "what is '%s'?\n", word);
    return false;
}

int main(int argc, char **argv) {
    signal(SIGTRAP, take_note);
    if (argc < 2) return fprintf(stderr, "fill: see the top of fill.c\n"), 2;
    pages = strtoull(argv[1], NULL, 10) * 256;
    memory = map_or_die(pages * PAGE);
    fill(0);
    if (argc > 2 && !strcmp(argv[2], "--once")) {
        bool right = verify() && verify();
        return say(right ? "OK\n" : "BAD\n"), !right;
    }
    say( "READY\n");
    static char line[1024];
    size_t have = 0;
    for (;;) {
        char *end = memchr(line, '\n', have);
        if (!end) {
            ssize_t n = read(0, line + have, sizeof line - 1 - have);
            if (n < 0 && errno == EINTR) return say( "BAD: read() gave EINTR\n"), 1;
            if (n <= 0) return 0;
            have += (size_t)n;
            continue;
        }
        *end = 0;
        if (obey(line)) say("OK\n");
        else say("BAD %s\n", line);
        have -= (size_t)(end + 1 - line);
        memmove(line, end + 1, have);
    }
}
