/* The slab: random blocks never overlap and keep their bytes, all room comes back, memory is given back when idle,
 * and a block for which the system has no memory is not allocated. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "system/futex.h"
#include "rpc/memory.h"

#define BYTES (8u << 20)
#define LATER 11000000000ull

static struct phx_rpc_slab slab = {.lock = PTHREAD_MUTEX_INITIALIZER, .bytes = BYTES};
static uint64_t held[PHX_RPC_BLOCKS]; /* the handles */
static uint32_t count;

static uint64_t taken(int fd)
{
    struct stat file;
    CHECK(fstat(fd, &file) == 0);
    return (uint64_t)file.st_blocks * 512;
}

static struct phx_rpc_block *block_of(uint32_t i)
{
    struct phx_rpc_block *block = phx_rpc_find(&slab, held[i]);
    CHECK(block);
    return block;
}

static void release(uint32_t i)
{
    struct phx_rpc_block *block = block_of(i);
    for (uint64_t b = 0; b < block->nbytes; b += 97)
        CHECK(slab.data[block->at + b] == (char)block->sequence);
    phx_rpc_let_go(block);
    CHECK(!phx_rpc_find(&slab, held[i]));
    held[i] = held[--count];
}

static int allocate(uint64_t nbytes)
{
    uint64_t handle;
    if (phx_rpc_allocate(&slab, nbytes, &handle))
        return 0;
    held[count] = handle;
    const struct phx_rpc_block *block = block_of(count);
    CHECK(block->nbytes >= nbytes && block->at + block->nbytes <= BYTES && block->holders == 1);
    for (uint32_t i = 0; i < count && count < 1024; i++) {
        const struct phx_rpc_block *other = block_of(i);
        CHECK(other != block && (other->at + other->nbytes <= block->at || block->at + block->nbytes <= other->at));
    }
    CHECK(!phx_rpc_find(&slab, handle - (1ull << 32)));
    memset(slab.data + block->at, (int)block->sequence, block->nbytes);
    count++;
    return 1;
}

/* Blocks beyond the end of the file cannot have memory, as if the system had none left for them. */
static void without_memory(void)
{
    const int fd = memfd_create("phalanx-test", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, BYTES / 2) == 0);
    char *whole = slab.data;
    slab.data = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(slab.data != MAP_FAILED);
    slab.backed = slab.reached = 0;
    for (int turn = 0; turn < 3; turn++) {
        CHECK(!allocate(BYTES) && !allocate(BYTES / 2 + 1));
        CHECK(allocate(BYTES / 4) && allocate(BYTES / 4) && !allocate(1));
        release(turn % 2);
        CHECK(allocate(BYTES / 4) && !allocate(BYTES / 4));
        release(0);
        release(0);
    }
    munmap(slab.data, BYTES);
    slab.data = whole;
    close(fd);
}

int main(void)
{
    const int fd = memfd_create("phalanx-test", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, BYTES) == 0);
    slab.data = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(slab.data != MAP_FAILED);

    CHECK(!allocate(BYTES + 1) && allocate(BYTES) && !allocate(1));
    release(0);
    srand(1);
    for (int turn = 0; turn < 20000; turn++) {
        if (count && rand() % 2)
            release((uint32_t)rand() % count);
        else if (!allocate(1 + (uint64_t)rand() % (rand() % 8 ? 20000 : BYTES / 3)) && count)
            release((uint32_t)rand() % count);
    }
    while (count)
        release(0);
    while (count < BYTES / 4096)
        CHECK(allocate(1));
    CHECK(!allocate(1));
    while (count)
        release(0);
    CHECK(allocate(BYTES));
    release(0);

    /* A block in the middle stays; what lies before and behind it goes, once the slab has not been used for a while. */
    CHECK(allocate(BYTES / 4) && allocate(BYTES / 4) && allocate(BYTES / 2));
    release(2);
    release(0);
    phx_rpc_trim(&slab, phx_now_ns());
    CHECK(taken(fd) == BYTES);
    phx_rpc_trim(&slab, phx_now_ns() + LATER);
    CHECK(taken(fd) == BYTES / 4);
    CHECK(allocate(BYTES / 4)); /* it is in use again */
    release(0);
    release(0);
    phx_rpc_trim(&slab, phx_now_ns());
    CHECK(taken(fd) == BYTES / 2);
    phx_rpc_trim(&slab, phx_now_ns() + 2 * LATER);
    CHECK(taken(fd) == 0);

    /* A block that is kept for long does not keep the memory before it, and what was given back can be used again. */
    CHECK(allocate(BYTES / 4) && allocate(BYTES / 4) && allocate(BYTES / 4) && allocate(BYTES / 4));
    release(0); /* the last one takes its place in the list */
    release(1);
    phx_rpc_trim(&slab, phx_now_ns() + 3 * LATER);
    CHECK(taken(fd) == BYTES / 2);
    CHECK(allocate(BYTES / 8) && allocate(BYTES / 8) && allocate(BYTES / 4) && !allocate(1));
    CHECK(taken(fd) == BYTES);
    while (count)
        release(0);
    phx_rpc_trim(&slab, phx_now_ns() + 4 * LATER);
    CHECK(taken(fd) == 0);

    /* The sequence numbers come round. */
    slab.sequence = UINT32_MAX;
    CHECK(allocate(1));
    release(0);

    without_memory();
    return 0;
}
