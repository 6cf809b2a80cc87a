// back: moves its memory to another place and, told a line, back to where it was.
//
//   back MIB                    READY; told a line, READY; told another, OK, or BAD and what is wrong.
#include "pattern.h"

static void *move_or_die(void *from, size_t bytes, void *to) {
    void *moved = mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to);
    if (moved == MAP_FAILED) say("BAD it cannot move\n"), _exit(1);
    return moved;
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    size_t bytes = strtoul(argv[1], NULL, 10) << 20;
    uint64_t *home = map_or_die(bytes), pages = bytes / PAGE;
    for (uint64_t i = 0; i < pages; i++) pattern_write(home, 1, i);
    void *away = move_or_die(home, bytes, (char *)home - (1l << 40));
    char line[16];
    for (int told = 0; told < 2; told++) {
        say("READY\n");
        if (read(0, line, sizeof line) < 1) return 1;
        if (told == 0) move_or_die(away, bytes, home);
    }
    for (uint64_t i = 0; i < pages; i++)
        if (!pattern_right(home, 1, i)) return 1;
    say("OK\n");
    return 0;
}
