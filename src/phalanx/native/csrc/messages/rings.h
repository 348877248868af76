/* Reading and writing the ring of one ordered pair of ranks, and ringing the bell of a rank. */
#ifndef PHALANX_RINGS_H
#define PHALANX_RINGS_H

#include <string.h>

#include "segment/comm.h"
#include "segment/copy.h"
#include "segment/cores.h"
#include "system/futex.h"

/* Messages and their pieces begin at cache lines, since a copy to an address that is not a multiple of 32 takes twice
 * as long. */
#define PHX_ALIGN 64u

_Static_assert(sizeof(struct phx_message_header) <= PHX_ALIGN, "a header never wraps around the end of a ring");

/* The ring through which `src` sends to `dst`. */
static inline struct phx_ring *phx_ring_of(const phx_comm *comm, uint32_t src, uint32_t dst)
{
    return &comm->rings[(uint64_t)src * comm->size + dst];
}

static inline char *phx_ring_data(const phx_comm *comm, uint32_t src, uint32_t dst)
{
    return comm->ring_data + ((uint64_t)src * comm->size + dst) * phx_ring_bytes(comm->size);
}

/* Write into the ring to `dst` at the count `at`, around its end where necessary. */
static inline void phx_ring_write(const phx_comm *comm, uint32_t dst, uint64_t at, const void *from, uint64_t nbytes)
{
    char *data = phx_ring_data(comm, comm->rank, dst);
    const uint64_t size = phx_ring_bytes(comm->size), offset = at % size;
    const uint64_t straight = nbytes < size - offset ? nbytes : size - offset;
    memcpy(data + offset, from, straight);
    memcpy(data, (const char *)from + straight, nbytes - straight);
}

/* Read from the ring from `src` at the count `at`; `total` is the length of the whole message. */
static inline void phx_ring_read(const phx_comm *comm, uint32_t src, uint64_t at, void *to, uint64_t nbytes,
                                 uint64_t total)
{
    const char *data = phx_ring_data(comm, src, comm->rank);
    const uint64_t size = phx_ring_bytes(comm->size), offset = at % size;
    const uint64_t straight = nbytes < size - offset ? nbytes : size - offset;
    phx_copy_out(comm, to, data + offset, straight, total);
    phx_copy_out(comm, (char *)to + straight, data, nbytes - straight, total);
}

static inline uint64_t phx_padded(uint64_t nbytes)
{
    return (nbytes + PHX_ALIGN - 1) / PHX_ALIGN * PHX_ALIGN;
}

/* Wake the threads that sleep on the bell of a place. */
static inline void phx_ring_bell(struct phx_place *place)
{
    atomic_fetch_add_explicit(&place->bell, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&place->listening, memory_order_seq_cst))
        phx_wake(&place->bell);
}

/* Wake the threads of `peer`, to or from which bytes have moved. */
static inline void phx_ring_bell_of(phx_comm *comm, uint32_t peer)
{
    phx_note_cpu(comm);
    phx_ring_bell(&comm->places[peer]);
}

#endif
