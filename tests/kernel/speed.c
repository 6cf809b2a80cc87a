// Where the pager runs decides what a fault costs.
#include "kernel.h"
#include <linux/capability.h>
#include <sys/resource.h>

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

static int median(int *times, size_t count) {
    qsort(times, count, sizeof *times, compare);
    return times[count / 2];
}

// What a fault takes, in nanoseconds, as the faulting thread sees it, and of that, or beyond it, the installing call; and how many of
// PAGES were served on the CPU of the faulting thread.
struct cost { int fault, installation, beside; };

static struct cost medians(const struct cost *rounds, size_t count) {
    int faults[ROUNDS_MAX], installations[ROUNDS_MAX], besides[ROUNDS_MAX];
    for (size_t i = 0; i < count; i++) {
        faults[i] = rounds[i].fault, installations[i] = rounds[i].installation, besides[i] = rounds[i].beside;
    }
    return (struct cost){ median(faults, count), median(installations, count), median(besides, count) };
}

// Serves PAGES faults from `memory` on of a thread that computes so long between them; the medians.
static struct cost round_of_faults(u64 memory, u64 computing_ns, bool follow, const cpu_set_t *all) {
    uint32_t *times = argument(it, 2);
    int followed = -1, beside = 0, installations[PAGES];
    tell(it, 2, (struct order){ TOUCH, 0, { memory, PAGES, (u64)times, computing_ns } });
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
        u64 before = nanoseconds();
        expect_is(zeros(uffd.fd, message.b & ~(u64)(PAGE - 1), 1), 0);
        installations[served] = (int)(nanoseconds() - before);
        beside += it->cpu == sched_getcpu();
    }
    answer_of(it, 2);
    sched_setaffinity(0, sizeof *all, all);
    return (struct cost){ median((int *)times, PAGES), median(installations, PAGES), beside };
}

// To the kernel's wake-up a CPU that runs only the idle class counts as idle: a thread woken from there stays there. Woken
// from the normal class it moves to a CPU that is idle, and its pager must then wake up across CPUs.
FACT(an_idle_class_pager_keeps_the_faulting_thread) {
    cpu_set_t all;
    sched_getaffinity(0, sizeof all, &all);
    if (CPU_COUNT(&all) < 2) skip("one CPU only");
    begin();
    struct cost normal[ROUNDS_MAX], idle[ROUNDS_MAX], a = { 0 }, b = { 0 };
    int failures = 0;
    for (double end = now() + 3; now() < end; pause_ms(100)) {
        double began = now(), idle_before = idle_seconds();
        size_t rounds = 0;
        for (; rounds < 5 || (rounds < ROUNDS_MAX && now() < began + 0.4); rounds++) {
            u64 memory = map(it, 2 * PAGES);
            expect_is(reg(uffd.fd, memory, 2 * PAGES), 0);
            be_of(SCHED_OTHER);
            normal[rounds] = round_of_faults(memory, 0, false, &all);
            be_of(SCHED_IDLE);
            idle[rounds] = round_of_faults(memory + PAGES * PAGE, 0, true, &all);
            be_of(SCHED_OTHER);
        }
        double took = now() - began, was_idle = idle_seconds() - idle_before;
        a = medians(normal, rounds), b = medians(idle, rounds);
        if (a.beside <= PAGES / 10 && b.beside >= PAGES - PAGES / 10 && b.fault < a.fault) {
            printf("%d ns a fault from the normal class, %d ns from the idle class on the same CPU\n", a.fault, b.fault);
            return;
        }
        // Two threads that take turns leave all CPUs but one idle, unless another program has them.
        failures += was_idle > 0.9 * took;
    }
    enum { TEXT = 200 };
    char text[TEXT];
    snprintf(text, TEXT, "%d ns a fault, %d of %d on the same CPU, from the normal class; from the idle class %d ns, %d", a.fault, a.beside,
             PAGES, b.fault, b.beside);
    if (failures > 1) fail("%s", text);
    skip("other programs want the CPUs: %s", text);
}

