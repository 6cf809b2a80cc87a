// whole: is never in a system call for long, and tells whether its thread has all that is its own, wherever it was stopped.
//
//   whole                       READY; told a line, it says OK and how often it has looked. BAD at once, and what is wrong: registers, flags,
//                               signal mask; or, told a line, a thread that is neither its own nor an agent. HURRIED instead of OK if its
//                               scheduling is not the usual one.
#include "pattern.h"
#include <dirent.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>

// All flags of arithmetic.
enum { REGISTERS = 14, TURNS = 20000, FLAGS = 0x8d5 };

uint64_t found[REGISTERS], flags, stack_before, stack_after;

// Adds its number to each register in each turn; only `loop` counts, which changes no flag.
__attribute__((noinline)) static void turn(void) {
    __asm__ volatile(
        ".intel_syntax noprefix\n"
        "push rbx; push rbp; push r12; push r13; push r14; push r15\n"
        "mov [rip + stack_before], rsp\n"
        "mov rcx, 20000\n"
        "push 0xad7; popfq\n"
        "mov rax, 0; mov rbx, 0; mov rdx, 0; mov rsi, 0; mov rdi, 0; mov rbp, 0; mov r8, 0\n"
        "mov r9, 0; mov r10, 0; mov r11, 0; mov r12, 0; mov r13, 0; mov r14, 0; mov r15, 0\n"
        "2: lea rax, [rax + 1]; lea rbx, [rbx + 2]; lea rdx, [rdx + 3]; lea rsi, [rsi + 4]; lea rdi, [rdi + 5]\n"
        "lea rbp, [rbp + 6]; lea r8, [r8 + 7]; lea r9, [r9 + 8]; lea r10, [r10 + 9]; lea r11, [r11 + 10]\n"
        "lea r12, [r12 + 11]; lea r13, [r13 + 12]; lea r14, [r14 + 13]; lea r15, [r15 + 14]\n"
        "loop 2b\n"
        "mov [rip + found], rax; mov [rip + found + 8], rbx; mov [rip + found + 16], rdx; mov [rip + found + 24], rsi\n"
        "mov [rip + found + 32], rdi; mov [rip + found + 40], rbp; mov [rip + found + 48], r8; mov [rip + found + 56], r9\n"
        "mov [rip + found + 64], r10; mov [rip + found + 72], r11; mov [rip + found + 80], r12; mov [rip + found + 88], r13\n"
        "mov [rip + found + 96], r14; mov [rip + found + 104], r15\n"
        "pushfq; pop rax; mov [rip + flags], rax\n"
        "mov [rip + stack_after], rsp\n"
        "pop r15; pop r14; pop r13; pop r12; pop rbp; pop rbx\n"
        ".att_syntax prefix\n" ::: "rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "memory", "cc");
}

static int strangers(void) {
    int strange = 0;
    DIR *tasks = opendir("/proc/self/task");
    if (!tasks) return -1;
    for (struct dirent *task; (task = readdir(tasks));) {
        char path[64], name[32] = "";
        snprintf(path, sizeof path, "/proc/self/task/%.20s/comm", task->d_name);
        FILE *file = fopen(path, "r");
        if (!file) continue;
        if (task->d_name[0] != '.' && atoi(task->d_name) != getpid() && fgets(name, sizeof name, file)) strange += !!strcmp(name, "spillway-agent\n");
        fclose(file);
    }
    closedir(tasks);
    return strange;
}

int main(void) {
    sigset_t own, now;
    sigemptyset(&own);
    sigaddset(&own, SIGUSR1);
    sigprocmask(SIG_SETMASK, &own, NULL);
    say("READY\n");
    struct pollfd told = { .fd = 0, .events = POLLIN };
    unsigned turns = 0;
    for (; poll(&told, 1, 0) == 0; turns++) {
        turn();
        for (unsigned i = 0; i < REGISTERS; i++)
            if (found[i] != (uint64_t)TURNS * (i + 1)) return say("BAD register %u: %llx\n", i, (unsigned long long)found[i]), 1;
        if ((flags & FLAGS) != FLAGS) return say("BAD flags: %llx\n", (unsigned long long)flags), 1;
        if (stack_before != stack_after) return say("BAD stack\n"), 1;
        if (sigprocmask(SIG_BLOCK, NULL, &now) || memcmp(&own, &now, 8)) return say("BAD signal mask\n"), 1;
    }
    // Who has just been let go may still have a step to do.
    for (double until = seconds_now() + 1; strangers() && seconds_now() < until;) usleep(1000);
    if (strangers()) return say("BAD: %d threads that are not its own\n", strangers()), 1;
    int policy = sched_getscheduler(0);
    say("%s %u\n", (policy & ~SCHED_RESET_ON_FORK) == SCHED_OTHER ? "OK" : "HURRIED", turns);
    return 0;
}
