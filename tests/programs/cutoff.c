// cutoff: kills a pager that has just read a message from a userfaultfd, and has not looked at it; or one that is just tracing a thread.
//
//   cutoff PID EVENT N          of process PID, in whichever of its threads reads the N-th message of kind EVENT: fork, remap, remove or unmap.
//                               Says READY when it looks, and KILLED when it has done so, or GONE when the pager ended before.
//   cutoff PID ptrace N         the same at the N-th beginning or end of a ptrace call.
//   cutoff start ptrace N PROGRAM ARGUMENTS...    of a pager that it starts itself.
#include "pattern.h"
#include <dirent.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>

enum { TRACES = 256 };

static int kind_of(const char *name) {
    const struct { const char *name; int event; } kinds[] = {
        { "ptrace", TRACES },
        { "fork", UFFD_EVENT_FORK }, { "remap", UFFD_EVENT_REMAP }, { "remove", UFFD_EVENT_REMOVE }, { "unmap", UFFD_EVENT_UNMAP },
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (!strcmp(name, kinds[i].name)) return kinds[i].event;
    return -1;
}

static bool reads_messages(pid_t pid, int fd) {
    char path[64], link[64] = "";
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    return readlink(path, link, sizeof link - 1) > 0 && !strcmp(link, "anon_inode:[userfaultfd]");
}

// How many messages of the kind the call that has just ended has brought.
static int brought(pid_t pid, const struct user_regs_struct *registers, int event) {
    struct uffd_msg messages[64];
    size_t bytes = registers->rax < sizeof messages ? registers->rax : sizeof messages;
    if (!reads_messages(pid, registers->rdi)) return 0;
    struct iovec here = { messages, bytes }, there = { (void *)registers->rsi, bytes };
    if (process_vm_readv(pid, &here, 1, &there, 1, 0) != (ssize_t)bytes) return 0;
    int found = 0;
    for (size_t i = 0; i < bytes / sizeof *messages; i++) found += messages[i].event == event;
    return found;
}

static int seize_all(pid_t pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    if (!tasks) return -1;
    for (struct dirent *task; (task = readdir(tasks));) {
        pid_t thread = atoi(task->d_name);
        if (thread <= 0) continue;
        if (ptrace(PTRACE_SEIZE, thread, 0, PTRACE_O_TRACESYSGOOD) || ptrace(PTRACE_INTERRUPT, thread, 0, 0)) return -1;
    }
    return closedir(tasks);
}

// Starts a program all of whose threads are traced.
static pid_t start(char **argv) {
    pid_t pid = fork();
    if (pid == 0) {
        raise(SIGSTOP);
        execv(argv[0], argv);
        _exit(127);
    }
    if (pid < 0 || waitpid(pid, NULL, WUNTRACED) != pid) return -1;
    if (ptrace(PTRACE_SEIZE, pid, 0, PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL)) return -1;
    return kill(pid, SIGCONT) ? -1 : pid;
}

// How much of what is counted the stop of a thread before or behind a call is.
static int counts(pid_t pid, const struct user_regs_struct *registers, int event) {
    if (event == TRACES) return registers->orig_rax == SYS_ptrace;
    long answer = registers->rax;
    bool may_be = registers->orig_rax == SYS_read && answer > 0 && answer % sizeof(struct uffd_msg) == 0;
    return may_be ? brought(pid, registers, event) : 0;
}

int main(int argc, char **argv) {
    if (argc < 4 || kind_of(argv[2]) < 0) return 2;
    bool starts = argc > 4 && !strcmp(argv[1], "start");
    pid_t pid = starts ? start(argv + 4) : atoi(argv[1]);
    int event = kind_of(argv[2]), left = atoi(argv[3]);
    if (starts ? pid < 0 : seize_all(pid)) return perror("seizing"), 1;
    say("READY\n");
    for (;;) {
        int status = 0;
        pid_t thread = waitpid(-1, &status, __WALL);
        if (thread < 0) return say("GONE\n"), 1;
        if (!WIFSTOPPED(status)) continue;
        int signal = 0;
        if (WSTOPSIG(status) == (SIGTRAP | 0x80)) {
            struct user_regs_struct registers;
            if (ptrace(PTRACE_GETREGS, thread, 0, &registers)) continue;
            left -= counts(pid, &registers, event);
            if (left <= 0) {
                if (kill(pid, SIGKILL)) return perror("killing"), 1;
                return say("KILLED\n"), 0;
            }
        } else if (status >> 16 == 0) {
            signal = WSTOPSIG(status);
        } else if (status >> 16 == PTRACE_EVENT_STOP && (WSTOPSIG(status) == SIGSTOP || WSTOPSIG(status) == SIGTSTP)) {
            // It is stopped as a whole, and goes on when it is continued.
            ptrace(PTRACE_LISTEN, thread, 0, 0);
            continue;
        }
        ptrace(PTRACE_SYSCALL, thread, 0, signal);
    }
}
