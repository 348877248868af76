/* All-reduce and reduce in shared memory; the result is taken in rank order on every path.
 *
 * Small (at most small_bytes over all ranks): every rank puts in its whole input, waits for the others and combines
 * all slots. One synchronisation; p * n bytes read per rank (by the root alone for a reduce).
 *
 * Otherwise, chunk by chunk (the reduce-scatter and all-gather of Rabenseifner 2004, without its messages):
 * rank r is the only one to reduce slice r. It puts in only what the others reduce, combines slice r of the
 * others' slots with its own input, leaves the result in its slot and its output, and copies out the others'
 * slices (for a reduce: only the root does). Two synchronisations per chunk; each rank copies 2 (p-1)/p * n
 * bytes and reads n while reducing. The next chunk is put in before this one is awaited, so a rank that is
 * ahead does not stand still. */
#include <string.h>

#include "call.h"
#include "chunks.h"
#include "kernels.h"
#include "wait.h"

#define COPY_BLOCK 8192u /* bytes reduced before they are copied to the output: still in the first-level cache */

struct reduction {
    const char *in;
    char *out; /* NULL on ranks that do not get the result */
    uint64_t nbytes, call;
    phx_reduce_fn reduce;
    size_t element;
};

struct piece {
    uint64_t first, last; /* bytes within the chunk */
};

/* The slice of a chunk of `nbytes` that `rank` reduces: whole cache lines, so no two ranks write one. */
static struct piece slice_of(const phx_comm *comm, uint32_t rank, uint64_t nbytes)
{
    const uint64_t lines = (nbytes + PHX_LINE - 1) / PHX_LINE;
    const uint64_t first = lines * rank / comm->size * PHX_LINE;
    const uint64_t last = lines * (rank + 1) / comm->size * PHX_LINE;
    return (struct piece){first < nbytes ? first : nbytes, last < nbytes ? last : nbytes};
}

static int reduce_small(phx_comm *comm, const struct reduction *job)
{
    const uint64_t chunk = comm->chunk;
    int status = phx_enter(comm, chunk, job->call);
    if (status)
        return status;
    memcpy(phx_slot(comm, comm->rank, chunk), job->in, job->nbytes);
    phx_put(comm, chunk);
    for (uint32_t p = 0; p < comm->size && job->out; p++) {
        if (p != comm->rank && (status = phx_wait_ready(comm, p, chunk)))
            return status;
        comm->inputs[p] = phx_slot(comm, p, chunk);
    }
    if (job->out)
        job->reduce(job->out, comm->inputs, comm->size, job->nbytes / job->element);
    comm->chunk = chunk + 1;
    return PHX_OK;
}

static int put_others_slices(phx_comm *comm, const struct reduction *job, uint64_t at, uint64_t length, uint64_t chunk)
{
    const int status = phx_enter(comm, chunk, job->call);
    if (status)
        return status;
    const struct piece mine = slice_of(comm, comm->rank, length);
    char *slot = phx_slot(comm, comm->rank, chunk);
    memcpy(slot, job->in + at, mine.first);
    memcpy(slot + mine.last, job->in + at + mine.last, length - mine.last);
    phx_put(comm, chunk);
    return PHX_OK;
}

static int reduce_own_slice(phx_comm *comm, const struct reduction *job, uint64_t at, uint64_t length, uint64_t chunk)
{
    const struct piece mine = slice_of(comm, comm->rank, length);
    char *slot = phx_slot(comm, comm->rank, chunk);
    for (uint32_t p = 0; p < comm->size; p++) {
        const int status = p == comm->rank ? PHX_OK : phx_wait_ready(comm, p, chunk);
        if (status)
            return status;
    }
    for (uint64_t i = mine.first; i < mine.last; i += COPY_BLOCK) {
        const uint64_t block = phx_piece(mine.last, i, COPY_BLOCK);
        for (uint32_t p = 0; p < comm->size; p++)
            comm->inputs[p] = p == comm->rank ? job->in + at + i : phx_slot(comm, p, chunk) + i;
        job->reduce(slot + i, comm->inputs, comm->size, block / job->element);
        if (job->out)
            memcpy(job->out + at + i, slot + i, block);
    }
    phx_raise(comm, &comm->flags[comm->rank].done, chunk + 1);
    return PHX_OK;
}

static int copy_others_slices(phx_comm *comm, char *out, uint64_t length, uint64_t chunk)
{
    /* Start behind oneself, so that the ranks do not all read the same slot at once. */
    for (uint32_t i = 1; i < comm->size; i++) {
        const uint32_t p = (comm->rank + i) % comm->size;
        const int status = phx_wait(comm, p, &comm->flags[p].done, chunk + 1);
        if (status)
            return status;
        const struct piece theirs = slice_of(comm, p, length);
        memcpy(out + theirs.first, phx_slot(comm, p, chunk) + theirs.first, theirs.last - theirs.first);
    }
    return PHX_OK;
}

static int reduce_chunked(phx_comm *comm, const struct reduction *job)
{
    const uint64_t first = comm->chunk, step = comm->chunk_bytes;
    const uint64_t chunks = phx_pieces(job->nbytes, step);
    int status = PHX_OK;
    for (uint64_t i = 0; i <= chunks; i++) {
        if (i < chunks) {
            const uint64_t at = i * step;
            if ((status = put_others_slices(comm, job, at, phx_piece(job->nbytes, at, step), first + i)))
                return status;
        }
        if (i > 0) {
            const uint64_t at = (i - 1) * step, length = phx_piece(job->nbytes, at, step);
            status = reduce_own_slice(comm, job, at, length, first + i - 1);
            if (!status && job->out)
                status = copy_others_slices(comm, job->out + at, length, first + i - 1);
            if (status)
                return status;
        }
    }
    comm->chunk = first + chunks;
    return PHX_OK;
}

static int reduce(phx_comm *comm, struct reduction *job, uint32_t dtype, uint32_t op, uint64_t count)
{
    job->reduce = phx_reduce_kernel(op, dtype);
    job->element = phx_dtype_bytes(dtype);
    if (!job->reduce)
        return PHX_BAD_ARGUMENT;
    job->nbytes = count * job->element;
    const int small = job->nbytes * comm->size <= comm->small_bytes && job->nbytes <= comm->chunk_bytes;
    return small ? reduce_small(comm, job) : reduce_chunked(comm, job);
}

int phx_all_reduce(phx_comm *comm, const void *in, void *out, uint64_t count, uint32_t dtype, uint32_t op,
                   uint64_t shape)
{
    struct reduction job = {.in = in, .out = out};
    job.call = phx_call(PHX_ALL_REDUCE, dtype, op, 0, count, shape);
    return reduce(comm, &job, dtype, op, count);
}

int phx_reduce(phx_comm *comm, const void *in, void *out, uint64_t count, uint32_t dtype, uint32_t op, uint32_t root,
               uint64_t shape)
{
    if (root >= comm->size)
        return PHX_BAD_ARGUMENT;
    struct reduction job = {.in = in, .out = comm->rank == root ? out : NULL};
    job.call = phx_call(PHX_REDUCE, dtype, op, root, count, shape);
    return reduce(comm, &job, dtype, op, count);
}
