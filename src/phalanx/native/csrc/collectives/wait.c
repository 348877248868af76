/* Waiting: spin, then yield, then sleep in slices, and after each slice check on the peer.
 *
 * A short spin catches a peer that is a microsecond late; yielding lets ranks that share a core take turns; sleeping
 * leaves the core to other work when a peer is far behind (a slow data loader). */
#define _GNU_SOURCE
#include "collectives/pipeline.h"

#include <sched.h>

#include "system/futex.h"

static inline int reached(_Atomic uint64_t *word, uint64_t target)
{
    return atomic_load_explicit(word, memory_order_acquire) >= target;
}

void phx_raise(phx_comm *comm, _Atomic uint64_t *word, uint64_t value)
{
    phx_note_cpu(comm);
    /* Both sides are seq_cst: either this rank's load sees the sleeper, or the sleeper's last load sees this store. */
    atomic_store_explicit(word, value, memory_order_seq_cst);
    if (atomic_load_explicit(&comm->places[comm->rank].sleepers, memory_order_seq_cst) != 0)
        phx_wake(phx_low_half(word));
}

static int wait_slowly(phx_comm *comm, uint32_t peer, _Atomic uint64_t *word, uint64_t target)
{
    const uint64_t start = phx_now_ns();
    phx_move_apart(comm, peer);
    for (uint32_t i = 1;; i++) {
        sched_yield();
        if (reached(word, target))
            return PHX_OK;
        if (phx_broken(comm))
            return phx_broken(comm);
        if (i % 8 == 0 && phx_now_ns() - start > PHX_YIELD_NS)
            break;
    }
    struct phx_place *place = &comm->places[peer];
    phx_record_awaits(comm->names ? comm->names[peer] : (int32_t)peer);
    for (uint64_t checked = phx_now_ns(), waited = 0;;) {
        const uint64_t value = atomic_load_explicit(word, memory_order_acquire);
        /* A raise between this load and the sleep changes the word, and the kernel does not sleep on a changed one. */
        const enum phx_sleep slept =
            value < target ? phx_sleep(phx_low_half(word), (uint32_t)value, &place->sleepers) : PHX_WOKEN;
        if (reached(word, target))
            return PHX_OK;
        if (phx_broken(comm))
            return phx_broken(comm);
        if (slept != PHX_WOKEN && comm->poll && comm->poll())
            return phx_break(comm, PHX_INTERRUPTED, comm->rank);
        /* By the clock, because signals (a profiler's timer) may cut every single sleep short. */
        const uint64_t now = phx_now_ns();
        if (now - checked < PHX_SLICE_NS)
            continue;
        waited += phx_waited_ns(now - checked);
        checked = now;
        /* A peer may raise the word and then go, so the word is read after the peer was found gone. */
        const enum phx_going how = phx_peer_life(comm, peer);
        if (how != PHX_HERE)
            return reached(word, target) ? PHX_OK : phx_break_gone(comm, peer, how);
        if (waited > comm->timeout_ns)
            return phx_break(comm, PHX_TIMEOUT, peer);
    }
}

int phx_wait(phx_comm *comm, uint32_t peer, _Atomic uint64_t *word, uint64_t target)
{
    for (uint32_t i = 0; i <= comm->spin; i++) {
        if (reached(word, target))
            return PHX_OK;
        phx_relax();
    }
    const int status = wait_slowly(comm, peer, word, target);
    if (!status)
        phx_record_awaits(-1);
    return status;
}

/* Compare the call words of `peer`, which has raised `ready` to `seen`, up to that chunk. At most two chunks are left
 * to compare, and both ranks' call words for the last PHX_SLOTS - 1 chunks are intact. */
static int compare_calls(phx_comm *comm, uint32_t peer, uint64_t seen)
{
    const uint64_t *mine = comm->flags[comm->rank].call, *theirs = comm->flags[peer].call;
    const uint16_t *here = comm->flags[comm->rank].line, *there = comm->flags[peer].line;
    for (uint64_t chunk = comm->compared[peer]; chunk < seen; chunk++) {
        const uint64_t slot = chunk % PHX_SLOTS;
        if (!phx_same_call(mine[slot], theirs[slot]))
            return phx_break_at(comm, PHX_MISMATCH, peer, chunk);
        if (here[slot] != there[slot] || comm->unsettled)
            phx_meet_line(comm, peer, slot);
    }
    comm->compared[peer] = seen;
    return PHX_OK;
}

