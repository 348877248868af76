/* Barrier: one empty chunk. Each rank raises its flag and looks at p - 1 others; one synchronisation. */
#include "call.h"
#include "wait.h"

int phx_barrier(phx_comm *comm)
{
    const uint64_t chunk = comm->chunk;
    int status = phx_enter(comm, chunk, phx_call(PHX_BARRIER, PHX_BYTES, PHX_NO_OP, 0, 0, 0));
    if (status)
        return status;
    phx_put(comm, chunk);
    for (uint32_t p = 0; p < comm->size; p++)
        if (p != comm->rank && (status = phx_wait_ready(comm, p, chunk)))
            return status;
    comm->chunk = chunk + 1;
    return PHX_OK;
}
