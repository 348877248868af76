/* Reading and writing a ring of records between two processes. */
#ifndef PHALANX_RPC_RING_H
#define PHALANX_RPC_RING_H

#include <stddef.h>

#include "system/futex.h"
#include "rpc/memory.h"
#include "rpc/channel.h"

/* One end of a ring: where it lies, and how far this end is. The sender's is guarded by a lock of its process, the
 * receiver's by its hub's. */
struct phx_rpc_end_of_ring {
    struct phx_rpc_ring *ring;
    char *data;
    uint64_t bytes;
    uint64_t at;   /* the sender's head, or the receiver's tail */
    uint64_t seen; /* the other end's counter, as last read */
    uint64_t backed; /* of the sender: how much of the ring, from its start, has memory of the system */
    uint32_t no_memory; /* of the sender: the system had no more for it */
};

#define PHX_RPC_RECORD sizeof(struct phx_rpc_record)
/* The sender of an empty ring continues at its start once it is past this, so that a ring with little traffic has few
 * pages. */
#define PHX_RPC_FRESH 16384u

static inline uint64_t phx_rpc_takes(uint64_t nbytes)
{
    return PHX_RPC_RECORD + (nbytes + 15) / 16 * 16;
}

/* Have the system provide the ring's memory up to `end`, and some more, so that it is seldom asked. */
static inline int phx_rpc_back_ring(struct phx_rpc_end_of_ring *out, uint64_t end)
{
    const uint64_t page = phx_rpc_page_bytes(), step = page > PHX_RPC_FRESH ? page : PHX_RPC_FRESH;
    end = (end + step - 1) / step * step;
    out->no_memory = !phx_rpc_back(out->data + out->backed, end - out->backed);
    if (!out->no_memory)
        out->backed = end;
    return !out->no_memory;
}

/* Find room for a record of `nbytes`, half of the ring at most, and write its header. Returns where its bytes go.
 * Returns NULL if the ring is full, or if the system has no memory for it; then `no_memory` is set. */
static inline void *phx_rpc_reserve(struct phx_rpc_end_of_ring *out, uint32_t type, uint64_t nbytes)
{
    const uint64_t need = phx_rpc_takes(nbytes), at = out->at % out->bytes, rest = out->bytes - at;
    uint64_t skip = need > rest ? rest : 0;
    if (out->at + skip + need - out->seen > out->bytes || (!skip && at >= PHX_RPC_FRESH && at < out->bytes / 2))
        out->seen = atomic_load_explicit(&out->ring->tail, memory_order_acquire);
    if (!skip && at >= PHX_RPC_FRESH && out->seen == out->at && rest + need <= out->bytes)
        skip = rest;
    if (out->at + skip + need - out->seen > out->bytes)
        return NULL;
    const uint64_t end = skip ? at + PHX_RPC_RECORD : at + need;
    if ((end > out->backed && !phx_rpc_back_ring(out, end)) ||
        (skip && need > out->backed && !phx_rpc_back_ring(out, need)))
        return NULL;
    if (skip) {
        *(struct phx_rpc_record *)(out->data + at) =
            (struct phx_rpc_record){.nbytes = (uint32_t)(skip - PHX_RPC_RECORD), .type = PHX_RPC_SKIP};
        out->at += skip;
    }
    char *place = out->data + out->at % out->bytes;
    *(struct phx_rpc_record *)place = (struct phx_rpc_record){.nbytes = (uint32_t)nbytes, .type = type};
    return place + PHX_RPC_RECORD;
}

/* Publish the record that was reserved last. */
static inline void phx_rpc_publish(struct phx_rpc_end_of_ring *out, uint64_t nbytes)
{
    out->at += phx_rpc_takes(nbytes);
    atomic_store_explicit(&out->ring->head, out->at, memory_order_release);
}

static inline int phx_rpc_waiting(const struct phx_rpc_end_of_ring *in)
{
    return atomic_load_explicit(&in->ring->head, memory_order_acquire) != in->at;
}

/* Take `bytes` out of the ring, and wake a sender that waits for room. */
static inline void phx_rpc_advance(struct phx_rpc_end_of_ring *in, uint64_t bytes)
{
    in->at += bytes;
    atomic_store_explicit(&in->ring->tail, in->at, memory_order_seq_cst);
    if (atomic_load_explicit(&in->ring->waiting, memory_order_seq_cst))
        phx_wake(phx_low_half(&in->ring->tail));
}

/* Look at the next record. Returns 1 with a copy of it, and where its bytes are; 0 if there is none; -1 if what is
 * there cannot be a record. */
static inline int phx_rpc_peek(struct phx_rpc_end_of_ring *in, struct phx_rpc_record *record, const char **bytes)
{
    for (;;) {
        const uint64_t there = atomic_load_explicit(&in->ring->head, memory_order_acquire) - in->at;
        if (!there)
            return 0;
        const uint64_t at = in->at % in->bytes;
        *record = *(volatile const struct phx_rpc_record *)(in->data + at);
        const uint64_t takes = phx_rpc_takes(record->nbytes);
        if (there > in->bytes || there % 16 || takes > there || at + takes > in->bytes)
            return -1;
        if (record->type != PHX_RPC_SKIP) {
            *bytes = in->data + at + PHX_RPC_RECORD;
            return 1;
        }
        phx_rpc_advance(in, takes);
    }
}

#endif
