// A program that is hard to catch standing still: it makes threads or children, hears signals, or becomes another program, all
// the time, in its only lasting thread, and counts what it should miss nothing of.
//
//   lively threads|signals|children|spawns|execs
//
// Prints "ready"; at the end of its standard input it stops and prints how much it did and how much of that went wrong.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MIB = 16, PAGE = 4096 };

static unsigned long done, wrong;
static char *memory;
extern char **environ;

static int told_to_end(void) {
    struct pollfd input = {.fd = 0, .events = POLLIN};
    return poll(&input, 1, 0) > 0;
}

static void *count(void *counter) {
    __atomic_fetch_add((unsigned long *)counter, 1, __ATOMIC_RELAXED);
    return 0;
}

static void threads(void) {
    static unsigned long ran;
    pthread_t thread;
    if (pthread_create(&thread, 0, count, &ran)) wrong++;
    else pthread_join(thread, 0);
    wrong += ran != ++done;
    ran = done;
}

static void ended(int status, int expected) {
    done++;
    wrong += !WIFEXITED(status) || WEXITSTATUS(status) != expected;
}

// Only what we opened, which is nothing.
static int has_more_descriptors(void) {
    for (int fd = 3; fd < 32; fd++)
        if (fcntl(fd, F_GETFD) != -1) return 1;
    return 0;
}

static void children(void) {
    int status = -1, expected = (int)(done % 100);
    pid_t child = fork();
    // What it should inherit is there, and nothing else.
    if (child == 0) _exit(memory[(done % (MIB << 8)) * PAGE] != 'm' || has_more_descriptors() ? 255 : expected);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) wrong++;
    ended(status, expected);
}

static void spawns(void) {
    int status = -1;
    pid_t child;
    char *arguments[] = {"true", 0};
    if (posix_spawn(&child, "/bin/true", 0, 0, arguments, environ)) wrong++;
    else while (waitpid(child, &status, 0) < 0 && errno == EINTR) wrong++;
    ended(status, 0);
}

static volatile unsigned long heard;

static void hear(int number, siginfo_t *information, void *context) {
    (void)number, (void)context;
    // They are queued, and come in order.
    wrong += (unsigned long)information->si_value.sival_int != heard++;
}

static void signals(void) {
    int queue = SIGRTMIN;
    struct sigaction action = {.sa_sigaction = hear, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(queue, &action, 0);
    unsigned long *sent = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (sent == MAP_FAILED) exit(2);
    pid_t parent = getpid(), sender = fork();
    if (sender == 0) {
        for (int nth = 0; !told_to_end(); nth++) {
            while (sigqueue(parent, queue, (union sigval){.sival_int = nth}) && errno == EAGAIN) usleep(100);
            if (nth % 16 == 0) usleep(50);
            done = (unsigned long)nth + 1;
        }
        *sent = done;
        _exit(0);
    }
    int status;
    // It is asleep, awake, and in the kernel in turn.
    while (waitpid(sender, &status, WNOHANG) == 0)
        if (heard % 64 == 0) usleep(200);
    done = *sent;
    wrong += heard != done;
}

static void run(void (*step)(void)) {
    while (!told_to_end()) step();
}

static int report(void) {
    printf("%lu %lu\n", done, wrong);
    return wrong != 0;
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    memory = mmap(0, MIB << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 2;
    for (size_t page = 0; page < MIB << 8; page++) memory[page * PAGE] = 'm';
    if (argc < 3) puts("ready");
    fflush(stdout);
    if (!strcmp(what, "threads")) run(threads);
    else if (!strcmp(what, "signals")) signals();
    else if (!strcmp(what, "children")) run(children);
    else if (!strcmp(what, "spawns")) run(spawns);
    else if (!strcmp(what, "execs")) {
        done = argc > 2 ? strtoul(argv[2], 0, 10) : 0;
        for (size_t page = 0; page < MIB << 8; page++) wrong += memory[page * PAGE] != 'm';
        char next[24];
        snprintf(next, sizeof next, "%lu", done + 1);
        // Long enough to be found here.
        usleep(5000);
        if (wrong == 0 && !told_to_end()) execl("/proc/self/exe", argv[0], what, next, (char *)0);
    } else return 2;
    return report();
}
