// sleeper: is asleep in a system call with a time-out, and tells how that went.
//
//   sleeper KIND MS MIB THREADS     READY; from each thread SLEPT milliseconds result errno; then OK when the memory is right
#include "pattern.h"
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/syscall.h>

static const char *kind;
static long ms;
static pthread_barrier_t started;

static long sleep_once(void) {
    struct timespec span = {ms / 1000, ms % 1000 * 1000000};
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) return -2;  // nothing ever comes
    struct pollfd waited = {ends[0], POLLIN, 0};
    fd_set set;
    FD_ZERO(&set);
    FD_SET(ends[0], &set);
    if (!strcmp(kind, "nanosleep")) return nanosleep(&span, NULL);
    if (!strcmp(kind, "until")) {  // to a point in time
        clock_gettime(CLOCK_MONOTONIC, &span);
        span.tv_nsec += ms % 1000 * 1000000, span.tv_sec += ms / 1000 + span.tv_nsec / 1000000000, span.tv_nsec %= 1000000000;
        return clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &span, NULL);
    }
    if (!strcmp(kind, "futex")) {
        uint32_t word = 7;
        return syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 7, &span, NULL, 0);
    }
    if (!strcmp(kind, "condition")) {
        pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
        pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
        clock_gettime(CLOCK_REALTIME, &span);
        span.tv_nsec += ms % 1000 * 1000000, span.tv_sec += ms / 1000 + span.tv_nsec / 1000000000, span.tv_nsec %= 1000000000;
        pthread_mutex_lock(&mutex);
        errno = pthread_cond_timedwait(&condition, &mutex, &span);
        return -1;
    }
    if (!strcmp(kind, "epoll")) {
        struct epoll_event event = {.events = EPOLLIN};
        int epoll = epoll_create1(0);
        epoll_ctl(epoll, EPOLL_CTL_ADD, ends[0], &event);
        return epoll_wait(epoll, &event, 1, (int)ms);
    }
    if (!strcmp(kind, "poll")) return poll(&waited, 1, (int)ms);
    if (!strcmp(kind, "ppoll")) return ppoll(&waited, 1, &span, NULL);
    if (!strcmp(kind, "select")) return select(ends[0] + 1, &set, NULL, NULL, &(struct timeval){ms / 1000, ms % 1000 * 1000});
    if (!strcmp(kind, "recv")) {
        setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &(struct timeval){ms / 1000, ms % 1000 * 1000}, sizeof(struct timeval));
        return recv(ends[0], &set, 1, 0);
    }
    if (!strcmp(kind, "sigtimedwait")) {
        sigset_t signals;
        sigemptyset(&signals), sigaddset(&signals, SIGUSR2);
        sigprocmask(SIG_BLOCK, &signals, NULL);
        return sigtimedwait(&signals, NULL, &span);
    }
    if (!strcmp(kind, "semaphore")) {
        int id = semget(IPC_PRIVATE, 1, 0600);
        struct sembuf down = {0, -1, 0};
        long result = semtimedop(id, &down, 1, &span);
        int error = errno;
        semctl(id, 0, IPC_RMID);
        errno = error;
        return result;
    }
    if (!strcmp(kind, "pipe")) return read(0, &set, 1);
    return fprintf(stderr, "sleeper: no such sleep: %s\n", kind), -2;
}

static void *sleeper(void *unused) {
    pthread_barrier_wait(&started);
    double from = seconds_now();
    errno = 0;
    long result = sleep_once();
    int error = errno;
    say( "SLEPT %.1f %ld %s\n", (seconds_now() - from) * 1000, result, result < 0 ? strerrorname_np(error) : "-");
    return unused;
}

int main(int argc, char **argv) {
    if (argc != 5) return fprintf(stderr, "sleeper: see the top of sleeper.c\n"), 2;
    kind = argv[1], ms = atol(argv[2]);
    uint64_t pages = strtoull(argv[3], NULL, 10) * 256;
    unsigned threads = (unsigned)atoi(argv[4]);
    uint64_t *memory = map_or_die(pages * PAGE);
    for (uint64_t i = 0; i < pages; i++) pattern_write(memory, 5, i);
    pthread_barrier_init(&started, NULL, threads);
    pthread_t ids[64];
    for (unsigned i = 1; i < threads && i < 64; i++) pthread_create(&ids[i], NULL, sleeper, NULL);
    say( "READY\n");
    sleeper(NULL);
    for (unsigned i = 1; i < threads && i < 64; i++) pthread_join(ids[i], NULL);
    for (uint64_t i = 0; i < pages; i++)
        if (!pattern_right(memory, 5, i)) return 1;
    say( "OK\n");
    pause();
}
