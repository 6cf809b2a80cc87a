// lesser: runs a command on a kernel whose userfaultfd offers less than the real one does.
//
//   lesser FEATURES COMMAND ARGUMENTS...     FEATURES in hexadecimal; exit status: the command's, or 125
//
// A seccomp filter hands each handshake (UFFDIO_API) of the command and its descendants to us, and we answer as such a
// kernel would: what it does not offer is EINVAL, and a question is answered with what it offers.
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static void give_up(const char *what) {
    perror(what);
    _exit(125);
}

static int filter_handshakes(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, UFFDIO_API, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program);
}

static void answer(int listener, uint64_t offered) {
    struct seccomp_notif asked = {0};
    if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &asked) != 0) return; // it ended meanwhile
    struct uffdio_api api;
    struct iovec ours = {&api, sizeof api}, theirs = {(void *)asked.data.args[2], sizeof api};
    struct seccomp_notif_resp reply = {.id = asked.id};
    if (process_vm_readv((pid_t)asked.pid, &ours, 1, &theirs, 1, 0) != sizeof api) {
        reply.error = -EFAULT;
    } else if (api.features & ~offered) {
        memset(&api, 0, sizeof api);
        process_vm_writev((pid_t)asked.pid, &ours, 1, &theirs, 1, 0);
        reply.error = -EINVAL;
    } else if (api.features == 0) {
        api.features = offered;
        process_vm_writev((pid_t)asked.pid, &ours, 1, &theirs, 1, 0);
    } else {
        reply.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
    }
    ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &reply);
}

int main(int argc, char **argv) {
    int told[2], taken[2], number;
    if (argc < 3 || pipe(told) != 0 || pipe(taken) != 0) give_up("lesser FEATURES COMMAND...");
    pid_t child = fork();
    if (child == 0) {
        char byte;
        if ((number = filter_handshakes()) < 0) give_up("seccomp");
        if (write(told[1], &number, sizeof number) != sizeof number || read(taken[0], &byte, 1) != 1) _exit(125);
        for (int fd = 3; fd < 16; fd++) close(fd);
        execvp(argv[2], argv + 2);
        give_up(argv[2]);
    }
    if (read(told[0], &number, sizeof number) != sizeof number) return 125;
    int handle = (int)syscall(SYS_pidfd_open, child, 0), listener = (int)syscall(SYS_pidfd_getfd, handle, number, 0);
    if (listener < 0 || write(taken[1], "", 1) != 1) give_up("pidfd_getfd");
    // Hung up when nobody under the filter is left.
    for (struct pollfd ready = {listener, POLLIN, 0}; poll(&ready, 1, -1) > 0 && !(ready.revents & POLLHUP);)
        answer(listener, strtoull(argv[1], 0, 16));
    int status;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