// That class counts as a niceness of 20, and to go below needs the right to. Whoever has entered it without starves in it.
FACT(the_idle_class_is_left_by_right_only) {
    pid_t child = fork();
    if (child == 0) {
        struct rlimit none = { 0, 0 };
        struct sched_param zero = { 0 };
        struct __user_cap_header_struct header = { _LINUX_CAPABILITY_VERSION_3, 0 };
        struct __user_cap_data_struct rights[2] = { { 0 } };
        if (syscall(SYS_capget, &header, rights)) _exit(2);
        rights[0].effective &= ~(1u << CAP_SYS_NICE);
        if (setrlimit(RLIMIT_NICE, &none) || syscall(SYS_capset, &header, rights)) _exit(2);
        if (sched_setscheduler(0, SCHED_IDLE, &zero)) _exit(3);
        if (sched_setscheduler(0, SCHED_OTHER, &zero) == 0 || errno != EPERM) _exit(4);
        rights[0].effective |= 1u << CAP_SYS_NICE;
        // Root has it among what is permitted; others end here.
        if (syscall(SYS_capset, &header, rights)) _exit(0);
        _exit(sched_setscheduler(0, SCHED_OTHER, &zero) == 0 ? 0 : 5);
    }
    int status;
    expect_is(waitpid(child, &status, 0), child);
    expect_is(status, 0);
}

// What the kernel's load tracking says of the calling thread.
static double own_load(void) {
    char path[64], line[128];
    snprintf(path, sizeof path, "/proc/self/task/%d/sched", gettid());
    FILE *told = fopen(path, "re");
    if (!told) skip("%s: %m", path);
    double load = -1;
    while (load < 0 && fgets(line, sizeof line, told))
        if (!strncmp(line, "se.avg.load_avg", 15)) load = strtod(strchr(line, ':') + 1, NULL);
    fclose(told);
    if (load < 0) skip("%s does not tell the load", path);
    return load;
}

// The most that it says while the thread is a real-time one and in the idle class by turns, directly or by way of the normal class.
static double load_of_turns(bool by_way) {
    double most = 0;
    for (int turn = 0; turn < 20; turn++) {
        struct sched_param none = { 0 }, first = { 1 };
        if (sched_setscheduler(0, SCHED_FIFO, &first)) skip("SCHED_FIFO: %m");
        if (by_way) expect_is(sched_setscheduler(0, SCHED_OTHER, &none), 0);
        expect_is(sched_setscheduler(0, SCHED_IDLE, &none), 0);
        double load = own_load();
        if (load > most) most = load;
    }
    be_of(SCHED_OTHER);
    return most;
}

// The load as a real-time thread (weight 1024) is taken for one of weight 3, and at the next turn for what that many times as much weighs.
FACT(each_turn_from_real_time_to_the_idle_class_multiplies_a_threads_load) {
    expect(load_of_turns(true) <= 1024);
    expect(load_of_turns(false) > 1e6);
}

// The wake-up inside of the call lets the program run at once, and from the idle class the caller goes on only when the program
// waits again. So how long the call takes says nothing of the fault.
FACT(an_installation_from_the_idle_class_lasts_while_the_program_computes) {
    enum { COMPUTING_NS = 200000 };
    cpu_set_t all;
    sched_getaffinity(0, sizeof all, &all);
    begin();
    struct cost last = { 0 };
    int failures = 0;
    for (double end = now() + 3; now() < end; pause_ms(100)) {
        u64 memory = map(it, PAGES);
        expect_is(reg(uffd.fd, memory, PAGES), 0);
        be_of(SCHED_IDLE);
        last = round_of_faults(memory, COMPUTING_NS, true, &all);
        be_of(SCHED_OTHER);
        if (last.fault < COMPUTING_NS / 4 && last.installation > COMPUTING_NS / 2) {
            printf("%d ns a fault, %d ns a call that served it\n", last.fault, last.installation);
            return;
        }
        // Where the program was driven to another CPU, each goes on by itself.
        if (last.fault < COMPUTING_NS / 4 && last.installation < COMPUTING_NS / 10 && ++failures == 3)
            fail("%d ns a fault, and only %d ns a call", last.fault, last.installation);
    }
    skip("the two did not share a CPU: %d ns a fault, %d ns a call", last.fault, last.installation);
}
