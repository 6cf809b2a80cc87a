// A stand-in for Cloud Hypervisor with shared guest memory, which hands its userfaultfd over to a manager as is proposed there
// (uffd_handoff_socket): it is its own guest, with a vhost-user back end in a second process that has the memory mapped, too. They know
// every byte.
//
//   handoff SOCKET MIB [OPTION]    a line "ready PID BACKEND acked=0|1", then a line for each line of standard input
//     features HEX                 of the userfaultfd; 1020, missing pages and protected ones of shared memory, is its own
//     mode WORDS                   what it says of that
//     pid NUMBER                   what it says it is
//     private                      the memory is private
//     touched                      some pages are there before it is handed over
//     alone                        without a back end
//
//   check                  "checked wrong=N peer=N": all pages, by either
//   write COUNT            that many pages change, here and there; "peer COUNT": by the back end
//   call FIRST COUNT       the kernel reads these (a system call that may wait for a page): "called wrong=N"
//   churn SECONDS          threads of both check and change pages all that time: "churned N wrong=N peer=N wrong=N"
//   plug MIB               more memory: mapped by both, registered, told of; "plugged"
//   tell TEXT              says this, with its length before it
//   hangup                 closes the socket
//   again                  hands over once more, to another manager: "acked=0|1"
//   fork                   "child has=0|1": whether a child has the memory
//   unmap | move | over    an error's number, or 0, of munmap, mremap, and mmap over it; "late unmap": of what was plugged in last
//   resident               "resident N": pages that the files have
//   stop
#include "monitor.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>

enum { REGIONS = 8, PAGES_MAX = 1 << 18 };

static struct region { char *at; size_t pages, first; int file; } region[REGIONS];
static int regions;
static bool is_peer;

// Zeros, until whichever process makes it.
static u64 word(u64 page, uint32_t made, u64 k) { return made == 0 ? 0 : made_word(page, made, k); }

static volatile u64 *at(size_t page) {
    int i = regions - 1;
    while (region[i].first > page) i--;
    return (u64 *)(region[i].at + (page - region[i].first) * PAGE);
}

static void make(size_t page) { make_version(page, version[page] + 1); }

// Each thread of either has pages of its own for a while; then they are another's, of the other process.
static void *churn(void *argument) {
    struct churner *it = argument;
    while (!over) {
        size_t slots = 2 * THREADS, page = next(&it->random) % (pages / slots) * slots + it->from;
        it->wrong += is_wrong(page);
        if (next(&it->random) % 16 < 6) make(page);
        it->turns++;
    }
    return NULL;
}

static struct churner churn_mine(double seconds, size_t swapped) {
    static struct churner churners[THREADS];
    for (size_t i = 0; i < THREADS; i++) {
        size_t from = (is_peer ^ swapped) * THREADS + i;
        churners[i] = (struct churner){ .random = 88172645463325252ull + (u64)(from + swapped * 11) * 7919, .from = from };
    }
    return churn_for(seconds, churners, churn);
}

static void write_pages(size_t count) {
    static u64 random = 0x2545F4914F6CDD1Dull;
    while (count-- > 0) make(next(&random) % pages);
}

static size_t resident(void) {
    size_t count = 0;
    for (int i = 0; i < regions; i++) {
        struct stat about;
        if (fstat(region[i].file, &about)) fail("fstat");
        count += (size_t)about.st_blocks * 512 / PAGE;
    }
    return count;
}

static void map(int file, size_t count, bool private) {
    // With a hole before and behind it.
    size_t hole = 256 * PAGE, bytes = count * PAGE;
    char *around = mmap(NULL, bytes + 2 * hole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int kind = private ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    char *memory = mmap(around + hole, bytes, PROT_READ | PROT_WRITE, kind | MAP_FIXED, private ? -1 : file, 0);
    if (memory == MAP_FAILED) fail("mmap");
    region[regions++] = (struct region){ memory, count, pages, file };
    pages += count;
}

static int new_file(size_t count) {
    int file = memfd_create("ch_ram", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)(count * PAGE))) fail("memfd");
    return file;
}

