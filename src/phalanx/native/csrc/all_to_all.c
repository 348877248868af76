/* All-to-all with a size of its own for every pair.
 *
 * First chunk: every rank publishes how much it sends to each other rank and, if all of it fits behind that row, the
 * data itself. After it every rank knows all sizes, checks that what it expects from each is what that one sends,
 * and knows how many more chunks there are. In those, each rank's slot holds a share for every other rank.
 * One synchronisation per chunk; each rank copies what it sends in and what it receives out. */
#include <string.h>

#include "call.h"
#include "chunks.h"
#include "copy.h"
#include "wait.h"

/* A rank's row: bytes to rank 0, 1, ...; its own entry counts as nothing, since it crosses no slot. */
static const uint64_t *row_of(const phx_comm *comm, uint32_t rank, uint64_t chunk)
{
    return (const uint64_t *)phx_slot(comm, rank, chunk);
}

static uint64_t row_bytes(const phx_comm *comm)
{
    return ((uint64_t)comm->size * sizeof(uint64_t) + PHX_LINE - 1) / PHX_LINE * PHX_LINE;
}

static int fits(const phx_comm *comm, const uint64_t *row)
{
    uint64_t total = row_bytes(comm);
    for (uint32_t p = 0; p < comm->size; p++)
        total += row[p];
    return total <= comm->chunk_bytes;
}

/* Where the data for `to` begins in a slot whose row says that all of it fits. */
static uint64_t offset_in(const phx_comm *comm, const uint64_t *row, uint32_t to)
{
    uint64_t offset = row_bytes(comm);
    for (uint32_t p = 0; p < to; p++)
        offset += row[p];
    return offset;
}

static int put_row(phx_comm *comm, const void *const *ins, const uint64_t *in_bytes, uint64_t call)
{
    const uint64_t chunk = comm->chunk;
    const int status = phx_enter(comm, chunk, call);
    if (status)
        return status;
    char *slot = phx_slot(comm, comm->rank, chunk);
    uint64_t *row = (uint64_t *)slot;
    for (uint32_t p = 0; p < comm->size; p++)
        row[p] = p == comm->rank ? 0 : in_bytes[p];
    if (fits(comm, row))
        for (uint32_t p = 0; p < comm->size; p++)
            memcpy(slot + offset_in(comm, row, p), ins[p], row[p]);
    phx_put(comm, chunk);
    return PHX_OK;
}

/* Take what fitted into the first chunk; `more` is set to the largest share that did not. */
static int read_rows(phx_comm *comm, void *const *outs, const uint64_t *out_bytes, uint64_t *more)
{
    const uint64_t chunk = comm->chunk;
    *more = 0;
    for (uint32_t p = 0; p < comm->size; p++) {
        const int status = p == comm->rank ? PHX_OK : phx_wait_ready(comm, p, chunk);
        if (status)
            return status;
        const uint64_t *row = row_of(comm, p, chunk);
        if (p != comm->rank && row[comm->rank] != out_bytes[p])
            return phx_break(comm, PHX_MISMATCH, p);
        if (fits(comm, row)) {
            if (p != comm->rank)
                memcpy(outs[p], (const char *)row + offset_in(comm, row, comm->rank), row[comm->rank]);
            continue;
        }
        for (uint32_t to = 0; to < comm->size; to++)
            *more = row[to] > *more ? row[to] : *more;
    }
    return PHX_OK;
}

int phx_all_to_all(phx_comm *comm, const void *const *ins, const uint64_t *in_bytes, void *const *outs,
                   const uint64_t *out_bytes, uint32_t dtype)
{
    const uint64_t call = phx_call(PHX_ALL_TO_ALL, dtype, PHX_NO_OP, 0, 0, 0);
    if (in_bytes[comm->rank] != out_bytes[comm->rank])
        return PHX_BAD_ARGUMENT;
    uint64_t more;
    int status = put_row(comm, ins, in_bytes, call);
    if (!status)
        status = read_rows(comm, outs, out_bytes, &more);
    if (status)
        return status;
    memmove(outs[comm->rank], ins[comm->rank], in_bytes[comm->rank]);
    /* The rows stay readable: their slot is not written again before every rank has entered two chunks more, and
     * each rank reads them only here. */
    const uint64_t rows = comm->chunk, first = rows + 1, step = phx_share(comm);
    const uint64_t chunks = more ? phx_pieces(more, step) : 0;
    const int sent = fits(comm, row_of(comm, comm->rank, rows));
    uint64_t total = 0;
    for (uint32_t p = 0; p < comm->size; p++)
        total += out_bytes[p];
    uint64_t late[PHX_MAX_RANKS / 64] = {0};
    for (uint32_t p = 0; p < comm->size; p++)
        if (!fits(comm, row_of(comm, p, rows)))
            late[p / 64] |= 1ull << p % 64;
    for (uint64_t i = 0; i <= chunks && chunks; i++) {
        if (i < chunks) {
            if ((status = phx_enter(comm, first + i, call)))
                return status;
            for (uint32_t p = 0; p < comm->size && !sent; p++)
                if (p != comm->rank)
                    memcpy(phx_share_at(comm, comm->rank, p, first + i), (const char *)ins[p] + i * step,
                           phx_piece(in_bytes[p], i * step, step));
            phx_put(comm, first + i);
        }
        for (uint32_t n = 1; i > 0 && n < comm->size; n++) {
            const uint64_t at = (i - 1) * step;
            const uint32_t p = (comm->rank + n) % comm->size;
            if ((status = phx_wait_ready(comm, p, first + i - 1)))
                return status;
            if (late[p / 64] >> p % 64 & 1)
                phx_copy_out(comm, (char *)outs[p] + at, phx_share_at(comm, p, comm->rank, first + i - 1),
                             phx_piece(out_bytes[p], at, step), total);
        }
    }
    comm->chunk = first + chunks;
    return PHX_OK;
}
