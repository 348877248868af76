/* All-gather and gather: every rank puts its chunk into its slot; whoever wants the result (all, or the root) copies
 * the others' out. One synchronisation per chunk; each rank copies n in and p * n out. The next chunk is put in
 * before this one is awaited. */
#include <string.h>

#include "call.h"
#include "chunks.h"
#include "copy.h"
#include "wait.h"

static int put_chunk(phx_comm *comm, const char *in, uint64_t length, uint64_t chunk, uint64_t call)
{
    const int status = phx_enter(comm, chunk, call);
    if (status)
        return status;
    memcpy(phx_slot(comm, comm->rank, chunk), in, length);
    phx_put(comm, chunk);
    return PHX_OK;
}

/* `outs` is NULL on ranks that do not get the result. */
static int collect(phx_comm *comm, const char *in, void *const *outs, uint64_t nbytes, uint64_t call)
{
    const uint64_t first = comm->chunk, step = comm->chunk_bytes;
    const uint64_t chunks = phx_pieces(nbytes, step);
    int status = PHX_OK;
    for (uint64_t i = 0; i <= chunks; i++) {
        if (i < chunks) {
            const uint64_t at = i * step;
            if ((status = put_chunk(comm, in + at, phx_piece(nbytes, at, step), first + i, call)))
                return status;
        }
        for (uint32_t n = 1; i > 0 && outs && n < comm->size; n++) {
            const uint64_t at = (i - 1) * step;
            const uint32_t p = (comm->rank + n) % comm->size;
            if ((status = phx_wait_ready(comm, p, first + i - 1)))
                return status;
            phx_copy_out(comm, (char *)outs[p] + at, phx_slot(comm, p, first + i - 1), phx_piece(nbytes, at, step),
                         nbytes * comm->size);
        }
    }
    if (outs && outs[comm->rank] != in)
        memmove(outs[comm->rank], in, nbytes);
    comm->chunk = first + chunks;
    return PHX_OK;
}

int phx_all_gather(phx_comm *comm, const void *in, void *const *outs, uint64_t nbytes, uint32_t dtype, uint64_t shape)
{
    return collect(comm, in, outs, nbytes, phx_call(PHX_ALL_GATHER, dtype, PHX_NO_OP, 0, nbytes, shape));
}

int phx_gather(phx_comm *comm, const void *in, void *const *outs, uint64_t nbytes, uint32_t dtype, uint32_t root,
               uint64_t shape)
{
    if (root >= comm->size)
        return PHX_BAD_ARGUMENT;
    const uint64_t call = phx_call(PHX_GATHER, dtype, PHX_NO_OP, root, nbytes, shape);
    return collect(comm, in, comm->rank == root ? outs : NULL, nbytes, call);
}