static int uffd = -1;
static int manager = -1;
// One message: its length, and what it says.
static void say(const char *text, int with) {
    char frame[4096];
    uint32_t length = (uint32_t)strlen(text);
    memcpy(frame, &length, sizeof length), memcpy(frame + sizeof length, text, length);
    send_all(manager, frame, sizeof length + length, with);
}

static int name_region(char *text, size_t room, const struct region *it) {
    return snprintf(text, room, "{\"guest_phys_addr\":%zu,\"host_virt_addr\":%lu,\"size\":%zu,\"backing_file_offset\":0}",
                    it->first * PAGE, (unsigned long)it->at, it->pages * PAGE);
}

static const char *path, *mode = "MISSING|WP";
static long pid;
static bool hand_over(void) {
    manager = connect_to(path);
    char text[2048], *end = text;
    end += sprintf(end, "{\"type\":\"handoff\",\"version\":0,\"vmm_pid\":%ld,\"mode\":\"%s\",\"regions\":[", pid, mode);
    for (int i = 0; i < regions; i++) {
        if (i) *end++ = ',';
        end += name_region(end, 256, &region[i]);
    }
    strcpy(end, "]}");
    say(text, uffd);
    struct timeval two = { 2, 0 };
    setsockopt(manager, SOL_SOCKET, SO_RCVTIMEO, &two, sizeof two);
    char byte;
    ssize_t got;
    while ((got = recv(manager, &byte, 1, 0)) < 0 && errno == EINTR) {}
    return got == 1;
}

// What the back end is told, and answers.
struct word { char what; size_t count; double seconds; size_t swapped; u64 turns, wrong; };
static int peer = -1;

static struct word ask(struct word word) {
    if (peer < 0) return (struct word){ 0 };
    send_all(peer, &word, sizeof word, -1);
    if (recv(peer, &word, sizeof word, MSG_WAITALL) != sizeof word) fail("the back end");
    return word;
}

static void give(int file, size_t count) {
    if (peer < 0) return;
    struct word word = { .what = 'm', .count = count };
    send_all(peer, &word, sizeof word, file);
    if (recv(peer, &word, sizeof word, MSG_WAITALL) != sizeof word) fail("the back end");
}

static _Noreturn void serve(int from) {
    is_peer = true;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
        struct word word;
        union { char bytes[CMSG_SPACE(sizeof(int))]; struct cmsghdr align; } control = { 0 };
        struct iovec vector = { &word, sizeof word };
        struct msghdr message = { .msg_iov = &vector, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control };
        ssize_t got = recvmsg(from, &message, MSG_WAITALL);
        if (got < 0 && errno == EINTR) continue;
        if (got != sizeof word) exit(0);
        if (word.what == 'm') {
            int file;
            memcpy(&file, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof file);
            map(file, word.count, false);
        } else if (word.what == 'c') {
            word.wrong = wrong_pages();
        } else if (word.what == 'w') {
            write_pages(word.count);
        } else if (word.what == 'x') {
            struct churner all = churn_mine(word.seconds, word.swapped);
            word.turns = all.turns, word.wrong = all.wrong;
        }
        send_all(from, &word, sizeof word, -1);
    }
}

struct churning { struct word word; };
static void *ask_aside(void *argument) {
    struct churning *it = argument;
    it->word = ask(it->word);
    return NULL;
}

static void churn_both(double seconds) {
    u64 counts[4] = { 0 };
    // Then each has what the other had.
    for (size_t swapped = 0; swapped < 2; swapped++) {
        struct churning aside = { { .what = 'x', .seconds = seconds / 2, .swapped = swapped } };
        pthread_t thread;
        pthread_create(&thread, NULL, ask_aside, &aside);
        struct churner all = churn_mine(seconds / 2, swapped);
        pthread_join(thread, NULL);
        counts[0] += all.turns, counts[1] += all.wrong, counts[2] += aside.word.turns, counts[3] += aside.word.wrong;
    }
    printf("churned %lu wrong=%lu peer=%lu wrong=%lu\n", (unsigned long)counts[0], (unsigned long)counts[1],
           (unsigned long)counts[2], (unsigned long)counts[3]);
}

