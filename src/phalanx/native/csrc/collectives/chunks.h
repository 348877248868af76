/* Cutting a call's data into pieces of one chunk each, alike on every rank. */
#ifndef PHALANX_CHUNKS_H
#define PHALANX_CHUNKS_H

#include "segment/comm.h"

/* How many pieces of at most `step` bytes. A call without data takes one, so that its call words are compared. */
static inline uint64_t phx_pieces(uint64_t nbytes, uint64_t step)
{
    return nbytes ? (nbytes + step - 1) / step : 1;
}

/* The length of the piece that starts at `at`; 0 beyond the end. */
static inline uint64_t phx_piece(uint64_t nbytes, uint64_t at, uint64_t step)
{
    return at >= nbytes ? 0 : nbytes - at < step ? nbytes - at : step;
}

/* How many bytes of a slot each of the other ranks gets when a rank has different data for every one. */
static inline uint64_t phx_share(const phx_comm *comm)
{
    const uint64_t others = comm->size > 1 ? comm->size - 1 : 1;
    return comm->chunk_bytes / others / PHX_LINE * PHX_LINE;
}

/* Where in the slot of `from` the share for `to` lies. */
static inline char *phx_share_at(const phx_comm *comm, uint32_t from, uint32_t to, uint64_t chunk)
{
    return phx_slot(comm, from, chunk) + (to < from ? to : to - 1) * phx_share(comm);
}

#endif
