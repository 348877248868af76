/* Why a group broke, and what each rank was doing then.
 *
 * The reason is written once, by the rank that wins the exchange of `breaking`. Descriptions are text, which each rank
 * writes only when the group is broken; until then a call costs no more than its call word. */
#define _GNU_SOURCE
#include "segment/breaking.h"

#include <sched.h>
#include <string.h>

#include "system/futex.h"
#include "segment/life.h"

#define REASON_NS 100000000ull /* how long readers wait for the reason of a break to be written */

static int break_for(phx_comm *comm, struct phx_breakage reason)
{
    uint32_t whole = 0;
    if (atomic_compare_exchange_strong(&comm->header->breaking, &whole, 1)) {
        reason.rank = comm->rank;
        reason.peer_pid = comm->places[reason.peer].pid;
        comm->header->breakage = reason;
        atomic_store_explicit(&comm->header->breaking, 2, memory_order_release);
        for (uint32_t p = 0; p < comm->size; p++) {
            phx_wake(phx_low_half(&comm->flags[p].ready));
            phx_wake(phx_low_half(&comm->flags[p].done));
            phx_wake(&comm->places[p].bell);
        }
        return (int)reason.status;
    }
    struct phx_breakage why;
    return phx_breakage(comm, &why);
}

int phx_break_at(phx_comm *comm, int status, uint32_t peer, uint64_t chunk)
{
    return break_for(comm, (struct phx_breakage){.status = (uint32_t)status, .peer = peer, .chunk = chunk});
}

int phx_break_message(phx_comm *comm, uint32_t src, const struct phx_end *sent, const struct phx_end *expected)
{
    return break_for(comm, (struct phx_breakage){.status = PHX_MISMATCH,
                                                 .peer = src,
                                                 .chunk = comm->call_chunk,
                                                 .of_message = 1,
                                                 .sent = *sent,
                                                 .expected = *expected});
}

int phx_break_gone(phx_comm *comm, uint32_t peer, enum phx_going how)
{
    return break_for(comm, (struct phx_breakage){
                               .status = PHX_PEER_LOST, .peer = peer, .chunk = comm->call_chunk, .how = how});
}

int phx_break(phx_comm *comm, int status, uint32_t peer)
{
    return phx_break_at(comm, status, peer, comm->call_chunk);
}

void phx_abort(phx_comm *comm)
{
    phx_break(comm, PHX_INTERRUPTED, comm->rank);
}

int phx_breakage(const phx_comm *comm, struct phx_breakage *out)
{
    /* The reason is there within microseconds, unless its writer has lost its core, or died, in between. */
    const uint64_t start = phx_now_ns();
    do {
        const uint32_t state = atomic_load_explicit(&comm->header->breaking, memory_order_acquire);
        if (state != 1) {
            *out = state ? comm->header->breakage : (struct phx_breakage){0}; /* another rank may be writing it */
            return state == 0 ? PHX_OK : (int)out->status;
        }
        sched_yield();
    } while (phx_now_ns() - start < REASON_NS);
    for (uint32_t p = 0; p < comm->size; p++) {
        const enum phx_going how = phx_peer_life(comm, p);
        if (how > PHX_LEFT) {
            *out = (struct phx_breakage){
                .status = PHX_PEER_LOST, .rank = comm->rank, .peer = p, .peer_pid = comm->places[p].pid, .how = how};
            return PHX_PEER_LOST;
        }
    }
    *out = (struct phx_breakage){.status = PHX_INTERRUPTED, .rank = PHX_NOBODY, .peer = PHX_NOBODY};
    return PHX_INTERRUPTED;
}

void phx_describe(phx_comm *comm, const char *text)
{
    struct phx_place *place = &comm->places[comm->rank];
    uint32_t nothing = 0;
    if (!atomic_compare_exchange_strong(&place->described, &nothing, 1))
        return; /* the first description is that of the call that broke the group */
    strncpy(place->text, text, PHX_TEXT - 1);
    atomic_store_explicit(&place->described, 2, memory_order_release);
}

int phx_description(const phx_comm *comm, uint32_t rank, char *out)
{
    if (rank >= comm->size || atomic_load_explicit(&comm->places[rank].described, memory_order_acquire) != 2)
        return 0;
    memcpy(out, comm->places[rank].text, PHX_TEXT);
    return 1;
}

uint64_t phx_call_chunk(const phx_comm *comm)
{
    return comm->call_chunk;
}
