// polled: a program whose one thread never sleeps, beside a thread that the kernel has made in it (io_uring, IORING_SETUP_SQPOLL).
//
//   polled MIB        Says READY, checks its memory until SIGTERM, then says OK; or NONE and why there is no such thread.
#include "pattern.h"
#include <errno.h>
#include <linux/io_uring.h>
#include <signal.h>
#include <sys/syscall.h>

static volatile sig_atomic_t over;

static void on_end(int signal) {
    (void)signal;
    over = 1;
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    uint64_t pages = strtoull(argv[1], NULL, 10) * 256, *memory = map_or_die(pages * PAGE);
    // Before there is memory worth managing, so that the thread is asleep by then.
    struct io_uring_params how = {.flags = IORING_SETUP_SQPOLL, .sq_thread_idle = 20};
    if (syscall(SYS_io_uring_setup, 8, &how) < 0) {
        say("NONE %s\n", strerror(errno));
        return 0;
    }
    usleep(100 * 1000);
    for (uint64_t i = 0; i < pages; i++) pattern_write(memory, 5, i);
    signal(SIGTERM, on_end);
    say("READY\n");
    for (uint64_t i = 0; !over; i++)
        if (!pattern_right(memory, 5, mix(i) % pages)) return 1;
    for (uint64_t i = 0; i < pages; i++)
        if (!pattern_right(memory, 5, i)) return 1;
    say("OK\n");
    return 0;
}