static void plug(size_t mib) {
    size_t count = mib << 8;
    int file = new_file(count);
    map(file, count, false);
    register_memory(uffd, region[regions - 1].at, count, 3);
    char text[512] = "{\"type\":\"add_region\",\"region\":";
    name_region(text + strlen(text), 256, &region[regions - 1]);
    strcat(text, "}");
    say(text, -1);
    give(file, count);
    puts("plugged");
}

static void obey(char *line) {
    size_t first = 0, count = 0;
    double seconds = 0;
    char *here = region[0].at;
    if (!strncmp(line, "check", 5)) {
        size_t wrong = wrong_pages();
        printf("checked wrong=%zu peer=%lu\n", wrong, (unsigned long)ask((struct word){ .what = 'c' }).wrong);
    } else if (sscanf(line, "write %zu", &count) == 1) write_pages(count), puts("written");
    else if (sscanf(line, "peer %zu", &count) == 1) ask((struct word){ .what = 'w', .count = count }), puts("written");
    else if (sscanf(line, "call %zu %zu", &first, &count) == 2) printf("called wrong=%zu\n", wrong_in_calls(first, count));
    else if (sscanf(line, "churn %lf", &seconds) == 1) churn_both(seconds);
    else if (sscanf(line, "plug %zu", &count) == 1) plug(count);
    else if (!strncmp(line, "tell ", 5)) line[strcspn(line, "\n")] = 0, say(line + 5, -1), puts("told");
    else if (!strncmp(line, "hangup", 6)) close(manager), puts("hung up");
    else if (!strncmp(line, "again", 5)) close(manager), printf("acked=%d\n", hand_over());
    else if (!strncmp(line, "fork", 4)) printf("child has=%d\n", child_has(here));
    else if (!strncmp(line, "late unmap", 10)) printf("%d\n", munmap(region[regions - 1].at, PAGE) ? errno : 0);
    else if (!strncmp(line, "resident", 8)) printf("resident %zu\n", resident());
    else if (!change_mapping(line, here)) printf("what is %s", line);
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    size_t all = strtoull(argv[2], 0, 10) << 8;
    bool private = false, touched = false, alone = false;
    u64 features = 0x1020;
    pid = getpid(), path = argv[1];
    for (int i = 3; i < argc; i++) {
        private |= !strcmp(argv[i], "private"), touched |= !strcmp(argv[i], "touched"), alone |= !strcmp(argv[i], "alone");
        if (!strcmp(argv[i], "features") && i + 1 < argc) features = strtoull(argv[++i], 0, 16);
        else if (!strcmp(argv[i], "mode") && i + 1 < argc) mode = argv[++i];
        else if (!strcmp(argv[i], "pid") && i + 1 < argc) pid = atol(argv[++i]);
    }
    // Both processes' as well, and none of the guest's.
    version = mmap(NULL, PAGES_MAX * sizeof *version, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (version == MAP_FAILED) fail("mmap");
    pid_t backend = 0;
    if (!alone && !private) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair)) fail("socketpair");
        backend = fork();
        if (backend == 0) close(pair[0]), serve(pair[1]);
        close(pair[1]);
        peer = pair[0];
    }
    size_t counts[2] = { all / 4, all - all / 4 };
    for (int i = 0; i < 2; i++) {
        int file = new_file(counts[i]);
        map(file, counts[i], private);
        give(file, counts[i]);
    }
    for (size_t page = 0; touched && page < pages; page += 2) make(page);
    uffd = new_userfaultfd(features);
    for (int i = 0; i < 2; i++) register_memory(uffd, region[i].at, region[i].pages, private ? 1 : 3);
    bool acked = hand_over();
    printf("ready %d %d acked=%d\n", getpid(), backend, acked);
    char line[512];
    while (fgets(line, sizeof line, stdin) && strncmp(line, "stop", 4)) obey(line);
    return 0;
}
