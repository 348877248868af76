/* Broadcast: the root puts each piece into its slot, the others copy it out. One synchronisation per piece and reader;
 * each rank copies n bytes. The root does not wait for the last reader. */
#include <string.h>

#include "segment/call.h"
#include "collectives/chunks.h"
#include "segment/copy.h"
#include "collectives/pipeline.h"
#include "collectives/wait.h"

struct broadcast {
    char *data;
    uint64_t nbytes;
    uint32_t root;
};

static void put(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct broadcast *call = job;
    const uint64_t step = comm->chunk_bytes, at = i * step;
    if (comm->rank != call->root)
        return;
    memcpy(phx_slot(comm, call->root, chunk), call->data + at, phx_piece(call->nbytes, at, step));
    phx_moved(comm, PHX_PUT, phx_slot(comm, call->root, chunk), phx_piece(call->nbytes, at, step));
}

static int take(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct broadcast *call = job;
    const uint64_t step = comm->chunk_bytes, at = i * step;
    if (comm->rank == call->root)
        return PHX_OK;
    const int status = phx_wait_ready(comm, call->root, chunk);
    if (!status)
        phx_copy_out(comm, call->data + at, phx_slot(comm, call->root, chunk), phx_piece(call->nbytes, at, step),
                     call->nbytes);
    return status;
}

int phx_broadcast(phx_comm *comm, void *data, uint64_t nbytes, uint32_t dtype, uint32_t root, uint64_t shape)
{
    const struct phx_steps steps = {put, take};
    struct broadcast job = {data, nbytes, root};
    if (root >= comm->size || phx_lacks_memory(data, nbytes))
        return PHX_BAD_ARGUMENT;
    const uint64_t call = phx_call(PHX_BROADCAST, dtype, PHX_NO_OP, root, nbytes, shape);
    return phx_pass_call(comm, phx_pieces(nbytes, comm->chunk_bytes), call, steps, &job);
}
