/* Shared memory: files, the system's memory for them, and slabs. */
#define _GNU_SOURCE
#include "rpc/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "phalanx.h"
#include "system/futex.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u
#endif

int phx_rpc_make_file(uint64_t nbytes)
{
    /* Some systems refuse memory that could be executed (vm.memfd_noexec); kernels before 6.3 do not know the flag. */
    int fd = memfd_create("phalanx-rpc", MFD_CLOEXEC | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL)
        fd = memfd_create("phalanx-rpc", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return -1;
    if (ftruncate(fd, (off_t)nbytes) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        return fd;
    close(fd); /* on Linux what succeeds leaves errno */
    return -1;
}

int phx_rpc_open_file(uint32_t pid, int number)
{
    char path[48];
    snprintf(path, sizeof path, "/proc/%u/fd/%d", pid, number);
    /* The number may belong to another file by now: a FIFO does not wait with O_NONBLOCK, and only memory has seals. */
    const int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    const int seals = fd < 0 ? 0 : fcntl(fd, F_GET_SEALS);
    if (fd < 0 || (seals >= 0 && (seals & F_SEAL_SHRINK)))
        return fd;
    close(fd);
    errno = EPROTO;
    return -1;
}

int phx_rpc_back(void *data, uint64_t nbytes)
{
    return madvise(data, nbytes, MADV_POPULATE_WRITE) == 0 || (errno != EFAULT && errno != ENOMEM);
}

int phx_rpc_changed(int pagemap, uint64_t where, uint64_t nbytes)
{
    const uint64_t in_ram = 1ull << 63, swapped = 1ull << 62, of_file = 1ull << 61;
    const uint64_t page = phx_rpc_page_bytes(), end = (where + nbytes + page - 1) / page;
    uint64_t entries[512];
    for (uint64_t at = where / page; at < end;) {
        const uint64_t count = end - at < 512 ? end - at : 512;
        if (pread(pagemap, entries, count * 8, (off_t)(at * 8)) != (ssize_t)(count * 8))
            return 1;
        for (uint64_t i = 0; i < count; i++)
            if ((entries[i] & swapped) || ((entries[i] & in_ram) && !(entries[i] & of_file)))
                return 1;
        at += count;
    }
    return 0;
}

uint64_t phx_rpc_page_bytes(void)
{
    static _Atomic uint64_t known; /* the same value, whichever thread writes it */
    uint64_t bytes = known;
    if (!bytes)
        known = bytes = (uint64_t)sysconf(_SC_PAGESIZE);
    return bytes;
}

/* -- slabs ----------------------------------------------------------------------------------------------------------
 *
 * First fit from the start of the slab, so that memory that was used before, and is mapped, is used again: copying into
 * fresh memory costs five times as much. */

#define KEEP_BYTES 1048576u
#define KEEP_NS 10000000000ull

static void sweep(struct phx_rpc_slab *slab)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < slab->used; i++)
        if (slab->blocks[slab->order[i]].holders)
            slab->order[kept++] = slab->order[i];
    slab->used = kept;
}

static struct phx_rpc_block *place(struct phx_rpc_slab *slab, uint64_t nbytes)
{
    uint64_t at = 0;
    uint32_t i = 0, number = 0;
    sweep(slab);
    if (slab->used == PHX_RPC_BLOCKS)
        return NULL;
    for (; i < slab->used; i++) {
        const struct phx_rpc_block *next = &slab->blocks[slab->order[i]];
        if (next->at - at >= nbytes)
            break;
        at = next->at + next->nbytes;
    }
    if (slab->bytes - at < nbytes)
        return NULL;
    while (slab->blocks[number].holders)
        number++;
    memmove(&slab->order[i + 1], &slab->order[i], (slab->used - i) * sizeof slab->order[0]);
    slab->order[i] = (uint16_t)number;
    slab->used++;
    if (++slab->sequence == 0)
        slab->sequence = 1;
    slab->blocks[number] = (struct phx_rpc_block){.at = at, .nbytes = nbytes, .holders = 1, .sequence = slab->sequence};
    return &slab->blocks[number];
}

int phx_rpc_allocate(struct phx_rpc_slab *slab, uint64_t nbytes, uint64_t *handle)
{
    const uint64_t page = phx_rpc_page_bytes();
    nbytes = (nbytes + page - 1) / page * page;
    pthread_mutex_lock(&slab->lock);
    struct phx_rpc_block *block = place(slab, nbytes);
    const uint64_t backed = slab->backed, at = block ? block->at : 0, end = block ? at + nbytes : 0;
    if (end > backed && at <= backed)
        slab->backed = end;
    if (end > slab->reached)
        slab->reached = end;
    slab->used_ns = phx_now_ns();
    *handle = block ? (uint64_t)block->sequence << 32 | (uint64_t)(block - slab->blocks) : 0;
    pthread_mutex_unlock(&slab->lock);
    if (!block)
        return PHX_UNDER_WAY;
    /* Have the system provide the memory all at once, which is also quicker than a page fault for each page. */
    const uint64_t from = backed > at ? backed : at;
    if (from >= end || phx_rpc_back(slab->data + from, end - from))
        return PHX_OK;
    pthread_mutex_lock(&slab->lock);
    if (slab->backed > from)
        slab->backed = from;
    phx_rpc_let_go(block);
    pthread_mutex_unlock(&slab->lock);
    return PHX_SYSTEM;
}

struct phx_rpc_block *phx_rpc_find(struct phx_rpc_slab *slab, uint64_t handle)
{
    const uint32_t number = (uint32_t)handle, sequence = (uint32_t)(handle >> 32);
    struct phx_rpc_block *block = number < PHX_RPC_BLOCKS && sequence ? &slab->blocks[number] : NULL;
    return block && block->sequence == sequence ? block : NULL;
}

void phx_rpc_let_go(struct phx_rpc_block *block)
{
    if (--block->holders == 0)
        block->sequence = 0;
}

void phx_rpc_trim(struct phx_rpc_slab *slab, uint64_t now_ns)
{
    pthread_mutex_lock(&slab->lock);
    if (slab->reached > KEEP_BYTES && slab->used_ns + KEEP_NS < now_ns) {
        sweep(slab);
        uint64_t at = 0;
        for (uint32_t i = 0; i <= slab->used; i++) {
            const struct phx_rpc_block *next = i < slab->used ? &slab->blocks[slab->order[i]] : NULL;
            const uint64_t end = next ? next->at : slab->reached;
            if (end > at + KEEP_BYTES && madvise(slab->data + at, end - at, MADV_REMOVE) == 0) {
                if (slab->backed > at)
                    slab->backed = at;
                if (!next)
                    slab->reached = at;
            }
            at = next ? next->at + next->nbytes : at;
        }
        slab->used_ns = now_ns; /* look again after as long */
    }
    pthread_mutex_unlock(&slab->lock);
}
