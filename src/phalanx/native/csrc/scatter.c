/* Scatter: the root puts each rank's chunk into that rank's own slot, which nobody else uses in a scatter, so a
 * chunk is as large as in a broadcast. One synchronisation per chunk and reader; the root copies (p-1) * n bytes and
 * runs up to two chunks ahead, the others copy n. */
#include <string.h>

#include "call.h"
#include "chunks.h"
#include "copy.h"
#include "wait.h"

int phx_scatter(phx_comm *comm, const void *const *ins, void *out, uint64_t nbytes, uint32_t dtype, uint32_t root,
                uint64_t shape)
{
    if (root >= comm->size)
        return PHX_BAD_ARGUMENT;
    const uint64_t call = phx_call(PHX_SCATTER, dtype, PHX_NO_OP, root, nbytes, shape);
    const uint64_t step = comm->chunk_bytes, chunks = phx_pieces(nbytes, step), first = comm->chunk;
    for (uint64_t i = 0; i < chunks; i++) {
        const uint64_t chunk = first + i, at = i * step, length = phx_piece(nbytes, at, step);
        int status = phx_enter(comm, chunk, call);
        if (status)
            return status;
        for (uint32_t p = 0; p < comm->size && comm->rank == root; p++)
            if (p != root)
                memcpy(phx_slot(comm, p, chunk), (const char *)ins[p] + at, length);
        phx_put(comm, chunk);
        if (comm->rank != root) {
            if ((status = phx_wait_ready(comm, root, chunk)))
                return status;
            phx_copy_out(comm, (char *)out + at, phx_slot(comm, comm->rank, chunk), length, nbytes);
        }
    }
    comm->chunk = first + chunks;
    if (comm->rank == root && ins[root] != out)
        memmove(out, ins[root], nbytes);
    return PHX_OK;
}
