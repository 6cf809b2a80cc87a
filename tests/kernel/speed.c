// Where the pager runs decides what a fault costs.
#include "kernel.h"

enum { ROUNDS_MAX = 64, PAGES = 300 };

static int compare(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

static void be_of(int policy) {
    struct sched_param none = { 0 };
    if (sched_setscheduler(0, policy, &none)) skip("sched_setscheduler: %m");
}

// Seconds that all CPUs together were idle so far.
static double idle_seconds(void) {
    double user, nice, system, idle;
    FILE *stat = fopen("/proc/stat", "re");
    if (!stat || fscanf(stat, "cpu %lf %lf %lf %lf", &user, &nice, &system, &idle) != 4) skip("/proc/stat: %m");
    fclose(stat);
    return idle / (double)sysconf(_SC_CLK_TCK);
}

// Serves PAGES faults from `memory` on; the median time of one, in nanoseconds, as the faulting thread sees it.
static int round_of_faults(u64 memory, bool follow, const cpu_set_t *all) {
    uint32_t *times = argument(it, 2);
    int followed = -1;
    tell(it, 2, (struct order){ TOUCH, 0, { memory, PAGES, (u64)times } });
    for (int served = 0; served < PAGES; served++) {
        struct pollfd ready = { uffd.fd, POLLIN, 0 };
        if (poll(&ready, 1, 2000) != 1) fail("no fault");
        struct message message;
        if (!read_message(uffd.fd, &message)) fail("read: %m");
        // As the pager does: it looks where the thread runs now and then.
        if (follow && served % 32 == 0 && it->cpu != followed) {
            cpu_set_t one;
            followed = it->cpu;
            CPU_ZERO(&one);
            CPU_SET(followed, &one);
            sched_setaffinity(0, sizeof one, &one);
        }
        expect_is(zeros(uffd.fd, message.b & ~(u64)(PAGE - 1), 1), 0);
    }
    answer_of(it, 2);
    sched_setaffinity(0, sizeof *all, all);
    qsort(times, PAGES, sizeof *times, compare);
    return (int)times[PAGES / 2];
}

// To the kernel's wake-up a CPU that runs only the idle class counts as idle: a thread woken from there stays there. Woken
// from the normal class it moves to a CPU that is idle, and its pager must then wake up across CPUs.
FACT(an_idle_class_pager_keeps_the_faulting_thread) {
    cpu_set_t all;
    sched_getaffinity(0, sizeof all, &all);
    if (CPU_COUNT(&all) < 2) skip("one CPU only");
    begin();
    int normal[ROUNDS_MAX], idle[ROUNDS_MAX], a = 0, b = 0, failures = 0;
    for (double end = now() + 3; now() < end; pause_ms(100)) {
        double began = now(), idle_before = idle_seconds();
        int rounds = 0;
        for (; rounds < 5 || (rounds < ROUNDS_MAX && now() < began + 0.4); rounds++) {
            u64 memory = map(it, 2 * PAGES);
            expect_is(reg(uffd.fd, memory, 2 * PAGES), 0);
            be_of(SCHED_OTHER);
            normal[rounds] = round_of_faults(memory, false, &all);
            be_of(SCHED_IDLE);
            idle[rounds] = round_of_faults(memory + PAGES * PAGE, true, &all);
            be_of(SCHED_OTHER);
        }
        double took = now() - began, was_idle = idle_seconds() - idle_before;
        qsort(normal, (size_t)rounds, sizeof *normal, compare), qsort(idle, (size_t)rounds, sizeof *idle, compare);
        a = normal[rounds / 2], b = idle[rounds / 2];
        if (b < 0.6 * a) {
            printf("%d ns a fault from the normal class, %d ns from the idle class on the same CPU\n", a, b);
            return;
        }
        // Two threads that take turns leave all CPUs but one idle, unless another program has them.
        if (was_idle > 0.9 * took && ++failures == 2) fail("%d ns is not less than 0.6 times %d ns", b, a);
    }
    skip("other programs want the CPUs: %d ns and %d ns", a, b);
}
