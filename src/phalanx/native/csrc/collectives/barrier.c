/* Barrier: one chunk without data. Each rank raises its counter and reads those of the p - 1 others; one
 * synchronisation. */
#include "collectives/pipeline.h"

static void put_nothing(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    (void)job, (void)i, (void)chunk;
    phx_met(PHX_RAISED, comm->rank);
}

static int await_everybody(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    (void)job, (void)i;
    const int status = phx_wait_all_ready(comm, chunk);
    for (uint32_t p = 0; p < comm->size; p++)
        if (p != comm->rank)
            phx_met(PHX_SAW, p);
    return status;
}

int phx_barrier(phx_comm *comm)
{
    const struct phx_steps steps = {put_nothing, await_everybody};
    return phx_pass_call(comm, 1, phx_call(PHX_BARRIER, PHX_BYTES, PHX_NO_OP, 0, 0, 0), steps, NULL);
}
