/* Noticing over MPI that ranks have come to make their calls in different orders. */
#include "mpi/lines.h"

#include <stdlib.h>

#include "segment/call.h"
#include "collectives/line_pairs.h"
#include "recorder/record.h"

#define KNOWN 256u         /* how many conferences are remembered */
#define LINE_BITS 16       /* of a line; what a rank tells in a conference has something else above them */
#define CONFERENCE 0x10000 /* added to the number of a conference: no line is as large */

struct conference {
    uint64_t number; /* counted from 1; 0: none */
    uint16_t mine;
};

struct meeting {
    uint64_t lines; /* a hash of those of all ranks */
    uint64_t number;
};

struct phx_mpi_lines {
    int rank, size;
    uint16_t mine;                  /* this rank's line in the call under way */
    int next;                       /* the lowest rank that the conference under way has not been compared with */
    uint64_t conferences;           /* how many there have been */
    uint64_t forgotten;             /* of what met in conferences up to this one, pairs may have been forgotten */
    struct conference known[KNOWN]; /* the last one from each line of this rank, by its lowest bits */
    struct meeting met[KNOWN];      /* the last one of each combination of lines, by its lowest bits; equal on all ranks */
    uint16_t *theirs;               /* every rank's line in the last conference */
    uint64_t *equal;                /* for each of `known`, a bit for each lower rank that was at this rank's line */
    struct phx_line_pairs *pairs;   /* with each lower rank */
    int *unsettled;                 /* the lower ranks with which there are pairs */
    int count;                      /* how many those are */
};

static size_t words_of(const struct phx_mpi_lines *lines)
{
    return ((size_t)lines->rank + 63) / 64;
}

static uint64_t *equal_at(const struct phx_mpi_lines *lines)
{
    return lines->equal + lines->mine % KNOWN * words_of(lines);
}

int phx_mpi_compare_lines(phx_mpi_group *group, int rank, int size)
{
    struct phx_mpi_lines *lines = group->lines = calloc(1, sizeof *lines);
    if (!lines)
        return PHX_SYSTEM;
    lines->rank = rank;
    lines->size = size;
    /* One more than there are: where there are none, calloc may return NULL. */
    lines->theirs = calloc((size_t)size + 1, sizeof *lines->theirs);
    lines->equal = calloc(KNOWN * words_of(lines) + 1, sizeof *lines->equal);
    lines->pairs = calloc((size_t)rank + 1, sizeof *lines->pairs);
    lines->unsettled = calloc((size_t)rank + 1, sizeof *lines->unsettled);
    if (lines->theirs && lines->equal && lines->pairs && lines->unsettled)
        return PHX_OK;
    phx_mpi_end_lines(group);
    return PHX_SYSTEM;
}

void phx_mpi_end_lines(phx_mpi_group *group)
{
    struct phx_mpi_lines *lines = group->lines;
    group->lines = NULL;
    if (!lines)
        return;
    free(lines->theirs);
    free(lines->equal);
    free(lines->pairs);
    free(lines->unsettled);
    free(lines);
}

void phx_mpi_offer_line(phx_mpi_group *group)
{
    struct phx_mpi_lines *lines = group->lines;
    lines->mine = phx_line_of(phx_record_place());
    const struct conference *then = &lines->known[lines->mine % KNOWN];
    const int again = then->number > lines->forgotten && then->mine == lines->mine;
    group->own[2] = again ? CONFERENCE + (int64_t)then->number : lines->mine;
    group->own[3] = ~group->own[2];
}

/* Count a call for the lower ranks with which there are pairs. `equal` has a bit for those at this rank's line; NULL if all
 * are. Where that makes this rank forget pairs, conferences up to number `latest` are affected. */
static void count_calm(struct phx_mpi_lines *lines, const uint64_t *equal, uint64_t latest)
{
    int count = 0;
    for (int i = 0; i < lines->count; i++) {
        const int peer = lines->unsettled[i];
        struct phx_line_pairs *with = &lines->pairs[peer];
        if (!equal || equal[peer / 64] >> peer % 64 & 1)
            phx_meet_pair(with, lines->mine, lines->mine, (struct phx_record_place){0}, NULL);
        else
            with->calm = 0;
        if (with->kept)
            lines->unsettled[count++] = peer;
    }
    if (count < lines->count)
        lines->forgotten = latest;
    lines->count = count;
}

int phx_mpi_lines_meet(phx_mpi_group *group)
{
    struct phx_mpi_lines *lines = group->lines;
    if (group->common[2] != ~group->common[3])
        return 0;
    if (lines->count && lines->mine)
        count_calm(lines, group->common[2] < CONFERENCE ? NULL : equal_at(lines), lines->conferences);
    return 1;
}

uint64_t phx_mpi_tell_line(const phx_mpi_group *group)
{
    return group->lines->mine | group->lines->forgotten << LINE_BITS;
}

int phx_mpi_hear_lines(phx_mpi_group *group, const uint64_t *told)
{
    struct phx_mpi_lines *lines = group->lines;
    const uint64_t number = ++lines->conferences;
    uint64_t hash = 0, forgotten = 0;
    for (int rank = 0; rank < lines->size; rank++) {
        lines->theirs[rank] = (uint16_t)told[rank];
        hash = phx_mix(hash ^ lines->theirs[rank]);
        if (told[rank] >> LINE_BITS > forgotten)
            forgotten = told[rank] >> LINE_BITS;
    }
    struct meeting *met = &lines->met[hash % KNOWN];
    const int again = met->lines == hash && met->number > forgotten;
    *met = (struct meeting){.lines = hash, .number = number};

    lines->known[lines->mine % KNOWN] = (struct conference){.number = number, .mine = lines->mine};
    uint64_t *equal = equal_at(lines);
    for (size_t word = 0; word < words_of(lines); word++)
        equal[word] = 0;
    for (int peer = 0; peer < lines->rank; peer++)
        equal[peer / 64] |= (uint64_t)(lines->theirs[peer] == lines->mine) << peer % 64;
    if (lines->mine)
        count_calm(lines, equal, number - 1);
    lines->next = again || !lines->mine ? lines->rank : 0;
    return again ? PHX_OK : PHX_LINES_DIFFER;
}

int phx_mpi_next_crossing(phx_mpi_group *group, struct phx_crossing *out)
{
    struct phx_mpi_lines *lines = group->lines;
    while (lines->next < lines->rank) {
        const int peer = lines->next++;
        const uint16_t theirs = lines->theirs[peer];
        if (!theirs || theirs == lines->mine)
            continue;
        struct phx_line_pairs *with = &lines->pairs[peer];
        const uint32_t kept = with->kept;
        const int crossed = phx_meet_pair(with, lines->mine, theirs, phx_record_place(), out);
        if (!kept)
            lines->unsettled[lines->count++] = peer;
        if (with->kept != kept && with->kept > PHX_PAIRS)
            lines->forgotten = lines->conferences - 1;
        if (crossed) {
            out->peer = (uint32_t)peer;
            return PHX_CROSSED;
        }
    }
    return PHX_OK;
}
