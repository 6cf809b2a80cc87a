// newborns: shared memory whose children are long in being born: a fork that copies a namespace of many mounts, too, takes the kernel many
// milliseconds after the child has what its parent has mapped and before anybody can see it. Needs root, and a directory to mount in.
//
//   newborns MIB DIRECTORY
//
// Says READY when it has filled its memory. Told a line, it does what that says, then says OK, or BAD and what is wrong:
//
//   go SECONDS     has children that look at all of it, and end
//   verify | exit STATUS
#include "pattern.h"
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { DOUBLINGS = 15 };

// Twice as many mounts each time, for this process alone.
static bool mount_many(const char *directory) {
    char below[4096];
    if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount("many", directory, "tmpfs", 0, NULL)) return false;
    for (int i = 0; i < DOUBLINGS; i++) {
        snprintf(below, sizeof below, "%s/%d", directory, i);
        if (mkdir(below, 0700) || mount(directory, below, NULL, MS_BIND | MS_REC, NULL)) return false;
    }
    return true;
}

static uint64_t *memory, pages;

static bool verify(void) {
    for (uint64_t page = 0; page < pages; page++)
        if (!pattern_right(memory, 1, page)) return false;
    return true;
}

// Not by the first thread, which is the one that is stopped when a pager comes.
static void *have_children(void *until) {
    int status = 0;
    while (!status && seconds_now() < *(double *)until) {
        long pid = syscall(SYS_clone, CLONE_NEWNS | SIGCHLD, 0, 0, 0, 0);
        if (!pid) _exit(!verify());
        if (pid < 0 || wait(&status) != pid) status = -1;
    }
    return status ? until : NULL;
}

int main(int argc, char **argv) {
    if (argc < 3 || !mount_many(argv[2])) return 2;
    pages = strtoull(argv[1], NULL, 0) << 8;
    memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 2;
    for (uint64_t page = 0; page < pages; page++) pattern_write(memory, 1, page);
    say("READY\n");
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        int status;
        double until;
        bool right;
        if (sscanf(line, "exit %d", &status) == 1) return status;
        if (sscanf(line, "go %lf", &until) == 1) {
            pthread_t thread;
            void *wrong;
            until += seconds_now();
            if (pthread_create(&thread, NULL, have_children, &until) || pthread_join(thread, &wrong)) return 2;
            right = !wrong;
        } else {
            right = verify();
        }
        say(right ? "OK\n" : "BAD\n");
    }
    return 0;
}
