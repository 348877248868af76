/* Noticing over MPI that ranks have come to make their calls in different orders. */
#include "mpi_lines.h"

#include <stdlib.h>

#include "line_pairs.h"
#include "record.h"

#define KNOWN 256u
#define CONFERENCE 0x10000 /* added to the number of a conference: no line is as large */

struct conference {
    uint64_t number; /* counted from 1; 0: none */
    uint16_t mine, firsts;
};

struct phx_mpi_lines {
    int first;
    uint16_t mine;                  /* this rank's line in the call under way */
    uint64_t conferences;           /* how many there have been */
    struct conference known[KNOWN]; /* the last one from each line of this rank, by its lowest bits */
    struct phx_line_pairs pairs;    /* with the first rank */
};

int phx_mpi_compare_lines(phx_mpi_group *group, int first)
{
    group->lines = calloc(1, sizeof *group->lines);
    if (!group->lines)
        return PHX_SYSTEM;
    group->lines->first = first;
    return PHX_OK;
}

void phx_mpi_end_lines(phx_mpi_group *group)
{
    free(group->lines);
    group->lines = NULL;
}

/* Whether meeting there again would be nothing new to this rank. A line that is not known meets none. */
static int is_expected(const struct phx_mpi_lines *lines, const struct conference *then)
{
    return then->number && then->mine == lines->mine &&
           (!then->mine || !then->firsts || phx_pair_is_known(&lines->pairs, then->mine, then->firsts));
}

void phx_mpi_offer_line(phx_mpi_group *group)
{
    struct phx_mpi_lines *lines = group->lines;
    lines->mine = phx_line_of(phx_record_place());
    const struct conference *then = &lines->known[lines->mine % KNOWN];
    group->own[2] = is_expected(lines, then) ? CONFERENCE + (int64_t)then->number : lines->mine;
    group->own[3] = ~group->own[2];
    group->own[4] = lines->first ? lines->mine : INT64_MAX;
}

int phx_mpi_lines_meet(phx_mpi_group *group)
{
    struct phx_mpi_lines *lines = group->lines;
    if (group->common[2] != ~group->common[3])
        return 0;
    const uint16_t firsts = (uint16_t)group->common[4];
    if (lines->pairs.kept && lines->mine && firsts)
        phx_meet_pair(&lines->pairs, lines->mine, firsts, (struct phx_record_place){0}, NULL);
    return 1;
}

int phx_mpi_note_lines(phx_mpi_group *group, struct phx_crossing *out)
{
    struct phx_mpi_lines *lines = group->lines;
    const uint16_t mine = lines->mine, firsts = (uint16_t)group->common[4];
    lines->known[mine % KNOWN] =
        (struct conference){.number = ++lines->conferences, .mine = mine, .firsts = firsts};
    if (!mine || !firsts)
        return PHX_OK;
    return phx_meet_pair(&lines->pairs, mine, firsts, phx_record_place(), out) ? PHX_CROSSED : PHX_OK;
}