int phx_wait_ready(phx_comm *comm, uint32_t peer, uint64_t chunk)
{
    if (comm->compared[peer] > chunk)
        return PHX_OK;
    const int status = phx_wait(comm, peer, &comm->flags[peer].ready, chunk + 1);
    return status ? status : compare_calls(comm, peer, chunk + 1);
}

int phx_wait_all_ready(phx_comm *comm, uint64_t chunk)
{
    for (uint32_t p = 0; p < comm->size; p++) {
        const int status = p == comm->rank ? PHX_OK : phx_wait_ready(comm, p, chunk);
        if (status)
            return status;
    }
    return PHX_OK;
}

int phx_compare_rest(phx_comm *comm, uint64_t patience_ns)
{
    const uint64_t start = phx_now_ns();
    uint32_t left_out = PHX_NOBODY;
    int behind = 0;
    for (uint32_t p = 0; p < comm->size && comm->chunk; p++) {
        if (p == comm->rank)
            continue;
        _Atomic uint64_t *ready = &comm->flags[p].ready;
        enum phx_going how = PHX_HERE;
        while (!reached(ready, comm->chunk) && how == PHX_HERE && phx_now_ns() - start < patience_ns) {
            if (phx_broken(comm))
                return phx_broken(comm);
            const uint64_t value = atomic_load_explicit(ready, memory_order_acquire);
            if (value < comm->chunk)
                phx_sleep(phx_low_half(ready), (uint32_t)value, &comm->places[p].sleepers);
            how = phx_peer_life(comm, p);
        }
        const uint64_t there = atomic_load_explicit(ready, memory_order_acquire);
        const int status = compare_calls(comm, p, there < comm->chunk ? there : comm->chunk);
        if (status)
            return status;
        if (there < comm->chunk && how == PHX_LEFT)
            left_out = p;
        behind |= there < comm->chunk && how == PHX_HERE;
    }
    if (left_out != PHX_NOBODY)
        return phx_break_gone(comm, left_out, PHX_LEFT);
    const int status = phx_broken(comm);
    return status || !behind ? status : PHX_UNDER_WAY;
}

void phx_begin_parts(phx_comm *comm, uint64_t call)
{
    comm->whole = phx_mix(call) & ~PHX_SHAPE_MASK;
    comm->whole_chunk = comm->chunk;
}

int phx_beside_last_call(const phx_comm *comm, uint64_t chunk)
{
    if (chunk < (comm->whole ? comm->whole_chunk : comm->call_chunk))
        return -1;
    return chunk >= comm->chunk;
}

int phx_enter(phx_comm *comm, uint64_t chunk, uint64_t call)
{
    /* Record the call even if the group is broken: `call_chunk` is compared with the chunk at which it broke, to decide
     * whether this rank reports this call or an earlier one. */
    int again = 0; /* a call that begins at the chunk where the last one began: that one has failed */
    if (chunk == comm->chunk) { /* the first chunk of a call, since a call adds up its chunks only at its end */
        again = comm->begun > chunk;
        comm->begun = chunk + 1;
        atomic_store_explicit(&comm->call_chunk, chunk, memory_order_relaxed);
    }
    if (phx_broken(comm)) {
        struct phx_breakage why;
        const int status = phx_breakage(comm, &why);
        /* The group broke at chunk `why.chunk`. A rank that has not come that far continues until it has, so that all
         * ranks report the same call. It cannot hang on the way: either the data it needs is in the slots already, or
         * its wait sees that the group is broken and returns. */
        if (again || chunk >= why.chunk)
            return status;
    }
    const int status = chunk > 1 ? phx_wait_all_ready(comm, chunk - 2) : PHX_OK;
    if (status)
        return status;
    comm->flags[comm->rank].call[chunk % PHX_SLOTS] = call ^ comm->whole;
    if (comm->lines)
        phx_publish_line(comm, chunk);
    return PHX_OK;
}
