/* All-reduce and reduce in shared memory; on every path the result is taken in rank order.
 *
 * Small (at most small_bytes over all ranks): every rank puts in its whole input, waits for the others and combines
 * all slots. One synchronisation; p * n bytes read per rank (by the root alone for a reduce).
 *
 * Otherwise, chunk by chunk (the reduce-scatter and all-gather of Rabenseifner 2004, without its messages): rank r is
 * the only one to reduce slice r. It puts in only what the others reduce, combines slice r of the others' slots with
 * its own input, leaves the result in its slot and its output, and copies out the others' slices (for a reduce only the
 * root does). Two synchronisations per chunk; each rank copies 2 (p-1)/p * n bytes and reads n while reducing. */
#include <string.h>

#include "segment/call.h"
#include "collectives/chunks.h"
#include "collectives/kernels.h"
#include "collectives/pipeline.h"
#include "segment/trace.h"
#include "collectives/wait.h"

#define BLOCK 8192u /* bytes reduced before they are copied to the output: still in the first-level cache */

struct reduction {
    const char *in;
    char *out; /* NULL on ranks that do not get the result */
    uint64_t nbytes;
    phx_reduce_fn reduce;
    size_t element;
};

/* -- small ------------------------------------------------------------------------------------------------------ */

static void put_whole(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct reduction *call = job;
    (void)i;
    memcpy(phx_slot(comm, comm->rank, chunk), call->in, call->nbytes);
    phx_moved(comm, PHX_PUT, phx_slot(comm, comm->rank, chunk), call->nbytes);
}

static int reduce_whole(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct reduction *call = job;
    (void)i;
    if (!call->out)
        return PHX_OK;
    const int status = phx_wait_all_ready(comm, chunk);
    if (status)
        return status;
    for (uint32_t p = 0; p < comm->size; p++)
        comm->inputs[p] = phx_slot(comm, p, chunk);
    call->reduce(call->out, comm->inputs, comm->size, call->nbytes / call->element);
    for (uint32_t p = 0; p < comm->size; p++)
        phx_moved(comm, PHX_ADDED, phx_slot(comm, p, chunk), call->nbytes);
    return PHX_OK;
}

/* -- large ------------------------------------------------------------------------------------------------------ */

struct slice {
    uint64_t first, last; /* bytes within the chunk */
};

/* The slice of a chunk of `nbytes` that `rank` reduces: whole cache lines, so no two ranks write one. */
static struct slice slice_of(const phx_comm *comm, uint32_t rank, uint64_t nbytes)
{
    const uint64_t lines = (nbytes + PHX_LINE - 1) / PHX_LINE;
    const uint64_t first = lines * rank / comm->size * PHX_LINE;
    const uint64_t last = lines * (rank + 1) / comm->size * PHX_LINE;
    return (struct slice){first < nbytes ? first : nbytes, last < nbytes ? last : nbytes};
}

static void put_others_slices(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct reduction *call = job;
    const uint64_t at = i * comm->chunk_bytes, length = phx_piece(call->nbytes, at, comm->chunk_bytes);
    const struct slice mine = slice_of(comm, comm->rank, length);
    char *slot = phx_slot(comm, comm->rank, chunk);
    memcpy(slot, call->in + at, mine.first);
    memcpy(slot + mine.last, call->in + at + mine.last, length - mine.last);
    phx_moved(comm, PHX_PUT, slot, mine.first);
    phx_moved(comm, PHX_PUT, slot + mine.last, length - mine.last);
}

static int reduce_own_slice(phx_comm *comm, const struct reduction *call, uint64_t at, uint64_t length, uint64_t chunk)
{
    const struct slice mine = slice_of(comm, comm->rank, length);
    char *slot = phx_slot(comm, comm->rank, chunk);
    const int status = phx_wait_all_ready(comm, chunk);
    if (status)
        return status;
    for (uint64_t b = mine.first; b < mine.last; b += BLOCK) {
        const uint64_t block = phx_piece(mine.last, b, BLOCK);
        for (uint32_t p = 0; p < comm->size; p++)
            comm->inputs[p] = p == comm->rank ? call->in + at + b : phx_slot(comm, p, chunk) + b;
        call->reduce(slot + b, comm->inputs, comm->size, block / call->element);
        if (call->out)
            memcpy(call->out + at + b, slot + b, block);
    }
    for (uint32_t p = 0; p < comm->size; p++)
        if (p != comm->rank)
            phx_moved(comm, PHX_ADDED, phx_slot(comm, p, chunk) + mine.first, mine.last - mine.first);
    phx_moved(comm, PHX_PUT, slot + mine.first, mine.last - mine.first);
    phx_raise(comm, &comm->flags[comm->rank].done, chunk + 1);
    return PHX_OK;
}

static int copy_others_slices(phx_comm *comm, char *out, uint64_t length, uint64_t chunk)
{
    /* Each rank starts with the one after it, so that they do not all read the same slot at once. */
    for (uint32_t n = 1; n < comm->size; n++) {
        const uint32_t p = (comm->rank + n) % comm->size;
        const int status = phx_wait(comm, p, &comm->flags[p].done, chunk + 1);
        if (status)
            return status;
        const struct slice theirs = slice_of(comm, p, length);
        memcpy(out + theirs.first, phx_slot(comm, p, chunk) + theirs.first, theirs.last - theirs.first);
        phx_moved(comm, PHX_TAKEN, phx_slot(comm, p, chunk) + theirs.first, theirs.last - theirs.first);
    }
    return PHX_OK;
}

static int reduce_and_copy_slices(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct reduction *call = job;
    const uint64_t at = i * comm->chunk_bytes, length = phx_piece(call->nbytes, at, comm->chunk_bytes);
    const int status = reduce_own_slice(comm, call, at, length, chunk);
    return status || !call->out ? status : copy_others_slices(comm, call->out + at, length, chunk);
}

/* -- calls ------------------------------------------------------------------------------------------------------ */

static int reduce(phx_comm *comm, const void *in, void *out, uint64_t count, uint32_t dtype, uint32_t op, uint64_t call)
{
    const struct phx_steps small = {put_whole, reduce_whole};
    const struct phx_steps large = {put_others_slices, reduce_and_copy_slices};
    const size_t element = phx_dtype_bytes(dtype);
    struct reduction job = {in, out, count * element, phx_reduce_kernel(op, dtype), element};
    if (!job.reduce || phx_lacks_memory(in, job.nbytes))
        return PHX_BAD_ARGUMENT;
    if (job.nbytes * comm->size <= comm->small_bytes && job.nbytes <= comm->chunk_bytes)
        return phx_pass_call(comm, 1, call, small, &job);
    return phx_pass_call(comm, phx_pieces(job.nbytes, comm->chunk_bytes), call, large, &job);
}

int phx_all_reduce(phx_comm *comm, const void *in, void *out, uint64_t count, uint32_t dtype, uint32_t op,
                   uint64_t shape)
{
    if (phx_lacks_memory(out, count))
        return PHX_BAD_ARGUMENT;
    return reduce(comm, in, out, count, dtype, op, phx_call(PHX_ALL_REDUCE, dtype, op, 0, count, shape));
}

int phx_reduce(phx_comm *comm, const void *in, void *out, uint64_t count, uint32_t dtype, uint32_t op, uint32_t root,
               uint64_t shape)
{
    if (root >= comm->size || (comm->rank == root && phx_lacks_memory(out, count)))
        return PHX_BAD_ARGUMENT;
    const uint64_t call = phx_call(PHX_REDUCE, dtype, op, root, count, shape);
    return reduce(comm, in, comm->rank == root ? out : NULL, count, dtype, op, call);
}
