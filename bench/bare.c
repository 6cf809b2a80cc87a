// bare: what a fault over TCP cannot do without: a round trip of 4 KiB over loopback TCP, and a fault that a userfaultfd serves;
// and what a memory server cannot do without: pages by the batch, received and sent.
//
//   bare ROUNDS
//   bare get|put SECONDS CONNECTIONS BATCHES PAGES     so many batches under way on each connection, of so many pages
//
// Each fault and round trip is measured with both sides on one CPU, and with one on each of two; medians in microseconds. Batches
// are served by one process on the first CPU to one on the second, and the CPU time is the server's. The sides are processes, and
// sleep while they wait. What is sent is taken at random from more memory than caches hold, as a server's pages are, and what is
// received is put there. Prints one JSON object.
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
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, REQUEST = 24, ANSWER = PAGE + 36, PAGES = 49152, CONNECTIONS_MAX = 64, BATCH_MAX = 256 };

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

static struct sockaddr_in at;

static int listener(void) {
    socklen_t size = sizeof at;
    int s = socket(AF_INET, SOCK_STREAM, 0);
    at = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(s, (void *)&at, size) || listen(s, CONNECTIONS_MAX) || getsockname(s, (void *)&at, &size)) fail("bare: listen");
    return s;
}

static int at_once(int s) {
    int one = 1;
    if (s < 0 || setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one)) fail("bare: socket");
    return s;
}

static int connected(void) {
    int s = at_once(socket(AF_INET, SOCK_STREAM, 0));
    if (connect(s, (void *)&at, sizeof at)) fail("bare: connect");
    return s;
}

// Of more than caches hold, and one to spare; in huge pages where there are any, as a server has them.
static char *many_pages(void) {
    size_t huge = 2 << 20, size = ((size_t)(PAGES + 1) * PAGE + huge - 1) / huge * huge;
    char *pages = aligned_alloc(huge, size);
    if (!pages) fail("bare: memory");
    madvise(pages, size, MADV_HUGEPAGE);
    memset(pages, 1, size);
    return pages;
}

static char *any_page(char *pages) {
    static uint64_t x = 1;
    x = x * 6364136223846793005u + 1;
    return pages + (x >> 40) % PAGES * PAGE;
}

static double tcp_us(int rounds, int client_cpu, int server_cpu) {
    static char answer[ANSWER], request[REQUEST];
    int door = listener();
    pid_t server = child(server_cpu);
    if (!server) {
        int s = at_once(accept(door, 0, 0));
        for (char *pages = many_pages();;) {
            whole(s, request, REQUEST, 0);
            whole(s, any_page(pages), ANSWER, 1);
        }
    }
    confine(client_cpu);
    int s = connected();
    double *us = calloc(rounds, sizeof *us);
    for (int i = 0; i < rounds; i++) {
        double start = now_us();
        whole(s, request, REQUEST, 1);
        whole(s, answer, ANSWER, 0);
        us[i] = now_us() - start;
    }
    close(s);
    close(door);
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

// A batch on its way: a head of REQUEST bytes for each page and, in one of the two directions, the pages.
struct batch {
    char heads[BATCH_MAX * REQUEST];
    size_t done;
};

// Takes what has come of a batch, its pages wherever `pages` says; whether that was the last of it.
static int taken(int socket, struct batch *in, int count, char *pages, int with_pages) {
    struct iovec parts[BATCH_MAX + 1] = {{in->heads, (size_t)count * REQUEST}};
    size_t size = (size_t)count * (REQUEST + (with_pages ? PAGE : 0)), skip = in->done;
    int used = 1, first = 0;
    for (; with_pages && used <= count; used++) parts[used] = (struct iovec){any_page(pages), PAGE};
    for (; skip >= parts[first].iov_len; first++) skip -= parts[first].iov_len;
    parts[first].iov_base = (char *)parts[first].iov_base + skip;
    parts[first].iov_len -= skip;
    ssize_t n = readv(socket, parts + first, used - first);
    if (n <= 0) _exit(0);
    in->done = (in->done + n) % size;
    return in->done == 0;
}

static void send_batch(int socket, int count, char *pages, int with_pages) {
    static char heads[BATCH_MAX * REQUEST];
    struct iovec parts[BATCH_MAX + 1] = {{heads, (size_t)count * REQUEST}};
    int used = 1;
    for (; with_pages && used <= count; used++) parts[used] = (struct iovec){any_page(pages), PAGE};
    size_t size = (size_t)count * (REQUEST + (with_pages ? PAGE : 0));
    ssize_t n = writev(socket, parts, used);
    if (n < 0) _exit(0);
    // A blocking socket takes all, unless a signal comes.
    if ((size_t)n != size) fail("bare: writev");
}

// Answers, or asks anew, whenever a batch is there on one of the connections; until `until`, or for ever.
static uint64_t batches(int *sockets, int connections, int count, char *pages, int receives_pages, int sends_pages, double until) {
    static struct batch in[CONNECTIONS_MAX];
    int poller = epoll_create1(0);
    uint64_t total = 0;
    for (int i = 0; i < connections; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = i};
        if (epoll_ctl(poller, EPOLL_CTL_ADD, sockets[i], &event)) fail("bare: epoll");
    }
    while (!until || now_us() < until) {
        struct epoll_event events[CONNECTIONS_MAX];
        int ready = epoll_wait(poller, events, CONNECTIONS_MAX, -1);
        for (int i = 0; i < ready; i++) {
            int which = events[i].data.u32;
            if (!taken(sockets[which], &in[which], count, pages, receives_pages)) continue;
            total += count;
            send_batch(sockets[which], count, pages, sends_pages);
        }
    }
    close(poller);
    return total;
}

