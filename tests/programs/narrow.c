// narrow: a 32-bit program without a library (cc -m32 -nostdlib -static), that answers each byte on standard input.
static int call(int number, int a, const void *b, int c) {
    int result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(a), "c"(b), "d"(c) : "memory");
    return result;
}

static char memory[1 << 20];

void _start(void);
void _start(void) {
    char byte;
    for (unsigned i = 0; i < sizeof memory; i++) memory[i] = (char)(i * 7);
    call(4, 1, "READY\n", 6);
    while (call(3, 0, &byte, 1) == 1) {
        int right = 1;
        for (unsigned i = 0; i < sizeof memory; i++) right &= ((volatile char *)memory)[i] == (char)(i * 7);
        if (byte == '\n') call(4, 1, right ? "OK\n" : "NO\n", 3);
    }
    call(1, 0, 0, 0);
    for (;;) {}
}
