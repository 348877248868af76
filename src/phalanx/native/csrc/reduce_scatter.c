/* Reduce-scatter: every rank puts the blocks of the others into its slot, a share each, and reduces its own block
 * from its input and the others' slots, in rank order. One synchronisation per chunk; each rank copies (p-1) * n
 * bytes in and reads p * n while reducing. The next chunk is put in before this one is awaited. */
#include <string.h>

#include "call.h"
#include "chunks.h"
#include "kernels.h"
#include "wait.h"

#define BLOCK 8192u

static int put_blocks(phx_comm *comm, const void *const *ins, uint64_t at, uint64_t length, uint64_t chunk,
                      uint64_t call)
{
    const int status = phx_enter(comm, chunk, call);
    if (status)
        return status;
    for (uint32_t p = 0; p < comm->size; p++)
        if (p != comm->rank)
            memcpy(phx_share_at(comm, comm->rank, p, chunk), (const char *)ins[p] + at, length);
    phx_put(comm, chunk);
    return PHX_OK;
}

static int reduce_own_block(phx_comm *comm, const char *in, char *out, uint64_t length, uint64_t chunk,
                            phx_reduce_fn reduce, size_t element)
{
    char result[BLOCK]; /* the output may be the input's own block, which must stay whole until it is read */
    for (uint32_t p = 0; p < comm->size; p++) {
        const int status = p == comm->rank ? PHX_OK : phx_wait_ready(comm, p, chunk);
        if (status)
            return status;
    }
    for (uint64_t i = 0; i < length; i += BLOCK) {
        const uint64_t block = phx_piece(length, i, BLOCK);
        for (uint32_t p = 0; p < comm->size; p++)
            comm->inputs[p] = p == comm->rank ? in + i : phx_share_at(comm, p, comm->rank, chunk) + i;
        reduce(result, comm->inputs, comm->size, block / element);
        memcpy(out + i, result, block);
    }
    return PHX_OK;
}

int phx_reduce_scatter(phx_comm *comm, const void *const *ins, void *out, uint64_t count, uint32_t dtype, uint32_t op,
                       uint64_t shape)
{
    const phx_reduce_fn reduce = phx_reduce_kernel(op, dtype);
    const size_t element = phx_dtype_bytes(dtype);
    if (!reduce)
        return PHX_BAD_ARGUMENT;
    const uint64_t nbytes = count * element, step = phx_share(comm);
    const uint64_t call = phx_call(PHX_REDUCE_SCATTER, dtype, op, 0, count, shape);
    const uint64_t first = comm->chunk, chunks = phx_pieces(nbytes, step);
    int status = PHX_OK;
    for (uint64_t i = 0; i <= chunks; i++) {
        if (i < chunks && (status = put_blocks(comm, ins, i * step, phx_piece(nbytes, i * step, step), first + i, call)))
            return status;
        if (i > 0) {
            const uint64_t at = (i - 1) * step;
            status = reduce_own_block(comm, (const char *)ins[comm->rank] + at, (char *)out + at,
                                      phx_piece(nbytes, at, step), first + i - 1, reduce, element);
            if (status)
                return status;
        }
    }
    comm->chunk = first + chunks;
    return PHX_OK;
}
