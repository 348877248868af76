/* All-to-all with a size of its own for every pair.
 *
 * First chunk: every rank publishes a row, which says how many bytes it sends to each rank, and, if all of them fit
 * into the slot after the row, the data itself. After it every rank knows all sizes, has checked that what it expects
 * of each is what that one sends, and knows how many more chunks there are. In those, each rank's slot holds a share
 * for every other rank. One synchronisation per chunk; each rank copies what it sends in and what it receives out. */
#include "collectives/pipeline.h"

struct exchange {
    const void *const *ins;
    const uint64_t *in_bytes;
    void *const *outs;
    const uint64_t *out_bytes;
    uint64_t received;                 /* bytes from all ranks together */
    uint64_t largest;                  /* the most bytes that one rank sends another after the first chunk */
    uint64_t late[PHX_MAX_RANKS / 64]; /* a bit for each rank whose data does not fit into the first chunk */
};

static int is_late(const struct exchange *call, uint32_t rank)
{
    return (int)(call->late[rank / 64] >> rank % 64 & 1);
}

/* -- first chunk: the rows, and the data if it fits -------------------------------------------------------------- */

static uint64_t row_bytes(const phx_comm *comm)
{
    return ((uint64_t)comm->size * sizeof(uint64_t) + PHX_LINE - 1) / PHX_LINE * PHX_LINE;
}

/* Return where the data for `to` begins in the slot of a rank with this row; for `to` = size, where the data ends. */
static uint64_t offset_in(const phx_comm *comm, const uint64_t *row, uint32_t to)
{
    uint64_t offset = row_bytes(comm);
    for (uint32_t p = 0; p < to; p++)
        offset += row[p];
    return offset;
}

static int fits(const phx_comm *comm, const uint64_t *row)
{
    return offset_in(comm, row, comm->size) <= comm->chunk_bytes;
}

static void put_row(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct exchange *call = job;
    char *slot = phx_slot(comm, comm->rank, chunk);
    uint64_t *row = (uint64_t *)slot;
    (void)i;
    for (uint32_t p = 0; p < comm->size; p++)
        row[p] = p == comm->rank ? 0 : call->in_bytes[p]; /* what a rank sends itself crosses no slot */
    if (fits(comm, row))
        for (uint32_t p = 0; p < comm->size; p++)
            phx_copy_in(comm, slot + offset_in(comm, row, p), call->ins[p], row[p]);
}

static int take_rows(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    struct exchange *call = job;
    (void)i;
    for (uint32_t p = 0; p < comm->size; p++) {
        const int status = p == comm->rank ? PHX_OK : phx_wait_ready(comm, p, chunk);
        if (status)
            return status;
        const uint64_t *row = (const uint64_t *)phx_slot(comm, p, chunk);
        if (p != comm->rank && row[comm->rank] != call->out_bytes[p])
            return phx_break(comm, PHX_MISMATCH, p);
        if (fits(comm, row)) {
            if (p == comm->rank)
                continue;
            const char *data = (const char *)row + offset_in(comm, row, comm->rank);
            memcpy(call->outs[p], data, row[comm->rank]);
            phx_moved(comm, PHX_TAKEN, data, row[comm->rank]);
            continue;
        }
        call->late[p / 64] |= 1ull << p % 64;
        for (uint32_t to = 0; to < comm->size; to++)
            call->largest = row[to] > call->largest ? row[to] : call->largest;
    }
    return PHX_OK;
}

/* -- further chunks: a share for every other rank ---------------------------------------------------------------- */

static void put_shares(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct exchange *call = job;
    const uint64_t step = phx_share(comm), at = i * step;
    if (!is_late(call, comm->rank))
        return;
    for (uint32_t p = 0; p < comm->size; p++)
        if (p != comm->rank)
            phx_copy_in(comm, phx_share_at(comm, comm->rank, p, chunk), (const char *)call->ins[p] + at,
                        phx_piece(call->in_bytes[p], at, step));
}

static int take_shares(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct exchange *call = job;
    const uint64_t step = phx_share(comm), at = i * step;
    for (uint32_t n = 1; n < comm->size; n++) {
        const uint32_t p = (comm->rank + n) % comm->size;
        const int status = phx_wait_ready(comm, p, chunk);
        if (status)
            return status;
        if (is_late(call, p))
            phx_copy_out(comm, (char *)call->outs[p] + at, phx_share_at(comm, p, comm->rank, chunk),
                         phx_piece(call->out_bytes[p], at, step), call->received);
    }
    return PHX_OK;
}

int phx_all_to_all(phx_comm *comm, const void *const *ins, const uint64_t *in_bytes, void *const *outs,
                   const uint64_t *out_bytes, uint32_t dtype)
{
    const struct phx_steps rows = {put_row, take_rows}, shares = {put_shares, take_shares};
    const uint64_t call = phx_call(PHX_ALL_TO_ALL, dtype, PHX_NO_OP, 0, 0, 0), first = comm->chunk;
    struct exchange job = {.ins = ins, .in_bytes = in_bytes, .outs = outs, .out_bytes = out_bytes};
    if (in_bytes[comm->rank] != out_bytes[comm->rank])
        return PHX_BAD_ARGUMENT;
    for (uint32_t p = 0; p < comm->size; p++) {
        if (phx_lacks_memory(ins[p], in_bytes[p]) || phx_lacks_memory(outs[p], out_bytes[p]))
            return PHX_BAD_ARGUMENT;
        job.received += out_bytes[p];
    }
    int status = phx_pass_pieces(comm, first, 1, call, rows, &job);
    if (status)
        return status;
    memmove(outs[comm->rank], ins[comm->rank], in_bytes[comm->rank]);
    const uint64_t more = job.largest ? phx_pieces(job.largest, phx_share(comm)) : 0;
    status = phx_pass_pieces(comm, first + 1, more, call, shares, &job);
    if (status)
        return status;
    comm->chunk = first + 1 + more;
    return phx_done(comm);
}
