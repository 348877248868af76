/* All-reduce in shared memory; the result is summed in rank order on every path.
 *
 * Small (up to SMALL_BYTES over all ranks): every rank puts in its whole input, waits for the others and adds
 * all slots. One synchronisation; p * n bytes read per rank.
 *
 * Otherwise, chunk by chunk (sketched by the reduce-scatter + all-gather of Rabenseifner 2004, without its
 * messages): rank r is the only one to reduce slice r. It puts in only what the others reduce, adds slice r of
 * the others' slots to its own input, leaves the sum in its slot and its output, and copies out the others'
 * slices. Two synchronisations per chunk; each rank copies 2 (p-1)/p * n bytes and reads n while adding. The
 * next chunk is put in before this one is awaited, so a rank that is ahead does not stand still. */
#include <string.h>

#include "call.h"
#include "reduce.h"
#include "wait.h"

#define SMALL_BYTES 16384u
#define COPY_BLOCK 8192u /* bytes reduced before they are copied to the output: still in the first-level cache */

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

static int reduce_small(phx_comm *comm, const void *in, void *out, uint64_t count, uint64_t nbytes,
                        phx_reduce_fn reduce, uint64_t call)
{
    const uint64_t chunk = comm->chunk;
    int status = phx_enter(comm, chunk, call);
    if (status)
        return status;
    memcpy(phx_slot(comm, comm->rank, chunk), in, nbytes);
    phx_put(comm, chunk);
    for (uint32_t p = 0; p < comm->size; p++) {
        if (p != comm->rank && (status = phx_wait_ready(comm, p, chunk)))
            return status;
        comm->inputs[p] = phx_slot(comm, p, chunk);
    }
    reduce(out, comm->inputs, comm->size, count);
    comm->chunk = chunk + 1;
    return PHX_OK;
}

static int put_others_slices(phx_comm *comm, const char *in, uint64_t nbytes, uint64_t chunk, uint64_t call)
{
    const int status = phx_enter(comm, chunk, call);
    if (status)
        return status;
    const struct piece mine = slice_of(comm, comm->rank, nbytes);
    char *slot = phx_slot(comm, comm->rank, chunk);
    memcpy(slot, in, mine.first);
    memcpy(slot + mine.last, in + mine.last, nbytes - mine.last);
    phx_put(comm, chunk);
    return PHX_OK;
}

static int reduce_own_slice(phx_comm *comm, const char *in, char *out, uint64_t nbytes, uint64_t chunk,
                            phx_reduce_fn reduce, size_t element)
{
    const struct piece mine = slice_of(comm, comm->rank, nbytes);
    char *slot = phx_slot(comm, comm->rank, chunk);
    for (uint32_t p = 0; p < comm->size; p++) {
        const int status = p == comm->rank ? PHX_OK : phx_wait_ready(comm, p, chunk);
        if (status)
            return status;
    }
    for (uint64_t at = mine.first; at < mine.last; at += COPY_BLOCK) {
        const uint64_t length = mine.last - at < COPY_BLOCK ? mine.last - at : COPY_BLOCK;
        for (uint32_t p = 0; p < comm->size; p++)
            comm->inputs[p] = p == comm->rank ? in + at : phx_slot(comm, p, chunk) + at;
        reduce(slot + at, comm->inputs, comm->size, length / element);
        memcpy(out + at, slot + at, length);
    }
    phx_raise(comm, &comm->flags[comm->rank].done, chunk + 1);
    return PHX_OK;
}

static int copy_others_slices(phx_comm *comm, char *out, uint64_t nbytes, uint64_t chunk)
{
    /* Start behind oneself, so that the ranks do not all read the same slot at once. */
    for (uint32_t i = 1; i < comm->size; i++) {
        const uint32_t p = (comm->rank + i) % comm->size;
        const int status = phx_wait(comm, p, &comm->flags[p].done, chunk + 1);
        if (status)
            return status;
        const struct piece theirs = slice_of(comm, p, nbytes);
        memcpy(out + theirs.first, phx_slot(comm, p, chunk) + theirs.first, theirs.last - theirs.first);
    }
    return PHX_OK;
}

static int reduce_chunked(phx_comm *comm, const char *in, char *out, uint64_t nbytes, phx_reduce_fn reduce,
                          size_t element, uint64_t call)
{
    const uint64_t first = comm->chunk, step = comm->chunk_bytes;
    const uint64_t chunks = (nbytes + step - 1) / step;
    int status = PHX_OK;
    for (uint64_t i = 0; i <= chunks; i++) {
        if (i < chunks) {
            const uint64_t at = i * step, length = nbytes - at < step ? nbytes - at : step;
            status = put_others_slices(comm, in + at, length, first + i, call);
            if (status)
                return status;
        }
        if (i > 0) {
            const uint64_t at = (i - 1) * step, length = nbytes - at < step ? nbytes - at : step;
            status = reduce_own_slice(comm, in + at, out + at, length, first + i - 1, reduce, element);
            if (!status)
                status = copy_others_slices(comm, out + at, length, first + i - 1);
            if (status)
                return status;
        }
    }
    comm->chunk = first + chunks;
    return PHX_OK;
}

int phx_all_reduce(phx_comm *comm, const void *in, void *out, uint64_t count, uint32_t dtype, uint32_t op)
{
    const phx_reduce_fn reduce = phx_reduce_kernel(op, dtype);
    const size_t element = phx_dtype_bytes(dtype);
    if (!reduce)
        return PHX_BAD_ARGUMENT;
    const uint64_t nbytes = count * element;
    const uint64_t call = phx_call_pack(PHX_ALL_REDUCE, dtype, op, 0, nbytes);
    if (nbytes * comm->size <= SMALL_BYTES && nbytes <= comm->chunk_bytes)
        return reduce_small(comm, in, out, count, nbytes, reduce, call);
    return reduce_chunked(comm, in, out, nbytes, reduce, element, call);
}
