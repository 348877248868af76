/* Collectives that copy and do not combine. One synchronisation per piece.
 *
 *   barrier              one chunk without data
 *   broadcast            the root puts the piece into its slot, the others copy it out: n bytes each
 *   scatter              the root puts each rank's piece into that rank's own slot, which no other rank uses in a scatter,
 *                        so a piece is as large as in a broadcast: (p-1) * n bytes in, n out by each of the others
 *   gather, all-gather   every rank puts its piece into its slot, and the ranks that get the result (the root, or all) copy
 *                        the others' out: n bytes in, p * n out
 *
 * A rank that only puts does not wait for those that take. */
#include "collectives/pipeline.h"

/* -- from the root ------------------------------------------------------------------------------------------------ */

struct spread {
    const void *const *ins; /* of the root: a piece for each rank; NULL in a broadcast */
    char *data;             /* the root's in a broadcast; elsewhere where the rank's own goes */
    uint64_t nbytes;
    uint32_t root, slot;    /* `slot`: the rank in whose slot this one's piece lies */
};

static void put_from_root(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct spread *call = job;
    const uint64_t at = i * comm->chunk_bytes, length = phx_piece(call->nbytes, at, comm->chunk_bytes);
    if (comm->rank != call->root)
        return;
    if (!call->ins)
        phx_copy_in(comm, phx_slot(comm, call->root, chunk), call->data + at, length);
    for (uint32_t p = 0; p < comm->size && call->ins; p++)
        if (p != call->root)
            phx_copy_in(comm, phx_slot(comm, p, chunk), (const char *)call->ins[p] + at, length);
}

static int take_from_root(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct spread *call = job;
    const uint64_t at = i * comm->chunk_bytes, length = phx_piece(call->nbytes, at, comm->chunk_bytes);
    if (comm->rank == call->root)
        return PHX_OK;
    const int status = phx_wait_ready(comm, call->root, chunk);
    if (!status)
        phx_copy_out(comm, call->data + at, phx_slot(comm, call->slot, chunk), length, call->nbytes);
    return status;
}

static int spread(phx_comm *comm, struct spread *job, uint64_t call)
{
    const struct phx_steps steps = {put_from_root, take_from_root};
    return phx_pass_call(comm, phx_pieces(job->nbytes, comm->chunk_bytes), call, steps, job);
}

int phx_broadcast(phx_comm *comm, void *data, uint64_t nbytes, uint32_t dtype, uint32_t root, uint64_t shape)
{
    struct spread job = {NULL, data, nbytes, root, root};
    if (root >= comm->size || phx_lacks_memory(data, nbytes))
        return PHX_BAD_ARGUMENT;
    return spread(comm, &job, phx_call(PHX_BROADCAST, dtype, PHX_NO_OP, root, nbytes, shape));
}

int phx_scatter(phx_comm *comm, const void *const *ins, void *out, uint64_t nbytes, uint32_t dtype, uint32_t root,
                uint64_t shape)
{
    struct spread job = {ins, out, nbytes, root, comm->rank};
    if (root >= comm->size || phx_lacks_memory(out, nbytes))
        return PHX_BAD_ARGUMENT;
    if (comm->rank == root && phx_any_lacks_memory(ins, comm->size, nbytes))
        return PHX_BAD_ARGUMENT;
    const int status = spread(comm, &job, phx_call(PHX_SCATTER, dtype, PHX_NO_OP, root, nbytes, shape));
    if (!status && comm->rank == root && ins[root] != out)
        memmove(out, ins[root], nbytes);
    return status;
}

/* -- from all ----------------------------------------------------------------------------------------------------- */

struct gather {
    const char *in;
    void *const *outs; /* NULL on ranks that do not get the result */
    uint64_t nbytes;
};

static void put_own(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct gather *call = job;
    const uint64_t at = i * comm->chunk_bytes;
    phx_copy_in(comm, phx_slot(comm, comm->rank, chunk), call->in + at, phx_piece(call->nbytes, at, comm->chunk_bytes));
}

static int take_others(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct gather *call = job;
    const uint64_t at = i * comm->chunk_bytes, length = phx_piece(call->nbytes, at, comm->chunk_bytes);
    /* Each rank starts with the one after it, so that they do not all read the same slot at once. */
    for (uint32_t n = 1; call->outs && n < comm->size; n++) {
        const uint32_t p = (comm->rank + n) % comm->size;
        const int status = phx_wait_ready(comm, p, chunk);
        if (status)
            return status;
        phx_copy_out(comm, (char *)call->outs[p] + at, phx_slot(comm, p, chunk), length, call->nbytes * comm->size);
    }
    return PHX_OK;
}

static int gather(phx_comm *comm, struct gather *job, uint64_t call)
{
    const struct phx_steps steps = {put_own, take_others};
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

/* -- barrier ------------------------------------------------------------------------------------------------------ */

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
