/* Sending: a small image into the ring, a large one into the slab with a record in the ring. */
#define _GNU_SOURCE
#include <sched.h>
#include <string.h>

#include "segment/copy.h"
#include "rpc/hub.h"

#define STREAM_FROM 4194304u /* bytes of an image that the caches would not keep until it is read */
#define TURN_BYTES 524288u   /* a long copy lets other threads have the core after so many bytes */

static int cannot_send(phx_rpc_link *link)
{
    return !phx_rpc_mine(link->hub) || atomic_load_explicit(&link->ended, memory_order_relaxed) || !link->peer;
}

static int no_room(phx_rpc_link *link, const struct phx_rpc_end_of_ring *out)
{
    if (!out->no_memory)
        return PHX_UNDER_WAY;
    phx_rpc_ends(link, PHX_RPC_NO_MEMORY);
    return PHX_PEER_LOST;
}

static void ring_for(phx_rpc_link *link, const struct phx_rpc_image *image)
{
    if (image->kind == PHX_RPC_ANSWER || image->kind == PHX_RPC_FAILURE)
        phx_rpc_ring(link->peer, phx_rpc_bit(image->call), PHX_RPC_SERVERS);
    else
        phx_rpc_ring(link->peer, PHX_RPC_SERVERS, 0);
}

int phx_rpc_send(phx_rpc_link *link, const void *image, uint64_t nbytes)
{
    if (cannot_send(link))
        return PHX_PEER_LOST;
    if (nbytes < sizeof(struct phx_rpc_image) || nbytes > PHX_RPC_SMALL)
        return PHX_BAD_ARGUMENT;
    struct phx_rpc_end_of_ring *out = &link->out;
    pthread_mutex_lock(&link->sending);
    void *place = phx_rpc_reserve(out, PHX_RPC_IMAGE, nbytes);
    if (place) {
        memcpy(place, image, nbytes);
        phx_rpc_publish(out, nbytes);
    }
    const int status = place ? PHX_OK : no_room(link, out);
    pthread_mutex_unlock(&link->sending);
    if (place)
        ring_for(link, image);
    return status;
}

/* Copy `nbytes` from byte `from` on of what the pieces are together. */
static void gather(char *to, uint32_t pieces, const void *const *data, const uint64_t *sizes, uint64_t from,
                   uint64_t nbytes, int past_caches)
{
    for (uint32_t i = 0; i < pieces && nbytes; i++) {
        if (from >= sizes[i]) {
            from -= sizes[i];
            continue;
        }
        const uint64_t some = sizes[i] - from < nbytes ? sizes[i] - from : nbytes;
        if (past_caches)
            phx_stream(to, (const char *)data[i] + from, some);
        else
            memcpy(to, (const char *)data[i] + from, some);
        to += some;
        nbytes -= some;
        from = 0;
    }
}

static uint64_t sum(uint32_t pieces, const uint64_t *sizes)
{
    uint64_t nbytes = 0;
    for (uint32_t i = 0; i < pieces; i++)
        nbytes += sizes[i];
    return nbytes;
}

static int copy_in(struct phx_rpc_slab *slab, uint32_t pieces, const void *const *data, const uint64_t *sizes,
                    struct phx_rpc_block *block)
{
    const uint64_t nbytes = sum(pieces, sizes);
    const int status = nbytes > slab->bytes / 2 ? PHX_BAD_ARGUMENT : phx_rpc_allocate(slab, nbytes, block);
    if (status)
        return status;
    for (uint64_t done = 0; done < nbytes;) {
        const uint64_t some = nbytes - done < TURN_BYTES ? nbytes - done : TURN_BYTES;
        gather(slab->data + block->at + done, pieces, data, sizes, done, some, nbytes >= STREAM_FROM);
        done += some;
        if (done < nbytes)
            sched_yield();
    }
    return PHX_OK;
}

int phx_rpc_put(phx_rpc_link *link, uint32_t pieces, const void *const *data, const uint64_t *sizes, uint64_t *placed)
{
    struct phx_rpc_block block;
    const int status = cannot_send(link) ? PHX_PEER_LOST : copy_in(&link->slab, pieces, data, sizes, &block);
    *placed = status ? 0 : (uint64_t)block.sequence << 32 | block.block;
    return status;
}

int phx_rpc_post(phx_rpc_link *link, uint64_t handle)
{
    struct phx_rpc_end_of_ring *out = &link->out;
    struct phx_rpc_block block;
    if (cannot_send(link))
        return PHX_PEER_LOST;
    if (!phx_rpc_find(&link->slab, (uint32_t)handle, (uint32_t)(handle >> 32), &block))
        return PHX_BAD_ARGUMENT;
    struct phx_rpc_image image; /* once it is published, the block may be released and used again */
    memcpy(&image, link->slab.data + block.at, sizeof image);
    pthread_mutex_lock(&link->sending);
    void *place = phx_rpc_reserve(out, PHX_RPC_BLOCK, sizeof block);
    if (place) {
        block.block |= phx_rpc_hand_over(&link->slab, &block) ? PHX_RPC_COPY : 0;
        memcpy(place, &block, sizeof block);
        phx_rpc_publish(out, sizeof block);
    }
    const int status = place ? PHX_OK : no_room(link, out);
    pthread_mutex_unlock(&link->sending);
    if (place)
        ring_for(link, &image);
    return status;
}

void phx_rpc_take_back(phx_rpc_link *link, uint64_t handle)
{
    if (phx_rpc_mine(link->hub))
        phx_rpc_free(&link->slab, (uint32_t)handle, (uint32_t)(handle >> 32));
}

void phx_rpc_wait_room(phx_rpc_link *link, uint64_t taken)
{
    if (cannot_send(link))
        return;
    struct phx_rpc_ring *ring = link->out.ring;
    if (atomic_load_explicit(&ring->tail, memory_order_acquire) == taken)
        phx_sleep(phx_low_half(&ring->tail), (uint32_t)taken, &ring->waiting);
}

uint64_t phx_rpc_taken(phx_rpc_link *link)
{
    return atomic_load_explicit(&link->own->ring.tail, memory_order_acquire);
}

/* -- to several processes at once ---------------------------------------------------------------------------------- */

void phx_rpc_share(phx_rpc_hub *hub, uint32_t pieces, const void *const *data, const uint64_t *sizes, uint64_t *shared)
{
    struct phx_rpc_loans *loans = &hub->loans;
    struct phx_rpc_block block;
    *shared = 0;
    if (!phx_rpc_mine(hub) || atomic_load(&hub->shut))
        return;
    phx_rpc_collect(loans, 0);
    if (copy_in(&loans->slab, pieces, data, sizes, &block))
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
    phx_rpc_let_go(&hub->loans, &block);
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
    struct phx_rpc_end_of_ring *out = &link->out;
    struct phx_rpc_loans *loans = &link->hub->loans;
    struct phx_rpc_lent lent = {.call = call};
    struct phx_rpc_block block;
    if (cannot_send(link))
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
    pthread_mutex_lock(&link->sending);
    void *place = phx_rpc_reserve(out, PHX_RPC_LENT, sizeof lent);
    if (place) {
        memcpy(place, &lent, sizeof lent);
        phx_rpc_publish(out, sizeof lent);
    } else /* as if it had been received and returned */
        atomic_store_explicit(&link->own->returned[lent.block.block], lent.block.sequence, memory_order_release);
    const int status = place ? PHX_OK : no_room(link, out);
    pthread_mutex_unlock(&link->sending);
    if (place)
        ring_for(link, &image);
    return status;
}
