/* Comparing, beside the calls that meet in a segment, the lines from which the ranks make them. */
#include "collectives/line_order.h"

#include <stdlib.h>

#include "segment/breaking.h"
#include "segment/call.h"
#include "collectives/line_pairs.h"
#include "recorder/record.h"

#define KNOWN 32u /* how many places are remembered */

/* A place and what is called there, and its line. */
struct known {
    uint32_t site, what;
    int32_t peer;
    uint16_t line;
};

/* One group's. Only the thread that is in a collective uses it. */
struct phx_lines {
    struct {
        uint32_t line, in_group;   /* as in struct phx_record_place */
    } places[PHX_SLOTS];           /* of this rank's latest chunks */
    struct known known[KNOWN];     /* all zero is right too: a place that is not known has the line 0 */
    struct phx_crossing crossing;
    uint32_t judgements_left;
    struct phx_line_pairs peers[];
};

void phx_compare_lines(phx_comm *comm, uint32_t most_crossings)
{
    if (!comm->lines) /* without memory nothing is compared */
        comm->lines = calloc(1, sizeof *comm->lines + comm->size * sizeof *comm->lines->peers);
    if (comm->lines)
        comm->lines->judgements_left = most_crossings;
}

/* The line of the call under way. It is on the way of every call, so what it was is kept: a text never changes. */
static uint16_t line_of(struct phx_lines *lines, const struct phx_record *record)
{
    const uint32_t site = atomic_load_explicit(&record->site, memory_order_relaxed);
    const uint32_t what = atomic_load_explicit(&record->what, memory_order_relaxed);
    const int32_t peer = atomic_load_explicit(&record->peer, memory_order_relaxed);
    struct known *known = &lines->known[(site ^ site >> 5 ^ what) % KNOWN];
    if (known->site != site || known->what != what || known->peer != peer)
        *known = (struct known){site, what, peer, phx_line_of(phx_record_place())};
    return known->line;
}

void phx_publish_line(phx_comm *comm, uint64_t chunk)
{
    const struct phx_record *record = chunk == comm->chunk ? phx_record_under_way : NULL;
    const uint64_t slot = chunk % PHX_SLOTS;
    struct phx_lines *lines = comm->lines;
    if (record) {
        lines->places[slot].line = atomic_load_explicit(&record->site, memory_order_relaxed);
        lines->places[slot].in_group = atomic_load_explicit(&record->in_group, memory_order_relaxed);
    }
    comm->flags[comm->rank].line[slot] = record ? line_of(lines, record) : 0;
}

void phx_meet_line(phx_comm *comm, uint32_t peer, uint64_t slot)
{
    const uint16_t mine = comm->flags[comm->rank].line[slot], theirs = comm->flags[peer].line[slot];
    if (!comm->lines || !mine || !theirs || !comm->lines->judgements_left)
        return;
    struct phx_line_pairs *with = &comm->lines->peers[peer];
    const uint32_t was_unsettled = with->kept != 0;
    const struct phx_record_place place = {.line = comm->lines->places[slot].line,
                                           .in_group = comm->lines->places[slot].in_group};
    const int crossed = phx_meet_pair(with, mine, theirs, place, comm->crossed ? NULL : &comm->lines->crossing);
    comm->unsettled += (with->kept != 0) - was_unsettled;
    if (crossed) {
        comm->lines->crossing.peer = peer;
        comm->lines->judgements_left--;
        comm->crossed = 1;
    }
}

void phx_crossing(const phx_comm *comm, struct phx_crossing *out)
{
    *out = comm->lines->crossing;
}

int phx_tells_crossing(phx_comm *comm)
{
    uint32_t nobody = 0;
    if (comm->lines)
        comm->lines->judgements_left = 0; /* the group's warning is told once, by this rank or another */
    return atomic_compare_exchange_strong(&comm->header->crossed, &nobody, 1);
}

void phx_break_crossed(phx_comm *comm)
{
    phx_break(comm, PHX_MISMATCH, comm->lines->crossing.peer);
}
