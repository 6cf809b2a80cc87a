// io_uring without its library: one request at a time.
#pragma once
#include <linux/io_uring.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

typedef struct {
    int fd;
    uint32_t *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
} Uring;

static inline int uring_open(Uring *u) {
    struct io_uring_params p = {0};
    u->fd = (int)syscall(SYS_io_uring_setup, 8, &p);
    if (u->fd < 0) return -1;
    size_t sq = p.sq_off.array + p.sq_entries * sizeof(uint32_t), cq = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
    char *s = mmap(NULL, sq, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, u->fd, IORING_OFF_SQ_RING);
    char *c = mmap(NULL, cq, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, u->fd, IORING_OFF_CQ_RING);
    u->sqes = mmap(NULL, p.sq_entries * sizeof(struct io_uring_sqe), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, u->fd, IORING_OFF_SQES);
    if (s == MAP_FAILED || c == MAP_FAILED || u->sqes == MAP_FAILED) return -1;
    u->sq_tail = (uint32_t *)(s + p.sq_off.tail), u->sq_mask = (uint32_t *)(s + p.sq_off.ring_mask), u->sq_array = (uint32_t *)(s + p.sq_off.array);
    u->cq_head = (uint32_t *)(c + p.cq_off.head), u->cq_tail = (uint32_t *)(c + p.cq_off.tail), u->cq_mask = (uint32_t *)(c + p.cq_off.ring_mask);
    u->cqes = (struct io_uring_cqe *)(c + p.cq_off.cqes);
    return 0;
}

// Submits one request, waits for it, and returns its result.
static inline int uring_do(Uring *u, uint8_t op, uint8_t flags, int fd, void *address, uint32_t length, uint64_t offset) {
    uint32_t tail = *u->sq_tail, at = tail & *u->sq_mask;
    u->sqes[at] = (struct io_uring_sqe){.opcode = op, .flags = flags, .fd = fd, .addr = (uint64_t)(uintptr_t)address, .len = length, .off = offset};
    u->sq_array[at] = at;
    __atomic_store_n(u->sq_tail, tail + 1, __ATOMIC_RELEASE);
    if (syscall(SYS_io_uring_enter, u->fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) != 1) return -1000;
    uint32_t head = *u->cq_head;
    while (__atomic_load_n(u->cq_tail, __ATOMIC_ACQUIRE) == head) {}
    int result = u->cqes[head & *u->cq_mask].res;
    __atomic_store_n(u->cq_head, head + 1, __ATOMIC_RELEASE);
    return result;
}

static inline int uring_register(Uring *u, void *address, size_t length) {
    struct iovec whole = {address, length};
    return (int)syscall(SYS_io_uring_register, u->fd, IORING_REGISTER_BUFFERS, &whole, 1);
}
