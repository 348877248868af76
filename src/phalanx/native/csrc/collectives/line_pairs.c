/* Noticing that two ranks have come to make their calls in different orders. */
#include "collectives/line_pairs.h"

#include <stdlib.h>

#include "segment/call.h"

uint16_t phx_line_of(struct phx_record_place place)
{
    if (!place.identity)
        return 0;
    const uint64_t call = phx_mix(place.what | (uint64_t)(uint32_t)place.peer << 32);
    const uint16_t mixed = (uint16_t)(phx_mix(place.identity ^ call) >> 48);
    return mixed ? mixed : 1;
}

static uint32_t pairs_of(const struct phx_line_pairs *with)
{
    return with->kept < PHX_PAIRS ? with->kept : PHX_PAIRS;
}

/* The pair with `line` on this rank's side, or on the peer's; NULL if there is none. */
static const struct phx_line_pair *find(const struct phx_line_pairs *with, uint16_t line, int on_theirs)
{
    for (uint32_t i = 0; i < pairs_of(with); i++)
        if ((on_theirs ? with->pairs[i].theirs : with->pairs[i].mine) == line)
            return &with->pairs[i];
    return NULL;
}

/* Write down a line as number `which` of the crossing if it stands on both sides. */
static int crosses(const struct phx_line_pairs *with, uint16_t line, uint32_t which, struct phx_crossing *out)
{
    const struct phx_line_pair *mine = find(with, line, 0), *theirs = find(with, line, 1);
    if (!mine || !theirs)
        return 0;
    out->lines[which] = mine->line;
    out->mine[which] = mine->in_group;
    out->theirs[which] = theirs->in_group;
    return 1;
}

/* Whether two lines are crossed, one of them in the pair that has just met. A place in the program
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

int phx_pair_is_known(const struct phx_line_pairs *with, uint16_t mine, uint16_t theirs)
{
    for (uint32_t i = 0; i < pairs_of(with); i++)
        if (with->pairs[i].mine == mine && with->pairs[i].theirs == theirs)
            return 1;
    return mine == theirs;
}

int phx_meet_pair(struct phx_line_pairs *with, uint16_t mine, uint16_t theirs, struct phx_record_place place,
                  struct phx_crossing *out)
{
    if (mine == theirs) {
        if (with->kept && ++with->calm == PHX_CALM)
            with->kept = 0;
        return 0;
    }
    with->calm = 0;
    if (phx_pair_is_known(with, mine, theirs))
        return 0; /* a branch that the program takes again */
    struct phx_line_pair *latest = &with->pairs[with->kept % PHX_PAIRS];
    *latest = (struct phx_line_pair){.mine = mine, .theirs = theirs, .line = place.line, .in_group = place.in_group};
    with->kept++;
    return out && are_crossed(with, latest, out);
}

/* -- for ranks that share no memory --------------------------------------------------------------------------------- */

phx_line_pairs *phx_pairs_open(void)
{
    return calloc(1, sizeof(phx_line_pairs));
}

void phx_pairs_close(phx_line_pairs *pairs)
{
    free(pairs);
}

uint32_t phx_line_now(void)
{
    return phx_line_of(phx_record_place());
}

int phx_pairs_meet(phx_line_pairs *pairs, uint32_t mine, uint32_t theirs, struct phx_crossing *out)
{
    return phx_meet_pair(pairs, (uint16_t)mine, (uint16_t)theirs, phx_record_place(), out) ? PHX_CROSSED : PHX_OK;
}

int phx_pairs_settled(const phx_line_pairs *pairs)
{
    return !pairs->kept;
}
