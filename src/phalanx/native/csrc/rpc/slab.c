/* First fit from the start of the slab, so that memory that was used before, and is mapped, is used again: copying into
 * fresh memory costs five times as much. */
#define _GNU_SOURCE
#include "rpc/slab.h"

#include <string.h>
#include <sys/mman.h>

#include "system/futex.h"
#include "rpc/memory.h"

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
    return found && back(slab, block, backed);
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

void phx_rpc_hand_over(struct phx_rpc_slab *slab, const struct phx_rpc_block *block)
{
    pthread_mutex_lock(&slab->lock);
    slab->handed_over[block->block] = 1;
    pthread_mutex_unlock(&slab->lock);
}

void phx_rpc_free(struct phx_rpc_slab *slab, uint32_t number, uint32_t sequence)
{
    pthread_mutex_lock(&slab->lock);
    if (number < PHX_RPC_BLOCKS && sequence && slab->blocks[number].sequence == sequence && !slab->handed_over[number])
        atomic_store_explicit(&slab->released[number], sequence, memory_order_release);
    pthread_mutex_unlock(&slab->lock);
}
