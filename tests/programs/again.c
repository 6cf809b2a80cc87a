// again: maps a memfd of its own at one place, unmaps it, and maps it there again, as it is told.
//
//   again MIB [twice]     twice: it has it mapped at another place as well, all the time
//
// Says READY when it has filled it. Told a line, it does what that says, then says OK, or BAD and what is wrong:
//
//   unmap | map | verify | exit STATUS
#include "pattern.h"

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    uint64_t pages = strtoull(argv[1], NULL, 0) << 8;
    int file = memfd_create("again", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)(pages * PAGE))) return 2;
    // Below everything else, where nobody takes the place meanwhile.
    void *const place = (void *)(1ul << 40);
    int how = MAP_SHARED | MAP_FIXED_NOREPLACE;
    uint64_t *memory = mmap(place, pages * PAGE, PROT_READ | PROT_WRITE, how, file, 0);
    if (memory != place || (argc > 2 && mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) == MAP_FAILED)) return 2;
    for (uint64_t page = 0; page < pages; page++) pattern_write(memory, 1, page);
    say("READY\n");
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        int status;
        bool right = true;
        if (sscanf(line, "exit %d", &status) == 1) return status;
        if (!strcmp(line, "unmap\n")) right = !munmap(memory, pages * PAGE);
        else if (!strcmp(line, "map\n")) right = mmap(place, pages * PAGE, PROT_READ | PROT_WRITE, how, file, 0) == place;
        else for (uint64_t page = 0; right && page < pages; page++) right = pattern_right(memory, 1, page);
        say(right ? "OK\n" : "BAD\n");
    }
    return 0;
}
