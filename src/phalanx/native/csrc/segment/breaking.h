/* Breaking a group: the first rank to notice a problem writes down why, and every wait of every rank ends. */
#ifndef PHALANX_BREAKING_H
#define PHALANX_BREAKING_H

#include "segment/comm.h"

static inline int phx_broken(const phx_comm *comm)
{
    return atomic_load_explicit(&comm->header->breaking, memory_order_acquire) != 0;
}

/* Break the group because of `peer`, unless it is broken already; returns the status of the reason that counts, which
 * is the first. */
int phx_break(phx_comm *comm, int status, uint32_t peer);

/* The same for two calls that differ at `chunk`. */
int phx_break_at(phx_comm *comm, int status, uint32_t peer, uint64_t chunk);

/* The same for a message from `src` whose ends differ. */
int phx_break_message(phx_comm *comm, uint32_t src, const struct phx_end *sent, const struct phx_end *expected);

/* The same for a rank that went, and how. */
int phx_break_gone(phx_comm *comm, uint32_t peer, enum phx_going how);

#endif
