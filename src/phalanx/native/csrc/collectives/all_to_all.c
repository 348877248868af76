/* All-to-all with a size of its own for every pair.
 *
 * Each rank's slot holds a part for every other rank. In the first chunk a row precedes these parts, which says how
 * many bytes the rank sends to each. After that chunk every rank knows all sizes, has checked that what it expects of
 * each is what that one sends, and knows how many more chunks there are. One synchronisation per chunk; each rank copies
 * what it sends in and what it receives out. */
#include "collectives/pipeline.h"

struct exchange {
    const void *const *ins;
    const uint64_t *in_bytes;
    void *const *outs;
    const uint64_t *out_bytes;
    uint64_t received; /* bytes from all ranks together */
    uint64_t largest;  /* the most bytes that one rank sends another */
    uint64_t passed;   /* pieces that have been passed */
};

/* A piece of what one rank sends another: which bytes, and where in a slot the first rank's part lies. */
struct part {
    uint64_t at, length, offset;
};

static struct part part_of(const phx_comm *comm, uint64_t piece)
{
    const uint64_t row = ((uint64_t)comm->size * sizeof(uint64_t) + PHX_LINE - 1) / PHX_LINE * PHX_LINE;
    const uint64_t first = phx_share_of(comm, comm->chunk_bytes - row), later = phx_share(comm);
    return piece ? (struct part){first + (piece - 1) * later, later, 0} : (struct part){0, first, row};
}

static char *part_at(const phx_comm *comm, struct part part, uint32_t from, uint32_t to, uint64_t chunk)
{
    return phx_share_at(comm, from, to, chunk, part.length) + part.offset;
}

static void put_parts(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct exchange *call = job;
    const struct part part = part_of(comm, call->passed + i);
    uint64_t *row = (uint64_t *)phx_slot(comm, comm->rank, chunk);
    for (uint32_t p = 0; p < comm->size; p++) {
        if (part.offset)
            row[p] = call->in_bytes[p];
        if (p != comm->rank)
            phx_copy_in(comm, part_at(comm, part, comm->rank, p, chunk), (const char *)call->ins[p] + part.at,
                        phx_piece(call->in_bytes[p], part.at, part.length));
    }
}

/* Compare what `peer` sends this rank with what this one expects, and note the most that it sends anybody. */
static int read_row(phx_comm *comm, struct exchange *call, uint32_t peer, uint64_t chunk)
{
    const uint64_t *row = (const uint64_t *)phx_slot(comm, peer, chunk);
    for (uint32_t p = 0; p < comm->size; p++)
        if (p != peer && row[p] > call->largest)
            call->largest = row[p];
    return row[comm->rank] == call->out_bytes[peer] ? PHX_OK : phx_break(comm, PHX_MISMATCH, peer);
}

static int take_parts(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    struct exchange *call = job;
    const struct part part = part_of(comm, call->passed + i);
    for (uint32_t n = 1; n < comm->size; n++) {
        const uint32_t p = (comm->rank + n) % comm->size;
        int status = phx_wait_ready(comm, p, chunk);
        if (!status && part.offset)
            status = read_row(comm, call, p, chunk);
        if (status)
            return status;
        phx_copy_out(comm, (char *)call->outs[p] + part.at, part_at(comm, part, p, comm->rank, chunk),
                     phx_piece(call->out_bytes[p], part.at, part.length), call->received);
    }
    return PHX_OK;
}

int phx_all_to_all(phx_comm *comm, const void *const *ins, const uint64_t *in_bytes, void *const *outs,
                   const uint64_t *out_bytes, uint32_t dtype)
{
    const struct phx_steps steps = {put_parts, take_parts};
    const uint64_t call = phx_call(PHX_ALL_TO_ALL, dtype, PHX_NO_OP, 0, 0, 0), first = comm->chunk;
    struct exchange job = {.ins = ins, .in_bytes = in_bytes, .outs = outs, .out_bytes = out_bytes};
    if (in_bytes[comm->rank] != out_bytes[comm->rank])
        return PHX_BAD_ARGUMENT;
    for (uint32_t p = 0; p < comm->size; p++) {
        if (phx_lacks_memory(ins[p], in_bytes[p]) || phx_lacks_memory(outs[p], out_bytes[p]))
            return PHX_BAD_ARGUMENT;
        job.received += out_bytes[p];
        if (p != comm->rank && in_bytes[p] > job.largest)
            job.largest = in_bytes[p];
    }
    int status = phx_pass_pieces(comm, first, 1, call, steps, &job);
    if (status)
        return status;
    memmove(outs[comm->rank], ins[comm->rank], in_bytes[comm->rank]);
    const struct part second = part_of(comm, job.passed = 1);
    const uint64_t more = job.largest > second.at ? phx_pieces(job.largest - second.at, second.length) : 0;
    status = phx_pass_pieces(comm, first + 1, more, call, steps, &job);
    if (status)
        return status;
    comm->chunk = first + 1 + more;
    return phx_done(comm);
}
