// Loads the memcached of its own host at a steady rate, and checks every byte of each value.
//
//   gets MIB SEED     stores so much, in values of 1000 bytes that no other seed has, and says "stored N". Then, for each line on
//                     standard input: "load RATE MS" asks for so many values a second, most of them among few, and replaces
//                     every tenth; says "loaded DONE wrong=N p50=US p99=US", from when a request was due; "stop" ends it
//
// Built with -static.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { VALUE = 1000, PORT = 11211, SAMPLES = 1 << 20 };

static uint64_t seed, state = 88172645463325252ull;
static uint32_t *versions, samples[SAMPLES];
static int server;

static uint64_t next(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

// Half of a value is noise, half repeats its number; both change with each version.
static void make(uint64_t key, uint32_t version, char *value) {
    uint64_t x = (key + 1) * 0x9E3779B97F4A7C15ull ^ (uint64_t)version << 40 ^ seed * 0xD1B54A32D192ED03ull;
    for (int at = 0; at < VALUE; at += 8) {
        uint64_t word = key * 31 + version;
        if (at < VALUE / 2) x ^= x >> 31, x *= 0x94D049BB133111EBull, word = x;
        memcpy(value + at, &word, 8);
    }
}

static void fail(const char *what) {
    printf("gets failed: %s\n", what);
    fflush(stdout);
    exit(1);
}

static void send_all(const char *bytes, size_t length) {
    while (length > 0) {
        ssize_t sent = write(server, bytes, length);
        if (sent <= 0) fail("the connection ended");
        bytes += sent, length -= (size_t)sent;
    }
}

// Reads until the answer ends as it should.
static size_t receive(char *answer, size_t room, const char *end) {
    size_t length = 0, tail = strlen(end);
    while (length < tail || memcmp(answer + length - tail, end, tail)) {
        ssize_t got = length < room ? read(server, answer + length, room - length) : 0;
        if (got <= 0) fail("no whole answer came");
        length += (size_t)got;
    }
    return length;
}

static void set(uint64_t key, uint32_t version) {
    char request[VALUE + 64], answer[16];
    int head = sprintf(request, "set k%llu 0 0 %d\r\n", (unsigned long long)key, VALUE);
    make(key, version, request + head);
    memcpy(request + head + VALUE, "\r\n", 2);
    send_all(request, (size_t)head + VALUE + 2);
    if (receive(answer, sizeof answer, "\r\n") != 8 || memcmp(answer, "STORED", 6)) fail("a value was not stored");
    versions[key] = version;
}

static int is_right(uint64_t key) {
    char request[64], head[64], expected[VALUE], answer[VALUE + 128];
    send_all(request, (size_t)sprintf(request, "get k%llu\r\n", (unsigned long long)key));
    size_t start = (size_t)sprintf(head, "VALUE k%llu 0 %d\r\n", (unsigned long long)key, VALUE);
    size_t length = receive(answer, sizeof answer, "END\r\n");
    make(key, versions[key], expected);
    return length == start + VALUE + 7 && !memcmp(answer, head, start) && !memcmp(answer + start, expected, VALUE);
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void wait_until(double when) {
    struct timespec at = {.tv_sec = (time_t)when, .tv_nsec = (long)((when - (double)(time_t)when) * 1e9)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
}

static int ascending(const void *one, const void *other) {
    uint32_t a = *(const uint32_t *)one, b = *(const uint32_t *)other;
    return (a > b) - (a < b);
}

static void load(uint64_t keys, double rate, double seconds) {
    uint64_t done = 0, wrong = 0;
    double begun = seconds_now();
    for (double due = begun; due < begun + seconds && seconds_now() < begun + seconds; due = begun + (double)done / rate) {
        wait_until(due);
        double share = (double)(next() >> 11) / 9007199254740992.0;
        uint64_t key = (uint64_t)((double)keys * share * share * share * share);
        if (done % 10 == 9) set(key, versions[key] + 1);
        else wrong += !is_right(key);
        samples[done++ % SAMPLES] = (uint32_t)((seconds_now() - due) * 1e6);
    }
    size_t count = done < SAMPLES ? done : SAMPLES;
    qsort(samples, count, sizeof *samples, ascending);
    printf("loaded %llu wrong=%llu p50=%u p99=%u\n", (unsigned long long)done, (unsigned long long)wrong, samples[count / 2], samples[count * 99 / 100]);
    fflush(stdout);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    uint64_t keys = strtoull(argv[1], NULL, 10) * 1024 * 1024 / VALUE;
    seed = strtoull(argv[2], NULL, 10);
    versions = calloc(keys, sizeof *versions);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(PORT), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    for (int attempt = 0;; attempt++) {
        server = socket(AF_INET, SOCK_STREAM, 0);
        if (!connect(server, (struct sockaddr *)&address, sizeof address)) break;
        if (attempt == 100) fail("there is no memcached");
        close(server), usleep(100000);
    }
    setsockopt(server, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    for (uint64_t key = 0; key < keys; key++) set(key, 0);
    printf("stored %llu\n", (unsigned long long)keys);
    fflush(stdout);
    char line[64];
    while (fgets(line, sizeof line, stdin) && strncmp(line, "stop", 4)) {
        double rate, ms;
        if (sscanf(line, "load %lf %lf", &rate, &ms) == 2) load(keys, rate, ms / 1000);
    }
    return 0;
}
