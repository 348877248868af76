/* All-gather and gather: every rank puts its piece into its slot; the ranks that get the result (all, or the root) copy
 * the others' out. One synchronisation per piece; each rank copies n bytes in, and the ranks that get the result p * n
 * out. */
#include <string.h>

#include "segment/call.h"
#include "collectives/chunks.h"
#include "segment/copy.h"
#include "collectives/pipeline.h"
#include "collectives/wait.h"

struct gather {
    const char *in;
    void *const *outs; /* NULL on ranks that do not get the result */
    uint64_t nbytes;
};

static void put(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct gather *call = job;
    const uint64_t step = comm->chunk_bytes, at = i * step;
    memcpy(phx_slot(comm, comm->rank, chunk), call->in + at, phx_piece(call->nbytes, at, step));
    phx_moved(comm, PHX_PUT, phx_slot(comm, comm->rank, chunk), phx_piece(call->nbytes, at, step));
}

static int take(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct gather *call = job;
    const uint64_t step = comm->chunk_bytes, at = i * step;
    /* Each rank starts with the one after it, so that they do not all read the same slot at once. */
    for (uint32_t n = 1; call->outs && n < comm->size; n++) {
        const uint32_t p = (comm->rank + n) % comm->size;
        const int status = phx_wait_ready(comm, p, chunk);
        if (status)
            return status;
        phx_copy_out(comm, (char *)call->outs[p] + at, phx_slot(comm, p, chunk), phx_piece(call->nbytes, at, step),
                     call->nbytes * comm->size);
    }
    return PHX_OK;
}

static int gather(phx_comm *comm, struct gather *job, uint64_t call)
{
    const struct phx_steps steps = {put, take};
    const int status = phx_pass_call(comm, phx_pieces(job->nbytes, comm->chunk_bytes), call, steps, job);
    if (!status && job->outs && job->outs[comm->rank] != job->in)
        memmove(job->outs[comm->rank], job->in, job->nbytes);
    return status;
}

int phx_all_gather(phx_comm *comm, const void *in, void *const *outs, uint64_t nbytes, uint32_t dtype, uint64_t shape)
{
    struct gather job = {in, outs, nbytes};
    if (phx_lacks_memory(in, nbytes) || phx_any_lacks_memory((const void *const *)outs, comm->size, nbytes))
        return PHX_BAD_ARGUMENT;
    return gather(comm, &job, phx_call(PHX_ALL_GATHER, dtype, PHX_NO_OP, 0, nbytes, shape));
}

int phx_gather(phx_comm *comm, const void *in, void *const *outs, uint64_t nbytes, uint32_t dtype, uint32_t root,
               uint64_t shape)
{
    struct gather job = {in, comm->rank == root ? outs : NULL, nbytes};
    if (root >= comm->size || phx_lacks_memory(in, nbytes))
        return PHX_BAD_ARGUMENT;
    if (job.outs && phx_any_lacks_memory((const void *const *)outs, comm->size, nbytes))
        return PHX_BAD_ARGUMENT;
    return gather(comm, &job, phx_call(PHX_GATHER, dtype, PHX_NO_OP, root, nbytes, shape));
}
