/* Scatter: the root puts each rank's piece into that rank's own slot, which no other rank uses in a scatter, so a piece
 * is as large as in a broadcast. One synchronisation per piece and reader; the root copies (p-1) * n bytes in, the
 * others n out. */
#include <string.h>

#include "segment/call.h"
#include "collectives/chunks.h"
#include "segment/copy.h"
#include "collectives/pipeline.h"
#include "collectives/wait.h"

struct scatter {
    const void *const *ins;
    char *out;
    uint64_t nbytes;
    uint32_t root;
};

static void put(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct scatter *call = job;
    const uint64_t step = comm->chunk_bytes, at = i * step;
    for (uint32_t p = 0; p < comm->size && comm->rank == call->root; p++)
        if (p != call->root) {
            memcpy(phx_slot(comm, p, chunk), (const char *)call->ins[p] + at, phx_piece(call->nbytes, at, step));
            phx_moved(comm, PHX_PUT, phx_slot(comm, p, chunk), phx_piece(call->nbytes, at, step));
        }
}

static int take(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct scatter *call = job;
    const uint64_t step = comm->chunk_bytes, at = i * step;
    if (comm->rank == call->root)
        return PHX_OK;
    const int status = phx_wait_ready(comm, call->root, chunk);
    if (!status)
        phx_copy_out(comm, call->out + at, phx_slot(comm, comm->rank, chunk), phx_piece(call->nbytes, at, step),
                     call->nbytes);
    return status;
}

int phx_scatter(phx_comm *comm, const void *const *ins, void *out, uint64_t nbytes, uint32_t dtype, uint32_t root,
                uint64_t shape)
{
    const struct phx_steps steps = {put, take};
    struct scatter job = {ins, out, nbytes, root};
    if (root >= comm->size || phx_lacks_memory(out, nbytes))
        return PHX_BAD_ARGUMENT;
    if (comm->rank == root && phx_any_lacks_memory(ins, comm->size, nbytes))
        return PHX_BAD_ARGUMENT;
    const uint64_t call = phx_call(PHX_SCATTER, dtype, PHX_NO_OP, root, nbytes, shape);
    const int status = phx_pass_call(comm, phx_pieces(nbytes, comm->chunk_bytes), call, steps, &job);
    if (!status && comm->rank == root && ins[root] != out)
        memmove(out, ins[root], nbytes);
    return status;
}
