// outlive: a program whose first thread ends before the others, by pthread_exit, and whose other thread ends it.
//
//   outlive MIB          says READY, and ALONE once only the other thread is left, for which a byte of standard input is
//                        awaited; then a line for each further byte: OK, or BAD and what is wrong. Ends with status 7 at
//                        the end of its input.
//   outlive MIB alone    has no other thread: at the end of its input the only one ends, and the process with it, by exit
//                        (not exit_group), with status 7
#include "pattern.h"
#include <pthread.h>
#include <sys/syscall.h>

static uint64_t pages, *memory;
static pthread_t first;

static void serve(void) {
    uint64_t key = 4;
    for (char byte; read(0, &byte, 1) == 1; key++) {
        bool right = true;
        for (uint64_t i = 0; i < pages && right; i++) {
            right = pattern_right(memory, key, i);
            pattern_write(memory, key + 1, i);
        }
        if (right) say("OK\n");
    }
}

static void *work(void *nothing) {
    pthread_join(first, NULL);
    say("ALONE\n");
    serve();
    _exit(nothing ? 1 : 7);
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    pages = strtoull(argv[1], NULL, 10) * 256, memory = map_or_die(pages * PAGE);
    for (uint64_t i = 0; i < pages; i++) pattern_write(memory, 4, i);
    say("READY\n");
    if (argc > 2) {
        serve();
        syscall(SYS_exit, 7);
    }
    char byte;
    pthread_t other;
    first = pthread_self();
    if (read(0, &byte, 1) != 1 || pthread_create(&other, NULL, work, NULL) != 0) return 2;
    pthread_exit(NULL);
}
