/* What moves through the segment, told as it moves: `phalanx explain` draws an algorithm from it.
 *
 * In every job `phx_tracer` is NULL, and each hook costs one branch for a piece, which the processor predicts. */
#ifndef PHALANX_TRACE_H
#define PHALANX_TRACE_H

#include "segment/comm.h"

extern phx_tracer_fn phx_tracer;

/* This rank has put, taken or added so many bytes; `place` is where they lie in a slot. */
static inline void phx_moved(const phx_comm *comm, enum phx_traced what, const void *place, uint64_t nbytes)
{
    if (__builtin_expect(phx_tracer != NULL, 0) && nbytes)
        phx_tracer(what, (uint64_t)((const char *)place - comm->slots), place, nbytes);
}

/* This rank has raised a counter of its own, or has seen that of `rank` raised. */
static inline void phx_met(enum phx_traced what, uint32_t rank)
{
    if (__builtin_expect(phx_tracer != NULL, 0))
        phx_tracer(what, rank, NULL, 0);
}

#endif
