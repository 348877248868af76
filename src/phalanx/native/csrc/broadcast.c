/* Broadcast: the root puts each chunk into its slot, the others copy it out. One synchronisation per chunk and
 * reader; the root runs up to two chunks ahead and does not wait for the last reader. n bytes copied by each. */
#include <string.h>

#include "call.h"
#include "chunks.h"
#include "copy.h"
#include "wait.h"

int phx_broadcast(phx_comm *comm, void *data, uint64_t nbytes, uint32_t dtype, uint32_t root, uint64_t shape)
{
    if (root >= comm->size)
        return PHX_BAD_ARGUMENT;
    const uint64_t call = phx_call(PHX_BROADCAST, dtype, PHX_NO_OP, root, nbytes, shape);
    const uint64_t step = comm->chunk_bytes, chunks = phx_pieces(nbytes, step), first = comm->chunk;
    for (uint64_t i = 0; i < chunks; i++) {
        const uint64_t chunk = first + i, length = phx_piece(nbytes, i * step, step);
        int status = phx_enter(comm, chunk, call);
        if (status)
            return status;
        if (comm->rank == root)
            memcpy(phx_slot(comm, root, chunk), (char *)data + i * step, length);
        phx_put(comm, chunk);
        if (comm->rank != root) {
            if ((status = phx_wait_ready(comm, root, chunk)))
                return status;
            phx_copy_out(comm, (char *)data + i * step, phx_slot(comm, root, chunk), length, nbytes);
        }
    }
    comm->chunk = first + chunks;
    return PHX_OK;
}
