// bare: what a fault over TCP cannot do without: a round trip of 4 KiB over loopback TCP, and a fault that a userfaultfd serves.
//
//   bare ROUNDS
//
// Each is measured with both sides on one CPU, and with one on each of two. The sides are processes, and both sleep while
// they wait. What is sent is taken at random from more memory than caches hold, as a server's pages are. Prints one JSON
// object with medians in microseconds.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, REQUEST = 24, ANSWER = PAGE + 36, PAGES = 49152 };

static void fail(const char *what) { perror(what); exit(2); }
static double now_us(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e6 + t.tv_nsec / 1e3; }
static int ascending(const void *a, const void *b) { double x = *(double *)a, y = *(double *)b; return (x > y) - (x < y); }
static double median(double *us, int count) { qsort(us, count, sizeof *us, ascending); return us[count / 2]; }

static void confine(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set)) fail("bare: sched_setaffinity");
}

static void whole(int socket, char *bytes, size_t count, int sends) {
    for (size_t done = 0; done < count;) {
        ssize_t n = sends ? send(socket, bytes + done, count - done, 0) : recv(socket, bytes + done, count - done, 0);
        if (n <= 0) _exit(0);
        done += n;
    }
}

static pid_t child(int cpu) {
    pid_t pid = fork();
    if (pid < 0) fail("bare: fork");
    if (!pid) { prctl(PR_SET_PDEATHSIG, SIGKILL); confine(cpu); }
    return pid;
}

static double tcp_us(int rounds, int client_cpu, int server_cpu) {
    static char answer[ANSWER], request[REQUEST];
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    if (bind(listener, (void *)&at, size) || listen(listener, 1) || getsockname(listener, (void *)&at, &size)) fail("bare: listen");
    pid_t server = child(server_cpu);
    if (!server) {
        int s = accept(listener, 0, 0);
        setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        char *pages = malloc((size_t)(PAGES + 1) * PAGE);
        memset(pages, 1, (size_t)(PAGES + 1) * PAGE);
        for (uint64_t x = 1;; x = x * 6364136223846793005u + 1) {
            whole(s, request, REQUEST, 0);
            whole(s, pages + (x >> 40) % PAGES * PAGE, ANSWER, 1);
        }
    }
    confine(client_cpu);
    int s = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(s, (void *)&at, size)) fail("bare: connect");
    setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    double *us = calloc(rounds, sizeof *us);
    for (int i = 0; i < rounds; i++) {
        double start = now_us();
        whole(s, request, REQUEST, 1);
        whole(s, answer, ANSWER, 0);
        us[i] = now_us() - start;
    }
    close(s);
    close(listener);
    waitpid(server, 0, 0);
    double result = median(us, rounds);
    free(us);
    return result;
}

static double fault_us(int rounds, int target_cpu, int pager_cpu) {
    int pair[2];
    char *memory = mmap(0, (size_t)rounds * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int uffd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    struct uffdio_api api = {.api = UFFD_API};
    if (memory == MAP_FAILED || uffd < 0 || ioctl(uffd, UFFDIO_API, &api)) fail("bare: userfaultfd");
    struct uffdio_register range = {.range = {(uintptr_t)memory, (size_t)rounds * PAGE}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    if (ioctl(uffd, UFFDIO_REGISTER, &range) || pipe(pair)) fail("bare: register");
    pid_t pager = child(pager_cpu);
    if (!pager) {
        static char page[PAGE] = {1};
        // In its own address space: the ioctls act on the parent's.
        for (;;) {
            struct pollfd wait = {uffd, POLLIN, 0};
            struct uffd_msg message;
            poll(&wait, 1, -1);
            if (read(uffd, &message, sizeof message) != sizeof message) continue;
            struct uffdio_copy copy = {.dst = message.arg.pagefault.address & ~(uint64_t)(PAGE - 1), .src = (uintptr_t)page, .len = PAGE};
            if (ioctl(uffd, UFFDIO_COPY, &copy)) fail("bare: UFFDIO_COPY");
        }
    }
    confine(target_cpu);
    double *us = calloc(rounds, sizeof *us);
    for (int i = 0; i < rounds; i++) {
        double start = now_us();
        if (((volatile char *)memory)[(size_t)i * PAGE] != 1) fail("bare: a wrong byte");
        us[i] = now_us() - start;
    }
    kill(pager, SIGKILL);
    waitpid(pager, 0, 0);
    close(uffd);
    munmap(memory, (size_t)rounds * PAGE);
    double result = median(us, rounds);
    free(us);
    return result;
}

int main(int argc, char **argv) {
    int rounds = argc == 2 ? atoi(argv[1]) : 0, first = -1, second = -1;
    cpu_set_t allowed;
    if (rounds < 1) { fprintf(stderr, "bare: give the number of rounds\n"); return 2; }
    sched_getaffinity(0, sizeof allowed, &allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE && second < 0; cpu++)
        if (CPU_ISSET(cpu, &allowed)) *(first < 0 ? &first : &second) = cpu;
    if (second < 0) second = first;
    printf("{\"tcp_one_cpu_us\": %.2f, ", tcp_us(rounds, first, first));
    printf("\"tcp_two_cpus_us\": %.2f, ", tcp_us(rounds, first, second));
    printf("\"fault_one_cpu_us\": %.2f, ", fault_us(rounds, first, first));
    printf("\"fault_two_cpus_us\": %.2f}\n", fault_us(rounds, first, second));
    return 0;
}
