/* Reduce-scatter: every rank puts the blocks of the others into its slot, a share each, and reduces its own block from
 * its input and the others' slots, in rank order. One synchronisation per piece; each rank copies (p-1) * n bytes in
 * and reads p * n while reducing. */
#include "collectives/kernels.h"
#include "collectives/pipeline.h"

#define BLOCK 8192u /* bytes reduced before they are copied to the output: still in the first-level cache */

struct reduction {
    const void *const *ins;
    char *out;
    uint64_t nbytes;
    phx_reduce_fn reduce;
    size_t element;
};

static void put_others_blocks(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct reduction *call = job;
    const uint64_t step = phx_share(comm), at = i * step, length = phx_piece(call->nbytes, at, step);
    for (uint32_t p = 0; p < comm->size; p++)
        if (p != comm->rank)
            phx_copy_in(comm, phx_share_at(comm, comm->rank, p, chunk), (const char *)call->ins[p] + at, length);
}

static int reduce_own_block(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct reduction *call = job;
    const uint64_t step = phx_share(comm), at = i * step, length = phx_piece(call->nbytes, at, step);
    const char *in = (const char *)call->ins[comm->rank] + at;
    char result[BLOCK]; /* the output may be the input's own block, which must stay whole until it is read */
    const int status = phx_wait_all_ready(comm, chunk);
    if (status)
        return status;
    for (uint64_t b = 0; b < length; b += BLOCK) {
        const uint64_t block = phx_piece(length, b, BLOCK);
        for (uint32_t p = 0; p < comm->size; p++)
            comm->inputs[p] = p == comm->rank ? in + b : phx_share_at(comm, p, comm->rank, chunk) + b;
        call->reduce(result, comm->inputs, comm->size, block / call->element);
        memcpy(call->out + at + b, result, block);
    }
    for (uint32_t p = 0; p < comm->size; p++)
        if (p != comm->rank)
            phx_moved(comm, PHX_ADDED, phx_share_at(comm, p, comm->rank, chunk), length);
    return PHX_OK;
}

int phx_reduce_scatter(phx_comm *comm, const void *const *ins, void *out, uint64_t count, uint32_t dtype, uint32_t op,
                       uint64_t shape)
{
    const struct phx_steps steps = {put_others_blocks, reduce_own_block};
    struct reduction job = {ins, out, 0, phx_reduce_kernel(op, dtype), phx_dtype_bytes(dtype)};
    if (!job.reduce || phx_lacks_memory(out, count) || phx_any_lacks_memory(ins, comm->size, count))
        return PHX_BAD_ARGUMENT;
    job.nbytes = count * job.element;
    const uint64_t call = phx_call(PHX_REDUCE_SCATTER, dtype, op, 0, count, shape);
    return phx_pass_call(comm, phx_pieces(job.nbytes, phx_share(comm)), call, steps, &job);
}
