/* Sending: a small image through the ring, a large one in the slab with a record in the ring. */
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

/* -- large images ---------------------------------------------------------------------------------------------------- */

int phx_rpc_share(phx_rpc_hub *hub, uint32_t pieces, const void *const *data, const uint64_t *sizes, uint64_t *shared)
{
    struct phx_rpc_slab *slab = &hub->slab;
    const uint64_t nbytes = sum(pieces, sizes);
    *shared = 0;
    if (!phx_rpc_mine(hub) || atomic_load(&hub->shut))
        return PHX_PEER_LOST;
    if (nbytes > slab->bytes / 2)
        return PHX_BAD_ARGUMENT;
    phx_rpc_collect(hub, 0);
    const int status = phx_rpc_allocate(slab, nbytes, shared);
    if (status) {
        *shared = 0;
        return status;
    }
    char *to = slab->data + slab->blocks[(uint32_t)*shared].at;
    for (uint64_t done = 0; done < nbytes;) {
        const uint64_t some = nbytes - done < TURN_BYTES ? nbytes - done : TURN_BYTES;
        gather(to + done, pieces, data, sizes, done, some, nbytes >= STREAM_FROM);
        done += some;
        if (done < nbytes)
            sched_yield();
    }
    return PHX_OK;
}

void phx_rpc_unshare(phx_rpc_hub *hub, uint64_t *shared)
{
    if (!phx_rpc_mine(hub))
        return;
    pthread_mutex_lock(&hub->slab.lock);
    struct phx_rpc_block *block = phx_rpc_find(&hub->slab, *shared);
    if (block)
        phx_rpc_let_go(block);
    pthread_mutex_unlock(&hub->slab.lock);
    *shared = 0;
}

/* Enter a loan, and describe it. */
static int enter(phx_rpc_link *link, uint64_t handle, int several, struct phx_rpc_lent *lent)
{
    phx_rpc_hub *hub = link->hub;
    pthread_mutex_lock(&hub->slab.lock); /* phx_rpc_shut() takes everything back under it */
    struct phx_rpc_block *block = phx_rpc_find(&hub->slab, handle);
    int status = atomic_load(&hub->shut)       ? PHX_PEER_LOST
                 : !block                      ? PHX_BAD_ARGUMENT
                 : hub->lent == PHX_RPC_BLOCKS ? PHX_UNDER_WAY
                                               : PHX_OK;
    const uint32_t number = (uint32_t)handle;
    for (uint32_t i = 0; several && !status && i < hub->lent; i++)
        if (hub->loans[i].link == link && hub->loans[i].block == number)
            status = PHX_BAD_ARGUMENT; /* its release could be that of either */
    if (!status) {
        const int is_half_full = hub->slab.used > PHX_RPC_BLOCKS / 2 || block->at + block->nbytes > hub->slab.bytes / 2;
        *lent = (struct phx_rpc_lent){
            .at = block->at,
            .nbytes = block->nbytes,
            .block = number | (several ? PHX_RPC_SEVERAL : 0) | (is_half_full ? PHX_RPC_COPY : 0),
            .sequence = block->sequence,
            .call = lent->call};
        hub->loans[hub->lent++] = (struct phx_rpc_loan){.link = link, .block = number, .sequence = block->sequence};
        atomic_store_explicit(&link->own->released[number], 0, memory_order_relaxed);
        block->holders++;
        phx_rpc_hold(link);
    }
    pthread_mutex_unlock(&hub->slab.lock);
    return status;
}

int phx_rpc_lend(phx_rpc_link *link, uint64_t handle, uint64_t call, int several)
{
    struct phx_rpc_lent lent = {.call = call};
    struct phx_rpc_image image;
    if (cannot_send(link))
        return PHX_PEER_LOST;
    if (several && !atomic_load_explicit(&link->other->borrows, memory_order_acquire))
        return PHX_BAD_ARGUMENT;
    pthread_mutex_lock(&link->sending);
    void *place = phx_rpc_reserve(&link->out, PHX_RPC_LENT, sizeof lent);
    const int status = place ? enter(link, handle, several, &lent) : no_room(link, &link->out);
    if (!status) {
        memcpy(&image, link->hub->slab.data + lent.at, sizeof image);
        image.call = call;
        memcpy(place, &lent, sizeof lent);
        phx_rpc_publish(&link->out, sizeof lent);
    }
    pthread_mutex_unlock(&link->sending);
    if (!status)
        ring_for(link, &image);
    return status;
}
