// heirs: forks where pids mean nothing outside (the first process of a pid namespace), and checks what the children have inherited.
//
//   heirs unmap|move|exit MIB   a process fills memory and says READY; told a line, it forks, and gives its own memory up, moves it, or ends.
//                               The child says OK, or BAD and what is wrong.
//   heirs two MIB               fills memory and forks two children, a second apart, that fill it anew and say READY.
#include "pattern.h"
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
    if (!strcmp(what, "move") && mremap(memory, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, (char *)memory + (1l << 40)) == MAP_FAILED) return 2;
    if (!strcmp(what, "exit")) return 0;
    return wait(NULL) < 0;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    size_t bytes = strtoul(argv[2], NULL, 10) << 20;
    pages = bytes / PAGE;
    bool two = !strcmp(argv[1], "two");
    memory = map_or_die(bytes);
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
