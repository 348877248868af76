/* Comparing, beside the calls that meet in a segment, the lines from which the ranks make them. */
#include "lines.h"

#include <stdlib.h>

#include "breaking.h"
#include "call.h"
#include "line_pairs.h"
#include "record.h"

/* One group's. Only the thread that is in a collective uses it. */
struct phx_lines {
    struct phx_record_place places[PHX_SLOTS]; /* of this rank's latest chunks */
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

void phx_publish_line(phx_comm *comm, uint64_t chunk)
{
    uint16_t *line = &comm->flags[comm->rank].line[chunk % PHX_SLOTS];
    *line = 0;
    if (chunk != comm->chunk)
        return;
    const struct phx_record_place place = phx_record_place();
    comm->lines->places[chunk % PHX_SLOTS] = place;
    *line = phx_line_of(place);
}

void phx_meet_line(phx_comm *comm, uint32_t peer, uint64_t slot)
{
    const uint16_t mine = comm->flags[comm->rank].line[slot], theirs = comm->flags[peer].line[slot];
    if (!comm->lines || !mine || !theirs || !comm->lines->judgements_left)
        return;
    struct phx_line_pairs *with = &comm->lines->peers[peer];
    const uint32_t was_unsettled = with->kept != 0;
    const int crossed = phx_meet_pair(with, mine, theirs, comm->lines->places[slot],
                                      comm->crossed ? NULL : &comm->lines->crossing);
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
