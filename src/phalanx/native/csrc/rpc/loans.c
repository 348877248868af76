/* A block of the hub's slab has a number of holders. One that has none is released, as the other process releases a block
 * of a link's slab. A loan ends when its receiver says so, by a word in the channel, or has died; so a link with loans is
 * kept, although it may have ended: its process may go on and read what it has received. */
#define _GNU_SOURCE
#include "rpc/loans.h"

#include <string.h>

#include "rpc/hub.h"

static void let_go(struct phx_rpc_loans *loans, const struct phx_rpc_block *block)
{
    if (--loans->holders[block->block] == 0)
        atomic_store_explicit(&loans->released[block->block], block->sequence, memory_order_release);
}

/* Whether nobody at the other end of a link can read any more. */
static int is_dead(const phx_rpc_link *link)
{
    struct phx_process seen;
    const uint32_t why = atomic_load(&link->ended);
    if (!why || why == PHX_RPC_GONE || why == PHX_RPC_REPLACED)
        return why != 0;
    const enum phx_sight sight = phx_process_read(link->pid, &seen); /* no longer watched, since the link has ended */
    return sight == PHX_GONE || (sight == PHX_RUNNING && seen.start_time != link->process.start_time);
}

void phx_rpc_collect(struct phx_rpc_loans *loans, int all)
{
    phx_rpc_link *returned[PHX_RPC_LOANS];
    uint32_t count = 0;
    pthread_mutex_lock(&loans->lock);
    for (uint32_t i = 0, left = loans->used; left; i++) {
        struct phx_rpc_loan *loan = &loans->loans[i];
        if (!loan->link)
            continue;
        left--;
        if (all || atomic_load_explicit(&loan->link->own->returned[i], memory_order_acquire) == loan->sequence ||
            is_dead(loan->link)) {
            returned[count++] = loan->link;
            loan->link = NULL;
            loans->used--;
            let_go(loans, &loan->block);
        }
    }
    pthread_mutex_unlock(&loans->lock);
    while (count)
        phx_rpc_drop(returned[--count]);
}

void phx_rpc_share(phx_rpc_hub *hub, uint32_t pieces, const void *const *data, const uint64_t *sizes, uint64_t *shared)
{
    struct phx_rpc_loans *loans = &hub->loans;
    struct phx_rpc_block block;
    *shared = 0;
    if (!phx_rpc_mine(hub) || atomic_load(&hub->shut))
        return;
    phx_rpc_collect(loans, 0);
    if (!phx_rpc_copy_in(&loans->slab, pieces, data, sizes, &block))
        return;
    pthread_mutex_lock(&loans->lock);
    loans->holders[block.block] = 1;
    pthread_mutex_unlock(&loans->lock);
    *shared = (uint64_t)block.sequence << 32 | block.block;
}

void phx_rpc_unshare(phx_rpc_hub *hub, uint64_t *shared)
{
    const uint64_t handle = *shared;
    struct phx_rpc_block block;
    *shared = 0;
    if (!phx_rpc_mine(hub) ||
        !phx_rpc_find(&hub->loans.slab, (uint32_t)handle, (uint32_t)(handle >> 32), &block))
        return;
    pthread_mutex_lock(&hub->loans.lock);
    let_go(&hub->loans, &block);
    pthread_mutex_unlock(&hub->loans.lock);
}

/* Enter a loan. Returns its number, or PHX_RPC_LOANS if there are too many. */
static uint32_t enter(struct phx_rpc_loans *loans, phx_rpc_link *link, const struct phx_rpc_block *block,
                      uint32_t *sequence)
{
    pthread_mutex_lock(&loans->lock); /* phx_rpc_shut() takes everything back under it */
    uint32_t number = atomic_load(&link->hub->shut) ? PHX_RPC_LOANS : 0;
    while (number < PHX_RPC_LOANS && loans->loans[number].link)
        number++;
    if (number < PHX_RPC_LOANS) {
        if (++loans->sequence == 0)
            loans->sequence = 1;
        *sequence = loans->sequence;
        loans->loans[number] = (struct phx_rpc_loan){.link = link, .block = *block, .sequence = *sequence};
        atomic_store_explicit(&link->own->returned[number], 0, memory_order_relaxed);
        loans->holders[block->block]++;
        loans->used++;
        phx_rpc_hold(link);
    }
    pthread_mutex_unlock(&loans->lock);
    return number;
}

int phx_rpc_lend(phx_rpc_link *link, uint64_t handle, uint64_t call)
{
    struct phx_rpc_end_of_ring *out = &link->out[PHX_RPC_BULK_LANE];
    struct phx_rpc_loans *loans = &link->hub->loans;
    struct phx_rpc_lent lent = {.call = call};
    struct phx_rpc_block block;
    if (phx_rpc_cannot_send(link))
        return PHX_PEER_LOST;
    if (!atomic_load_explicit(&link->other->borrows, memory_order_acquire) ||
        !phx_rpc_find(&loans->slab, (uint32_t)handle, (uint32_t)(handle >> 32), &block))
        return PHX_BAD_ARGUMENT;
    struct phx_rpc_image image;
    memcpy(&image, loans->slab.data + block.at, sizeof image);
    image.call = call;
    lent.block = block;
    lent.block.block = enter(loans, link, &block, &lent.block.sequence);
    if (lent.block.block == PHX_RPC_LOANS)
        return PHX_BAD_ARGUMENT;
    void *place = phx_rpc_reserve(out, PHX_RPC_LENT, sizeof lent, 0);
    if (!place) { /* as if it had been received and returned */
        atomic_store_explicit(&link->own->returned[lent.block.block], lent.block.sequence, memory_order_release);
        return phx_rpc_no_room(link, out);
    }
    memcpy(place, &lent, sizeof lent);
    phx_rpc_publish(out, sizeof lent);
    phx_rpc_ring_for(link, &image);
    return PHX_OK;
}
