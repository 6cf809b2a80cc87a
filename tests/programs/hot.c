// hot: goes over memory once while it uses a part of it all the time.
//
//   hot HOT_MIB COLD_MIB TURNS     prints READY when all was written, reads the hot part before every MiB of the rest, and prints
//                                  DONE, or BAD and what is wrong
#include "pattern.h"

int main(int argc, char **argv) {
    if (argc < 4) return fprintf(stderr, "hot: see the top of hot.c\n"), 2;
    uint64_t hot = strtoull(argv[1], NULL, 10) * 256, cold = strtoull(argv[2], NULL, 10) * 256, turns = strtoull(argv[3], NULL, 10);
    uint64_t *memory = map_or_die((hot + cold) * PAGE);
    for (uint64_t page = 0; page < hot + cold; page++) pattern_write(memory, 1, page);
    say("READY\n");
    for (uint64_t turn = 0; turn < turns; turn++)
        for (uint64_t page = hot; page < hot + cold; page++) {
            if (page % 256 == 0)
                for (uint64_t i = 0; i < hot; i++)
                    if (!pattern_right(memory, 1, i)) return 1;
            if (!pattern_right(memory, 1, page)) return 1;
        }
    say("DONE\n");
    return 0;
}
