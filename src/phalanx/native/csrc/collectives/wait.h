/* Chunks from one rank's side: entering one, publishing that one's part is in, waiting for the others' parts.
 *
 * Beside this: pipeline.h cuts a collective's data and passes the pieces through chunks, kernels.h combines numbers, and
 * line_order.h compares the lines that call. */
#ifndef PHALANX_WAIT_H
#define PHALANX_WAIT_H

#include "segment/comm.h"

/* Wait until this rank may write its slot and call word of `chunk`, and write the call word. */
int phx_enter(phx_comm *comm, uint64_t chunk, uint64_t call);

/* Store `value` into a counter of this rank and wake the ranks that sleep on it. */
void phx_raise(phx_comm *comm, _Atomic uint64_t *word, uint64_t value);

/* Publish that this rank's part of `chunk` is in its slot. */
static inline void phx_publish(phx_comm *comm, uint64_t chunk)
{
    phx_raise(comm, &comm->flags[comm->rank].ready, chunk + 1);
}

/* Wait until a counter of `peer` is at least `target`: spin, yield, then sleep. After every slice of sleep check
 * whether the peer lives, the group is whole, the timeout has passed, and `poll` asks to stop. */
int phx_wait(phx_comm *comm, uint32_t peer, _Atomic uint64_t *word, uint64_t target);

/* Wait until `peer` has published its part of `chunk`, and compare its calls up to that one with this rank's. */
int phx_wait_ready(phx_comm *comm, uint32_t peer, uint64_t chunk);

/* The same for every other rank. */
int phx_wait_all_ready(phx_comm *comm, uint64_t chunk);

#endif
