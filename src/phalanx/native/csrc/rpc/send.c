/* Sending: a small image into its ring, a large one into the slab with a record in the bulk ring, or in pieces. */
#define _GNU_SOURCE
#include <sched.h>
#include <string.h>

#include "segment/copy.h"
#include "rpc/hub.h"

#define STREAM_FROM 4194304u /* bytes of an image that the caches would not keep until it is read */
#define ROOM_NS 50000u       /* how long to wait for room for a piece before this thread sleeps */
#define TURN_BYTES 524288u   /* a long copy lets other threads have the core after so many bytes */

int phx_rpc_cannot_send(phx_rpc_link *link)
{
    return !phx_rpc_mine(link->hub) || atomic_load_explicit(&link->ended, memory_order_relaxed) || !link->peer;
}

int phx_rpc_no_room(phx_rpc_link *link, const struct phx_rpc_end_of_ring *out)
{
    if (!out->no_memory)
        return PHX_UNDER_WAY;
    phx_rpc_ends(link, PHX_RPC_NO_MEMORY);
    return PHX_PEER_LOST;
}

void phx_rpc_ring_for(phx_rpc_link *link, const struct phx_rpc_image *image)
{
    if (image->kind == PHX_RPC_ANSWER || image->kind == PHX_RPC_FAILURE)
        phx_rpc_ring(link->peer, phx_rpc_bit(image->call), PHX_RPC_SERVERS);
    else
        phx_rpc_ring(link->peer, PHX_RPC_SERVERS, 0);
}

int phx_rpc_send(phx_rpc_link *link, const void *image, uint64_t nbytes)
{
    if (phx_rpc_cannot_send(link))
        return PHX_PEER_LOST;
    if (nbytes < sizeof(struct phx_rpc_image) || nbytes > PHX_RPC_SMALL)
        return PHX_BAD_ARGUMENT;
    struct phx_rpc_end_of_ring *out = &link->out[PHX_RPC_SMALL_LANE];
    pthread_mutex_lock(&link->sending);
    void *place = phx_rpc_reserve(out, PHX_RPC_IMAGE, nbytes, 0);
    if (place) {
        memcpy(place, image, nbytes);
        phx_rpc_publish(out, nbytes);
    }
    const int status = place ? PHX_OK : phx_rpc_no_room(link, out);
    pthread_mutex_unlock(&link->sending);
    if (place)
        phx_rpc_ring_for(link, image);
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

int phx_rpc_copy_in(struct phx_rpc_slab *slab, uint32_t pieces, const void *const *data, const uint64_t *sizes,
                    struct phx_rpc_block *block)
{
    const uint64_t nbytes = sum(pieces, sizes);
    if (nbytes > slab->bytes || !phx_rpc_allocate(slab, nbytes, block))
        return 0;
    for (uint64_t done = 0; done < nbytes;) {
        const uint64_t some = nbytes - done < TURN_BYTES ? nbytes - done : TURN_BYTES;
        gather(slab->data + block->at + done, pieces, data, sizes, done, some, nbytes >= STREAM_FROM);
        done += some;
        if (done < nbytes)
            sched_yield();
    }
    return 1;
}

void phx_rpc_put(phx_rpc_link *link, uint32_t pieces, const void *const *data, const uint64_t *sizes, uint64_t *placed)
{
    struct phx_rpc_block block;
    const int is_there = !phx_rpc_cannot_send(link) && phx_rpc_copy_in(&link->slab, pieces, data, sizes, &block);
    *placed = is_there ? (uint64_t)block.sequence << 32 | block.block : 0;
}

int phx_rpc_post(phx_rpc_link *link, uint64_t handle)
{
    struct phx_rpc_end_of_ring *out = &link->out[PHX_RPC_BULK_LANE];
    struct phx_rpc_block block;
    if (phx_rpc_cannot_send(link))
        return PHX_PEER_LOST;
    if (!phx_rpc_find(&link->slab, (uint32_t)handle, (uint32_t)(handle >> 32), &block))
        return PHX_BAD_ARGUMENT;
    void *place = phx_rpc_reserve(out, PHX_RPC_BLOCK, sizeof block, 0);
    if (!place)
        return phx_rpc_no_room(link, out);
    struct phx_rpc_image image; /* once it is published, the block may be released and used again */
    memcpy(&image, link->slab.data + block.at, sizeof image);
    phx_rpc_hand_over(&link->slab, &block);
    memcpy(place, &block, sizeof block);
    phx_rpc_publish(out, sizeof block);
    phx_rpc_ring_for(link, &image);
    return PHX_OK;
}

void phx_rpc_take_back(phx_rpc_link *link, uint64_t handle)
{
    if (phx_rpc_mine(link->hub))
        phx_rpc_free(&link->slab, (uint32_t)handle, (uint32_t)(handle >> 32));
}

/* Wait for the other process to take something after it had taken `taken`. Returns 1, or 0 if it did not, or if a signal
 * came. */
static int took(struct phx_rpc_ring *ring, uint64_t taken)
{
    const uint64_t until = phx_now_ns() + ROOM_NS;
    do {
        if (atomic_load_explicit(&ring->tail, memory_order_acquire) != taken)
            return 1;
        sched_yield();
    } while (phx_now_ns() < until);
    phx_sleep(phx_low_half(&ring->tail), (uint32_t)taken, &ring->waiting);
    return atomic_load_explicit(&ring->tail, memory_order_acquire) != taken;
}

int phx_rpc_stream(phx_rpc_link *link, uint32_t pieces, const void *const *data, const uint64_t *sizes, uint64_t *done)
{
    struct phx_rpc_end_of_ring *out = &link->out[PHX_RPC_BULK_LANE];
    const uint64_t nbytes = sum(pieces, sizes);
    while (*done < nbytes) {
        if (phx_rpc_cannot_send(link))
            return PHX_PEER_LOST;
        const uint64_t some = nbytes - *done < PHX_RPC_PIECE ? nbytes - *done : PHX_RPC_PIECE;
        const uint64_t taken = atomic_load_explicit(&out->ring->tail, memory_order_acquire);
        void *place = phx_rpc_reserve(out, *done ? PHX_RPC_MORE : PHX_RPC_FIRST, some, nbytes);
        if (!place && (out->no_memory || !took(out->ring, taken)))
            return phx_rpc_no_room(link, out);
        if (!place)
            continue;
        gather(place, pieces, data, sizes, *done, some, 0);
        phx_rpc_publish(out, some);
        *done += some;
        /* The first piece of memory is the beginning of the image. A waiting caller assembles its answer itself. */
        phx_rpc_ring_for(link, data[0]);
    }
    return PHX_OK;
}

void phx_rpc_wait_room(phx_rpc_link *link, uint32_t lane, uint64_t taken)
{
    if (phx_rpc_cannot_send(link))
        return;
    struct phx_rpc_ring *ring = link->out[lane].ring;
    if (atomic_load_explicit(&ring->tail, memory_order_acquire) == taken)
        phx_sleep(phx_low_half(&ring->tail), (uint32_t)taken, &ring->waiting);
}

uint64_t phx_rpc_taken(phx_rpc_link *link, uint32_t lane)
{
    return atomic_load_explicit(&link->own->rings[lane].tail, memory_order_acquire);
}
