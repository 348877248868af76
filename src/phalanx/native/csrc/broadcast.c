/* Broadcast: the root puts each chunk into its slot, the others copy it out. One synchronisation per chunk and
 * reader; the root runs up to two chunks ahead and does not wait for the last reader. n bytes copied by each. */
#include <string.h>

#include "call.h"
#include "wait.h"

int phx_broadcast(phx_comm *comm, void *data, uint64_t nbytes, uint32_t root)
{
    if (root >= comm->size)
        return PHX_BAD_ARGUMENT;
    const uint64_t call = phx_call_pack(PHX_BROADCAST, PHX_BYTES, PHX_NO_OP, root, nbytes);
    uint64_t at = 0;
    do { /* also for no bytes at all: every call takes at least one chunk, so that calls are compared */
        const uint64_t chunk = comm->chunk;
        const uint64_t length = nbytes - at < comm->chunk_bytes ? nbytes - at : comm->chunk_bytes;
        int status = phx_enter(comm, chunk, call);
        if (status)
            return status;
        if (comm->rank == root) {
            memcpy(phx_slot(comm, root, chunk), (char *)data + at, length);
            phx_put(comm, chunk);
        } else {
            phx_put(comm, chunk);
            if ((status = phx_wait_ready(comm, root, chunk)))
                return status;
            memcpy((char *)data + at, phx_slot(comm, root, chunk), length);
        }
        comm->chunk = chunk + 1;
        at += length;
    } while (at < nbytes);
    return PHX_OK;
}
