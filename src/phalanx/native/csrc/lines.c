/* Noticing that the ranks have come to make their calls in different orders. */
#include "lines.h"

#include <stdlib.h>

#include "breaking.h"
#include "call.h"
#include "record.h"

/* A call in which this rank and a peer were at different lines. */
struct pair {
    uint16_t mine, theirs;
    uint32_t line, in_group; /* as in struct phx_record_place */
};

struct of_peer {
    uint32_t kept; /* how many pairs there have been; the last PHX_PAIRS are here */
    uint32_t calm; /* how many calls in a row have met at the same line since the last of them */
    struct pair pairs[PHX_PAIRS];
};

/* One group's. Only the thread that is in a collective uses it. */
struct phx_lines {
    struct phx_record_place places[PHX_SLOTS]; /* of this rank's latest chunks */
    struct phx_crossing crossing;
    uint32_t judgements_left;
    struct of_peer peers[];
};

void phx_compare_lines(phx_comm *comm, uint32_t most_crossings)
{
    if (!comm->lines) /* without memory nothing is compared */
        comm->lines = calloc(1, sizeof *comm->lines + comm->size * sizeof *comm->lines->peers);
    if (comm->lines)
        comm->lines->judgements_left = most_crossings;
}

void phx_publish_line(phx_comm *comm, uint64_t chunk, uint64_t call)
{
    uint16_t *line = &comm->flags[comm->rank].line[chunk % PHX_SLOTS];
    *line = 0;
    if (chunk != comm->chunk)
        return;
    const struct phx_record_place place = phx_record_place();
    comm->lines->places[chunk % PHX_SLOTS] = place;
    if (place.identity) {
        const uint16_t mixed = (uint16_t)(phx_mix(place.identity ^ (call & ~PHX_SHAPE_MASK)) >> 48);
        *line = mixed ? mixed : 1;
    }
}

static uint32_t pairs_of(const struct of_peer *peer)
{
    return peer->kept < PHX_PAIRS ? peer->kept : PHX_PAIRS;
}

/* The pair with `line` on this rank's side, or on the peer's; NULL if there is none. */
static const struct pair *find(const struct of_peer *peer, uint16_t line, int on_theirs)
{
    for (uint32_t i = 0; i < pairs_of(peer); i++)
        if ((on_theirs ? peer->pairs[i].theirs : peer->pairs[i].mine) == line)
            return &peer->pairs[i];
    return NULL;
}

/* Write down a line as number `which` of the crossing if it stands on both sides. */
static int crosses(phx_comm *comm, const struct of_peer *peer, uint16_t line, uint32_t which)
{
    const struct pair *mine = find(peer, line, 0), *theirs = find(peer, line, 1);
    if (!mine || !theirs)
        return 0;
    struct phx_crossing *out = &comm->lines->crossing;
    out->lines[which] = mine->line;
    out->mine[which] = mine->in_group;
    out->theirs[which] = theirs->in_group;
    return 1;
}

/* Whether two lines are crossed, one of them in the pair that has just met. One place in the program that calls with two
 * shapes is no two lines here: with more shapes than there is room for, the lines that were opposite are forgotten. */
static int are_crossed(phx_comm *comm, const struct of_peer *peer, const struct pair *latest)
{
    const uint16_t first = crosses(comm, peer, latest->mine, 0) ? latest->mine : latest->theirs;
    if (first == latest->theirs && !crosses(comm, peer, first, 0))
        return 0;
    const uint32_t *lines = comm->lines->crossing.lines;
    for (uint32_t i = 0; i < pairs_of(peer); i++)
        if (peer->pairs[i].mine != first && crosses(comm, peer, peer->pairs[i].mine, 1) && lines[0] != lines[1])
            return 1;
    return 0;
}

void phx_meet_line(phx_comm *comm, uint32_t peer, uint64_t slot)
{
    const uint16_t mine = comm->flags[comm->rank].line[slot], theirs = comm->flags[peer].line[slot];
    if (!comm->lines || !mine || !theirs || !comm->lines->judgements_left)
        return;
    struct of_peer *of = &comm->lines->peers[peer];
    if (mine == theirs) {
        if (of->kept && ++of->calm == PHX_CALM) {
            of->kept = 0;
            comm->unsettled--;
        }
        return;
    }
    of->calm = 0;
    for (uint32_t i = 0; i < pairs_of(of); i++)
        if (of->pairs[i].mine == mine && of->pairs[i].theirs == theirs)
            return; /* a branch that the program takes again */
    const struct phx_record_place place = comm->lines->places[slot];
    struct pair *latest = &of->pairs[of->kept % PHX_PAIRS];
    *latest = (struct pair){.mine = mine, .theirs = theirs, .line = place.line, .in_group = place.in_group};
    comm->unsettled += of->kept++ == 0;
    if (!comm->crossed && are_crossed(comm, of, latest)) {
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
    comm->lines->judgements_left = 0; /* the group's warning is told once, by this rank or another */
    return atomic_compare_exchange_strong(&comm->header->crossed, &nobody, 1);
}

void phx_break_crossed(phx_comm *comm)
{
    phx_break(comm, PHX_MISMATCH, comm->lines->crossing.peer);
}