static void serve_batches(int puts, double seconds, int connections, int under_way, int count, int client_cpu, int server_cpu) {
    int sockets[CONNECTIONS_MAX], door = listener();
    pid_t server = child(server_cpu);
    char *pages = many_pages();
    if (!server) {
        for (int i = 0; i < connections; i++) sockets[i] = at_once(accept(door, 0, 0));
        batches(sockets, connections, count, pages, puts, !puts, 0);
    }
    confine(client_cpu);
    for (int i = 0; i < connections; i++) sockets[i] = connected();
    for (int i = 0; i < connections * under_way; i++) send_batch(sockets[i % connections], count, pages, puts);
    // Not counted: the first answer comes when the server has its pages, too.
    batches(sockets, connections, count, pages, !puts, puts, now_us() + 2e5);
    clockid_t clock;
    struct timespec before, after;
    if (clock_getcpuclockid(server, &clock) || clock_gettime(clock, &before)) fail("bare: the server's clock");
    double start = now_us();
    uint64_t total = batches(sockets, connections, count, pages, !puts, puts, start + seconds * 1e6);
    double took = now_us() - start;
    if (clock_gettime(clock, &after)) fail("bare: the server's clock");
    double cpu = after.tv_sec - before.tv_sec + (after.tv_nsec - before.tv_nsec) / 1e9;
    kill(server, SIGKILL);
    waitpid(server, 0, 0);
    printf("{\"pages\": %llu, \"seconds\": %.6f, \"cpu_seconds\": %.6f}\n", (unsigned long long)total, took / 1e6, cpu);
}

static int number(const char *text, int most) {
    int n = atoi(text);
    if (n < 1 || n > most) { fprintf(stderr, "bare: %s is not a number from 1 to %d\n", text, most); exit(2); }
    return n;
}

int main(int argc, char **argv) {
    int first = -1, second = -1;
    cpu_set_t allowed;
    sched_getaffinity(0, sizeof allowed, &allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE && second < 0; cpu++)
        if (CPU_ISSET(cpu, &allowed)) *(first < 0 ? &first : &second) = cpu;
    if (second < 0) second = first;
    int puts = argc == 6 && !strcmp(argv[1], "put");
    if (argc == 6 && (puts || !strcmp(argv[1], "get"))) {
        double seconds = atof(argv[2]);
        if (!(seconds > 0)) { fprintf(stderr, "bare: %s are no seconds\n", argv[2]); return 2; }
        serve_batches(puts, seconds, number(argv[3], CONNECTIONS_MAX), number(argv[4], 64), number(argv[5], BATCH_MAX), second, first);
        return 0;
    }
    if (argc != 2) { fprintf(stderr, "bare: give the number of rounds, or: get|put SECONDS CONNECTIONS BATCHES PAGES\n"); return 2; }
    int rounds = number(argv[1], INT32_MAX);
    printf("{\"tcp_one_cpu_us\": %.2f, ", tcp_us(rounds, first, first));
    printf("\"tcp_two_cpus_us\": %.2f, ", tcp_us(rounds, first, second));
    printf("\"fault_one_cpu_us\": %.2f, ", fault_us(rounds, first, first));
    printf("\"fault_two_cpus_us\": %.2f}\n", fault_us(rounds, first, second));
    return 0;
}
