/* All-gather: every rank puts its chunk into its slot and copies out the others'. One synchronisation per
 * chunk; each rank copies n in and p * n out. The next chunk is put in before this one is awaited. */
#include <string.h>

#include "call.h"
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

int phx_all_gather(phx_comm *comm, const void *in, void *const *outs, uint64_t nbytes)
{
    const uint64_t call = phx_call_pack(PHX_ALL_GATHER, PHX_BYTES, PHX_NO_OP, 0, nbytes);
    const uint64_t first = comm->chunk, step = comm->chunk_bytes;
    const uint64_t chunks = nbytes ? (nbytes + step - 1) / step : 1;
    int status = PHX_OK;
    for (uint64_t i = 0; i <= chunks; i++) {
        if (i < chunks) {
            const uint64_t at = i * step, length = nbytes - at < step ? nbytes - at : step;
            if ((status = put_chunk(comm, (const char *)in + at, length, first + i, call)))
                return status;
        }
        for (uint32_t n = 1; i > 0 && n < comm->size; n++) {
            const uint64_t at = (i - 1) * step, length = nbytes - at < step ? nbytes - at : step;
            const uint32_t p = (comm->rank + n) % comm->size;
            if ((status = phx_wait_ready(comm, p, first + i - 1)))
                return status;
            memcpy((char *)outs[p] + at, phx_slot(comm, p, first + i - 1), length);
        }
    }
    if (outs[comm->rank] != in)
        memmove(outs[comm->rank], in, nbytes);
    comm->chunk = first + chunks;
    return PHX_OK;
}
