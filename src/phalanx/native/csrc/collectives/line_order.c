/* Comparing, beside the calls that meet, the lines from which two ranks make them. */
#include "collectives/line_order.h"

#include <stdlib.h>

#include "recorder/record.h"
#include "segment/call.h"

#define CALM 8u /* how many calls in a row that met at the same line end the matter */

/* A place of the program and what is called there as the bits that are compared; 0: the place is not known. */
static uint16_t line_of(struct phx_record_place place)
{
    if (!place.identity)
        return 0;
    const uint64_t call = place.what | (uint64_t)(uint32_t)place.peer << 32;
    const uint16_t mixed = (uint16_t)(phx_mix(place.identity * 0x9e3779b97f4a7c15ull ^ call) >> 48);
    return mixed ? mixed : 1;
}

static uint32_t pairs_of(const struct phx_line_pairs *with)
{
    return with->kept < PHX_LINE_PAIRS ? with->kept : PHX_LINE_PAIRS;
}

/* The first pair of these lines, of which 0 stands for any; NULL if there is none. */
static const struct phx_line_pair *find(const struct phx_line_pairs *with, uint16_t mine, uint16_t theirs)
{
    for (const struct phx_line_pair *pair = with->pairs; pair < with->pairs + pairs_of(with); pair++)
        if ((!mine || pair->mine == mine) && (!theirs || pair->theirs == theirs))
            return pair;
    return NULL;
}

/* Write down a line as number `which` of the crossing if it stands on both sides. */
static int crosses(const struct phx_line_pairs *with, uint16_t line, uint32_t which, struct phx_crossing *out)
{
    const struct phx_line_pair *mine = find(with, line, 0), *theirs = find(with, 0, line);
    if (!mine || !theirs)
        return 0;
    out->lines[which] = mine->line;
    out->mine[which] = mine->in_group;
    out->theirs[which] = theirs->in_group;
    return 1;
}

/* Return whether two lines are crossed, one of them in the pair that has just met. A place in the program
 * that calls with two roots counts as two lines when they meet, but it is never reported as crossed with itself: if a
 * program uses more roots than there is room for, the pairs that would explain them have been forgotten. */
static int are_crossed(const struct phx_line_pairs *with, const struct phx_line_pair *latest, struct phx_crossing *out)
{
    const uint16_t first = crosses(with, latest->mine, 0, out) ? latest->mine : latest->theirs;
    if (first == latest->theirs && !crosses(with, first, 0, out))
        return 0;
    const uint32_t *lines = out->lines;
    for (uint32_t i = 0; i < pairs_of(with); i++)
        if (with->pairs[i].mine != first && crosses(with, with->pairs[i].mine, 1, out) && lines[0] != lines[1])
            return 1;
    return 0;
}

/* Note that this rank's line, at `place`, and the peer's have met; neither is 0. Returns 1 if two lines are crossed
 * now, and says in `out` which, but for the peer. With NULL for `out` the pair is noted, and nothing is judged. */
static int meet(struct phx_line_pairs *with, uint16_t mine, uint16_t theirs, struct phx_record_place place,
                struct phx_crossing *out)
{
    if (mine == theirs) {
        if (with->kept && ++with->calm == CALM)
            with->kept = 0;
        return 0;
    }
    with->calm = 0;
    if (find(with, mine, theirs))
        return 0; /* a branch that the program takes again */
    struct phx_line_pair *latest = &with->pairs[with->kept % PHX_LINE_PAIRS];
    *latest = (struct phx_line_pair){.mine = mine, .theirs = theirs, .line = place.line, .in_group = place.in_group};
    with->kept++;
    return out && are_crossed(with, latest, out);
}

/* -- in a segment -------------------------------------------------------------------------------------------------- */

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
    const uint64_t slot = chunk % PHX_SLOTS;
    const struct phx_record_place place = chunk == comm->chunk ? phx_record_place() : (struct phx_record_place){0};
    comm->lines->places[slot] = place;
    comm->flags[comm->rank].line[slot] = line_of(place);
}

void phx_meet_line(phx_comm *comm, uint32_t peer, uint64_t slot)
{
    const uint16_t mine = comm->flags[comm->rank].line[slot], theirs = comm->flags[peer].line[slot];
    if (!comm->lines || !mine || !theirs || !comm->lines->judgements_left)
        return;
    struct phx_line_pairs *with = &comm->lines->peers[peer];
    const uint32_t was_unsettled = with->kept != 0;
    const int crossed = meet(with, mine, theirs, comm->lines->places[slot],
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

/* -- for ranks that share no memory -------------------------------------------------------------------------------- */

uint32_t phx_line_now(void)
{
    return line_of(phx_record_place());
}

int phx_pairs_meet(struct phx_line_pairs *pairs, uint32_t mine, uint32_t theirs, struct phx_crossing *out)
{
    return meet(pairs, (uint16_t)mine, (uint16_t)theirs, phx_record_place(), out) ? PHX_CROSSED : PHX_OK;
}
