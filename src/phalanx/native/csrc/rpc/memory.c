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

/* Forget the blocks that the other process has released. */
static void sweep(struct phx_rpc_slab *slab)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < slab->used; i++) {
        struct phx_rpc_block *block = &slab->blocks[slab->order[i]];
        if (atomic_load_explicit(&slab->released[block->block], memory_order_acquire) == block->sequence)
            block->sequence = 0;
        else
            slab->order[kept++] = slab->order[i];
    }
    slab->used = kept;
}

static int place(struct phx_rpc_slab *slab, uint64_t nbytes, struct phx_rpc_block *block)
{
    uint64_t at = 0;
    uint32_t i = 0, number = 0;
    sweep(slab);
    if (slab->used == PHX_RPC_BLOCKS)
        return 0;
    for (; i < slab->used; i++) {
        const struct phx_rpc_block *next = &slab->blocks[slab->order[i]];
        if (next->at - at >= nbytes)
            break;
        at = next->at + next->nbytes;
    }
    if (slab->bytes - at < nbytes)
        return 0;
    while (slab->blocks[number].sequence)
        number++;
    memmove(&slab->order[i + 1], &slab->order[i], (slab->used - i) * sizeof slab->order[0]);
    slab->order[i] = (uint16_t)number;
    slab->used++;
    if (++slab->sequence == 0)
        slab->sequence = 1;
    /* Else a number that was released long ago would release this block when the sequence numbers come round to it. */
    atomic_store_explicit(&slab->released[number], 0, memory_order_relaxed);
    slab->handed_over[number] = 0;
    slab->blocks[number] = *block =
        (struct phx_rpc_block){.at = at, .nbytes = nbytes, .block = number, .sequence = slab->sequence};
    return 1;
}

/* Have the system provide a block's memory, all at once, which is also quicker than a page fault for each page. */
static int back(struct phx_rpc_slab *slab, const struct phx_rpc_block *block, uint64_t backed)
{
    const uint64_t from = backed > block->at ? backed : block->at, end = block->at + block->nbytes;
    if (from >= end || phx_rpc_back(slab->data + from, end - from))
        return 1;
    pthread_mutex_lock(&slab->lock);
    if (slab->backed > from)
        slab->backed = from;
    pthread_mutex_unlock(&slab->lock);
    atomic_store_explicit(&slab->released[block->block], block->sequence, memory_order_release);
    return 0;
}

int phx_rpc_allocate(struct phx_rpc_slab *slab, uint64_t nbytes, struct phx_rpc_block *block)
{
    const uint64_t page = phx_rpc_page_bytes();
    nbytes = (nbytes + page - 1) / page * page;
    pthread_mutex_lock(&slab->lock);
    const int found = place(slab, nbytes, block);
    const uint64_t backed = slab->backed, end = found ? block->at + nbytes : 0;
    if (end > backed && block->at <= backed)
        slab->backed = end;
    if (end > slab->reached)
        slab->reached = end;
    slab->used_ns = phx_now_ns();
    pthread_mutex_unlock(&slab->lock);
    return !found ? PHX_UNDER_WAY : back(slab, block, backed) ? PHX_OK : PHX_SYSTEM;
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

int phx_rpc_find(struct phx_rpc_slab *slab, uint32_t number, uint32_t sequence, struct phx_rpc_block *block)
{
    pthread_mutex_lock(&slab->lock);
    const int found = number < PHX_RPC_BLOCKS && sequence && slab->blocks[number].sequence == sequence;
    if (found)
        *block = slab->blocks[number];
    pthread_mutex_unlock(&slab->lock);
    return found;
}

int phx_rpc_hand_over(struct phx_rpc_slab *slab, const struct phx_rpc_block *block)
{
    pthread_mutex_lock(&slab->lock);
    slab->handed_over[block->block] = 1;
    const int is_half_full = slab->used > PHX_RPC_BLOCKS / 2 || block->at + block->nbytes > slab->bytes / 2;
    pthread_mutex_unlock(&slab->lock);
    return is_half_full;
}

void phx_rpc_free(struct phx_rpc_slab *slab, uint32_t number, uint32_t sequence)
{
    pthread_mutex_lock(&slab->lock);
    if (number < PHX_RPC_BLOCKS && sequence && slab->blocks[number].sequence == sequence && !slab->handed_over[number])
        atomic_store_explicit(&slab->released[number], sequence, memory_order_release);
    pthread_mutex_unlock(&slab->lock);
}
