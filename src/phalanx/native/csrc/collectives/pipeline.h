/* The steps that every collective is made of, piece by piece: put one's own part in, await the others', take them out.
 * Every collective's file includes this; kernels.h combines numbers, and line_order.h compares the lines that call.
 *
 * A piece is the part of a call's data that one chunk carries. The next piece is put in before this one is awaited, so
 * a rank that is ahead does not stand still, and the others find the next piece there when they need it. That is safe
 * because each rank has PHX_SLOTS slots (segment.h).
 *
 * These are inline so that the compiler sees each collective's own steps in the loop: called through pointers they cost
 * a call of 4 bytes a tenth of its time. */
#ifndef PHALANX_PIPELINE_H
#define PHALANX_PIPELINE_H

#include "collectives/line_order.h"
#include "segment/call.h"
#include "segment/copy.h"

/* -- chunks: entering one, publishing that one's part is in, waiting for the others' parts (wait.c) ---------------- */

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

/* -- pieces ------------------------------------------------------------------------------------------------------- */

/* Count pieces of at most `step` bytes. A call without data takes one, so that its call words are compared. */
static inline uint64_t phx_pieces(uint64_t nbytes, uint64_t step)
{
    return nbytes ? (nbytes + step - 1) / step : 1;
}

/* The length of the piece that starts at `at`; 0 beyond the end. */
static inline uint64_t phx_piece(uint64_t nbytes, uint64_t at, uint64_t step)
{
    return at >= nbytes ? 0 : nbytes - at < step ? nbytes - at : step;
}

/* Return how many of these bytes of a slot each of the other ranks gets when a rank has different data for every one. */
static inline uint64_t phx_share_of(const phx_comm *comm, uint64_t nbytes)
{
    const uint64_t others = comm->size > 1 ? comm->size - 1 : 1;
    return nbytes / others / PHX_LINE * PHX_LINE;
}

static inline uint64_t phx_share(const phx_comm *comm)
{
    return phx_share_of(comm, comm->chunk_bytes);
}

/* Return where in the slot of `from` the share for `to` lies if shares are so large. */
static inline char *phx_share_at(const phx_comm *comm, uint32_t from, uint32_t to, uint64_t chunk, uint64_t share)
{
    return phx_slot(comm, from, chunk) + (to < from ? to : to - 1) * share;
}

struct phx_steps {
    /* Copy this rank's part of piece `i` into the slot for `chunk`. */
    void (*put)(phx_comm *comm, void *job, uint64_t i, uint64_t chunk);
    /* Wait for the parts of piece `i` that this rank needs, and take them out of the slots for `chunk`; returns a
     * status. */
    int (*take)(phx_comm *comm, void *job, uint64_t i, uint64_t chunk);
};

/* Pass `pieces` pieces through the chunks from `first` on, unless this rank is alone in its group. `call` is the call
 * word; `job` is handed to the steps. */
static inline __attribute__((always_inline)) int phx_pass_pieces(phx_comm *comm, uint64_t first, uint64_t pieces,
                                                                 uint64_t call, struct phx_steps steps, void *job)
{
    for (uint64_t i = 0; i <= pieces && comm->size > 1; i++) {
        int status;
        if (pieces > 1 && !comm->whole)
            phx_record_piece(i, pieces);
        if (i < pieces) {
            if ((status = phx_enter(comm, first + i, call)))
                return status;
            steps.put(comm, job, i, first + i);
            phx_publish(comm, first + i);
        }
        if (i > 0 && (status = steps.take(comm, job, i - 1, first + i - 1)))
            return status;
    }
    return PHX_OK;
}

/* A whole call of `pieces` pieces: pass them, and count their chunks. */
static inline __attribute__((always_inline)) int phx_pass_call(phx_comm *comm, uint64_t pieces, uint64_t call,
                                                               struct phx_steps steps, void *job)
{
    const int status = phx_pass_pieces(comm, comm->chunk, pieces, call, steps, job);
    if (status)
        return status;
    comm->chunk += pieces;
    return phx_done(comm);
}

#endif
