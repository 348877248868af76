/* The calls of other processes, read from their recorders and compared: for a launcher, whose ranks use a backend that
 * does not compare them. Nothing of what is read is trusted to make sense. */
#include <stdlib.h>

#include "line_pairs.h"
#include "record.h"

/* A record that is not there yet has not been written by its thread, or never will be: it was taken back, or the thread
 * has died. This far behind the newest one its thread is not expected to come any more. */
#define STILL_COMING 64u

enum state { DONE, UNDER_WAY, FAILED };

struct found {
    uint32_t group, in_group;
    enum state state;
    struct phx_call_seen call;
};

static int in_order(const void *one, const void *other)
{
    const struct found *a = one, *b = other;
    if (a->group != b->group)
        return a->group < b->group ? -1 : 1;
    if (a->in_group != b->in_group)
        return a->in_group < b->in_group ? -1 : 1;
    return (a->state < b->state) - (a->state > b->state); /* one found late has the number of the next one */
}

static struct found found_in(const char *memory, const struct phx_record_seen *seen)
{
    const uint32_t kind = seen->what & 0xff;
    const struct phx_record_place place = {
        .identity = phx_identity_of(memory, seen->site),
        .what = seen->what,
        .peer = seen->peer,
    };
    return (struct found){
        .group = seen->group,
        .in_group = seen->in_group,
        .state = seen->failed ? FAILED : seen->left_ns ? DONE : UNDER_WAY,
        .call = {.nbytes = seen->nbytes,
                 .what = seen->what,
                 .peer = kind == PHX_BARRIER ? -1 : seen->peer,
                 .line = phx_line_of(place),
                 .site = seen->site,
                 .label = seen->label,
                 .step = seen->step},
    };
}

/* Write the runs of the calls that were found, which are in order. */
static uint32_t runs_of(const struct found *found, uint32_t count, struct phx_call_seen *calls, struct phx_calls_run *runs)
{
    uint32_t made = 0, closed = 0; /* `closed`: nothing more of the last run's group belongs to it */
    for (uint32_t i = 0; i < count; i++) {
        struct phx_calls_run *last = made ? &runs[made - 1] : NULL;
        if (last && last->group == found[i].group && closed)
            continue;
        /* A run without calls may begin a group; then its next one is not behind it. */
        const int follows = last && last->group == found[i].group && last->first + last->count == found[i].in_group;
        closed = 0;
        if (!follows) {
            last = &runs[made++];
            *last = (struct phx_calls_run){.group = found[i].group, .first = found[i].in_group};
        }
        if (found[i].state == DONE) {
            last->count++;
            *calls++ = found[i].call;
        } else {
            last->failed = found[i].state == FAILED;
            closed = 1;
        }
    }
    return made;
}

uint32_t phx_calls_read(const char *memory, uint64_t *from, uint32_t most, struct phx_call_seen *calls,
                        struct phx_calls_run *runs)
{
    const uint64_t next = phx_records_begun(memory);
    const uint64_t newest = most < PHX_RECORDS ? most : PHX_RECORDS;
    const uint64_t begin = next > newest && *from < next - newest ? next - newest : *from;
    if (begin >= next)
        return 0;
    struct found *found = malloc((next - begin) * sizeof *found);
    if (!found)
        return 0;
    uint32_t count = 0;
    *from = next;
    for (uint64_t number = begin; number < next; number++) {
        struct phx_record_seen seen;
        const uint64_t word = phx_record_read(memory, number, &seen);
        if (word != 2 * number + 2) {
            if (word < 2 * number + 2 && next - number <= STILL_COMING && number < *from)
                *from = number;
            continue;
        }
        if ((seen.what & 0xff) >= PHX_SEND)
            continue;
        found[count] = found_in(memory, &seen);
        if (found[count++].state == UNDER_WAY && number < *from)
            *from = number;
    }
    qsort(found, count, sizeof *found, in_order);
    const uint32_t made = runs_of(found, count, calls, runs);
    free(found);
    return made;
}

static int agree(const struct phx_call_seen *one, const struct phx_call_seen *other, uint32_t own_sizes)
{
    const uint32_t kind = one->what & 0xff;
    const int any_size = kind < 32 && own_sizes >> kind & 1;
    return one->what == other->what && one->peer == other->peer && (any_size || one->nbytes == other->nbytes);
}

uint32_t phx_calls_differ(const struct phx_call_seen *one, const struct phx_call_seen *other, uint32_t count,
                          uint32_t own_sizes)
{
    uint32_t same = 0;
    while (same < count && agree(&one[same], &other[same], own_sizes))
        same++;
    return same;
}

int phx_calls_are_alike(const struct phx_call_seen *one, const struct phx_call_seen *other, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (!agree(&one[i], &other[i], 0) || one[i].line != other[i].line || one[i].step != other[i].step)
            return 0;
    return 1;
}

int phx_calls_meet(phx_line_pairs *pairs, const struct phx_call_seen *mine, const struct phx_call_seen *theirs,
                   uint32_t first, uint32_t count, uint32_t *done, struct phx_crossing *out)
{
    while (*done < count) {
        const uint32_t i = (*done)++;
        const struct phx_record_place place = {.line = mine[i].site, .in_group = first + i};
        if (mine[i].line && theirs[i].line &&
            phx_meet_pair(pairs, (uint16_t)mine[i].line, (uint16_t)theirs[i].line, place, out))
            return PHX_CROSSED;
    }
    return PHX_OK;
}
