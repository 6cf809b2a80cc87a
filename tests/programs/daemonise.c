// daemonise: fills memory, becomes a daemon as daemons do, and there verifies and rewrites what it has inherited.
//
//   daemonise MIB FILE [EVERY]      FILE gets OK or BAD; looks at one page in EVERY
#include "pattern.h"
#include <fcntl.h>

int main(int argc, char **argv) {
    if (argc != 3 && argc != 4) return 2;
    uint64_t pages = strtoull(argv[1], NULL, 10) * 256, every = argc == 4 ? strtoull(argv[3], NULL, 10) : 1;
    uint64_t *memory = map_or_die(pages * PAGE);
    for (uint64_t i = 0; i < pages; i++) pattern_write(memory, 1, i);
    if (fork()) return 0;
    setsid();
    if (fork()) _exit(0);
    int file = open(argv[2], O_CREAT | O_WRONLY, 0600);
    dup2(file, 1);
    close(0), close(2);
    bool right = true;
    for (uint64_t key = 1; key <= 3; key++) {
        for (uint64_t i = 0; i < pages; i += every) {
            right = right && pattern_right(memory, key, i);
            pattern_write(memory, key + 1, i);
        }
        usleep(100000);
    }
    say( right ? "OK\n" : "BAD\n");
    return 0;
}
