// heirs: forks, and checks what the children have inherited: where pids mean nothing outside (the first process of a pid namespace), or,
// for "moving", anywhere.
//
//   heirs unmap|move|exit MIB   a process fills memory and says READY; told a line, it forks, and gives its own memory up, moves it, or ends.
//                               The child says OK, or BAD and what is wrong.
//   heirs moving MIB            fills memory and says READY; told a line, it forks five times, and a thread of the child moves most of it to and
//                               fro, as another asks for the first time for what was evicted. Says OK, or BAD and what is wrong.
//   heirs always MIB            fills memory and says READY; forks one child after the other, and each looks at a seventh of the memory. Told a
//                               line, it says how many were right: OK so many, or BAD at once.
//   heirs lasting MIB           the same with children that look in steps, for some 30 ms, and fork a grandchild that does.
//   heirs staying MIB           the same, for some 200 ms: they are adopted.
//   heirs relay MIB             the same; each child's parent ends as soon as it has forked, and who says all this is the grandparent.
//   heirs two MIB               fills memory and forks two children, a second apart, that fill it anew and say READY.
#include "pattern.h"
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

static uint64_t *memory, pages;

static void fill(void) {
    for (uint64_t i = 0; i < pages; i++) pattern_write(memory, 1, i);
}

static int inherit(const char *what, size_t bytes) {
    fill();
    say("READY\n");
    char line[16];
    if (read(0, line, sizeof line) < 1) return 1;
    if (fork() == 0) {
        for (uint64_t i = 0; i < pages; i++)
            if (!pattern_right(memory, 1, i)) return 1;
        say("OK\n");
        return 0;
    }
    if (!strcmp(what, "unmap")) munmap(memory, bytes);
    if (!strcmp(what, "move") && mremap(memory, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, (char *)memory - (1l << 40)) == MAP_FAILED) return say("BAD it cannot move\n"), 2;
    if (!strcmp(what, "exit")) return 0;
    return wait(NULL) < 0;
}

static atomic_bool moves, enough;

static void *move(void *unused) {
    (void)unused;
    size_t bytes = (pages - 1) * PAGE;
    char *here = (char *)memory + PAGE, *there = here - (1l << 40);
    while (!enough) {
        if (mremap(here, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, there) == MAP_FAILED) say("BAD it cannot move\n"), _exit(2);
        char *last = here;
        here = there, there = last;
        moves = true;
    }
    return here - PAGE;
}

static void *nothing(void *unused) { return unused; }

static int inherit_while_moving(void) {
    pthread_t thread;
    fill();
    say("READY\n");
    char line[16];
    if (read(0, line, sizeof line) < 1) return 1;
    for (int child = 0; child < 5; child++) {
        // The child's thread has its stack, and raises no fault for it.
        if (pthread_create(&thread, NULL, nothing, NULL) || pthread_join(thread, NULL)) return 2;
        if (fork() == 0) {
            if (pthread_create(&thread, NULL, move, NULL)) return 2;
            while (!moves) {}
            bool right = pattern_right(memory, 1, 0);
            enough = true;
            void *moved;
            if (pthread_join(thread, &moved)) return 2;
            for (uint64_t i = 1; right && i < pages; i++) right = pattern_right(moved, 1, i);
            return !right;
        }
        int status;
        if (wait(&status) < 0 || status) return 1;
    }
    say("OK\n");
    return 0;
}

static void look(uint64_t at, unsigned step_us) {
    for (unsigned n = 0; at < pages; at += 7, n++) {
        if (!pattern_right(memory, 1, at)) _exit(1);
        if (step_us && n % 64 == 0) usleep(step_us);
    }
}

static int status_of(pid_t child) {
    int status;
    return waitpid(child, &status, 0) < 0 ? -1 : status;
}

// The child of one that is about to end tells who ends last.
static int relay(unsigned child) {
    int told[2];
    if (pipe(told)) return -1;
    pid_t middle = fork();
    if (middle == 0) {
        if (fork() == 0) {
            look(child % 7, 1000);
            _exit(write(told[1], "R", 1) != 1);
        }
        _exit(0);
    }
    close(told[1]);
    int status = status_of(middle);
    char right = 0;
    if (!status && read(told[0], &right, 1) != 1) status = 0x100;
    close(told[0]);
    return status;
}

static int inherit_always(unsigned step_us, bool relays) {
    fill();
    say("READY\n");
    struct pollfd told = { .fd = 0, .events = POLLIN };
    unsigned children = 0;
    for (; poll(&told, 1, 0) == 0; children++) {
        pid_t child = relays ? 0 : fork();
        if (child == 0 && !relays) {
            pid_t grandchild = step_us ? fork() : 0;
            look(children % 7, step_us);
            int status = grandchild > 0 ? status_of(grandchild) : 0;
            if (status) say("BAD grandchild: status %x\n", status);
            _exit(status != 0);
        }
        int status = relays ? relay(children) : status_of(child);
        if (status) return say("BAD child %u: status %x\n", children, status), 1;
    }
    say("OK %u\n", children);
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    size_t bytes = strtoul(argv[2], NULL, 10) << 20;
    pages = bytes / PAGE;
    bool two = !strcmp(argv[1], "two");
    memory = map_or_die(bytes);
    if (!strcmp(argv[1], "moving")) return inherit_while_moving();
    bool lasting = !strcmp(argv[1], "lasting"), staying = !strcmp(argv[1], "staying"), relays = !strcmp(argv[1], "relay");
    if (lasting || staying || relays || !strcmp(argv[1], "always")) return inherit_always(lasting ? 1000 : staying ? 15000 : 0, relays);
    if (two) fill(), sleep(1);
    for (int child = 0; child < (two ? 2 : 1); child++) {
        if (fork() == 0) {
            if (!two) return inherit(argv[1], bytes);
            fill();
            say("READY\n");
            for (;;) pause();
        }
        sleep(two);
    }
    // The first process of a namespace, with which it ends, hears of everyone's end.
    while (wait(NULL) > 0) {}
    return 0;
}
