/* First fit from the start of the slab, so that memory that was used before, and is mapped, is used again: copying into
 * fresh memory costs five times as much. */
#define _GNU_SOURCE
#include "rpc_slab.h"

#include <string.h>
#include <sys/mman.h>

#include "futex.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#define ALIGN 4096u
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
    slab->blocks[number] = *block =
        (struct phx_rpc_block){.at = at, .nbytes = nbytes, .block = number, .sequence = slab->sequence};
    return 1;
}

int phx_rpc_allocate(struct phx_rpc_slab *slab, uint64_t nbytes, struct phx_rpc_block *block)
{
    nbytes = (nbytes + ALIGN - 1) / ALIGN * ALIGN;
    pthread_mutex_lock(&slab->lock);
    const int found = place(slab, nbytes, block);
    uint64_t from = slab->touched;
    const uint64_t to = found ? block->at + nbytes : 0;
    if (to > from)
        slab->touched = to;
    slab->used_ns = phx_now_ns();
    pthread_mutex_unlock(&slab->lock);
    if (found && from < block->at)
        from = block->at;
    /* All at once is quicker than a page fault for each page. Where the kernel cannot, the copy takes them. */
    if (to > from)
        (void)!madvise(slab->data + from, to - from, MADV_POPULATE_WRITE);
    return found;
}

void phx_rpc_trim(struct phx_rpc_slab *slab, uint64_t now_ns)
{
    pthread_mutex_lock(&slab->lock);
    if (slab->touched > KEEP_BYTES && slab->used_ns + KEEP_NS < now_ns) {
        sweep(slab);
        const struct phx_rpc_block *last = slab->used ? &slab->blocks[slab->order[slab->used - 1]] : NULL;
        const uint64_t end = last ? last->at + last->nbytes : 0;
        if (slab->touched > end + KEEP_BYTES && madvise(slab->data + end, slab->touched - end, MADV_REMOVE) == 0)
            slab->touched = end;
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
