/* Waiting: spin, then yield, then sleep on a shared futex in slices that look after the peers.
 *
 * A short spin catches a peer that is a microsecond behind; yielding lets ranks that share a core take turns;
 * sleeping leaves the core to whoever computes when a peer is far behind (a slow data loader). The futex is
 * the low half of the awaited word itself, so there is no second word that could disagree with it. */
#define _GNU_SOURCE
#include "wait.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the futex is the low half of a 64-bit word, taken at its address: little-endian only"
#endif

#define MOVE_AGAIN_NS 10000000ull
#define YIELD_NS 200000ull /* how long to yield before sleeping: about four times a wake-up */
#define REASON_NS 100000000ull /* how long the reason of a break may take to be written down */

uint64_t phx_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

void phx_futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

enum phx_sleep phx_sleep(_Atomic uint32_t *word, uint32_t value, _Atomic uint32_t *sleepers)
{
    const struct timespec slice = {.tv_nsec = PHX_SLICE_NS};
    atomic_fetch_add_explicit(sleepers, 1, memory_order_seq_cst);
    const long failed = syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT, value, &slice, NULL, 0);
    const int reason = failed ? errno : 0;
    atomic_fetch_sub_explicit(sleepers, 1, memory_order_seq_cst);
    return reason == ETIMEDOUT ? PHX_SLEPT_OUT : reason == EINTR ? PHX_SIGNALLED : PHX_WOKEN;
}

/* The low half of a 64-bit word, which is what the kernel compares and sleeps on. */
static _Atomic uint32_t *low_half(_Atomic uint64_t *word)
{
    return (_Atomic uint32_t *)word;
}

static inline int reached(_Atomic uint64_t *word, uint64_t target)
{
    return atomic_load_explicit(word, memory_order_acquire) >= target;
}

void phx_note_cpu(phx_comm *comm)
{
    _Atomic uint32_t *noted = &comm->flags[comm->rank].cpu;
    const uint32_t cpu = (uint32_t)sched_getcpu();
    if (atomic_load_explicit(noted, memory_order_relaxed) != cpu)
        atomic_store_explicit(noted, cpu, memory_order_relaxed);
}

void phx_move_apart(phx_comm *comm, uint32_t peer)
{
    static _Thread_local uint64_t moved_ns;
    const int cpu = sched_getcpu();
    if (peer >= comm->rank || comm->size > comm->cores || cpu < 0 ||
        atomic_load_explicit(&comm->flags[peer].cpu, memory_order_relaxed) != (uint32_t)cpu)
        return;
    const uint64_t now = phx_now_ns();
    cpu_set_t all, others;
    if (now - moved_ns < MOVE_AGAIN_NS || sched_getaffinity(0, sizeof all, &all))
        return;
    moved_ns = now;
    others = all;
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others) && sched_setaffinity(0, sizeof others, &others) == 0)
        sched_setaffinity(0, sizeof all, &all); /* it stays where it is now, and may go anywhere again */
}

void phx_raise(phx_comm *comm, _Atomic uint64_t *word, uint64_t value)
{
    phx_note_cpu(comm);
    /* seq_cst on both sides: either this load sees the sleeper, or the sleeper's look sees this store. */
    atomic_store_explicit(word, value, memory_order_seq_cst);
    if (atomic_load_explicit(&comm->places[comm->rank].sleepers, memory_order_seq_cst) != 0)
        phx_futex_wake(low_half(word));
}

int phx_break_at(phx_comm *comm, int status, uint32_t peer, uint64_t chunk)
{
    uint32_t whole = 0;
    if (atomic_compare_exchange_strong(&comm->header->breaking, &whole, 1)) {
        struct phx_breakage *why = &comm->header->breakage;
        why->status = (uint32_t)status;
        why->rank = comm->rank;
        why->peer = peer;
        why->peer_pid = comm->places[peer].pid;
        why->chunk = chunk;
        atomic_store_explicit(&comm->header->breaking, 2, memory_order_release);
        for (uint32_t p = 0; p < comm->size; p++) {
            phx_futex_wake(low_half(&comm->flags[p].ready));
            phx_futex_wake(low_half(&comm->flags[p].done));
            phx_futex_wake(&comm->places[p].bell);
        }
        return status;
    }
    struct phx_breakage why;
    return phx_breakage(comm, &why);
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
    /* The winner fills the reason within microseconds, unless it has lost its core, or died, in between. */
    const uint64_t start = phx_now_ns();
    do {
        const uint32_t state = atomic_load_explicit(&comm->header->breaking, memory_order_acquire);
        if (state != 1) {
            *out = comm->header->breakage;
            return state == 0 ? PHX_OK : (int)out->status;
        }
        sched_yield();
    } while (phx_now_ns() - start < REASON_NS);
    for (uint32_t p = 0; p < comm->size; p++)
        if (!phx_place_alive(&comm->places[p])) {
            *out = (struct phx_breakage){
                .status = PHX_PEER_LOST, .rank = comm->rank, .peer = p, .peer_pid = comm->places[p].pid};
            return PHX_PEER_LOST;
        }
    *out = (struct phx_breakage){.status = PHX_INTERRUPTED, .rank = PHX_NOBODY, .peer = PHX_NOBODY};
    return PHX_INTERRUPTED;
}

static int wait_slowly(phx_comm *comm, uint32_t peer, _Atomic uint64_t *word, uint64_t target)
{
    const uint64_t start = phx_now_ns();
    struct phx_breakage why;
    phx_move_apart(comm, peer);
    for (uint32_t i = 1;; i++) {
        sched_yield();
        if (reached(word, target))
            return PHX_OK;
        if (phx_broken(comm))
            return phx_breakage(comm, &why);
        if (i % 8 == 0 && phx_now_ns() - start > YIELD_NS)
            break;
    }
    struct phx_place *place = &comm->places[peer];
    for (uint64_t looked = phx_now_ns();;) {
        const uint64_t value = atomic_load_explicit(word, memory_order_acquire);
        /* A raise between this look and the sleep changes the word, and the kernel does not sleep on a changed one. */
        const enum phx_sleep slept =
            value < target ? phx_sleep(low_half(word), (uint32_t)value, &place->sleepers) : PHX_WOKEN;
        if (reached(word, target))
            return PHX_OK;
        if (phx_broken(comm))
            return phx_breakage(comm, &why);
        if (slept != PHX_WOKEN && comm->poll && comm->poll())
            return phx_break(comm, PHX_INTERRUPTED, comm->rank);
        /* By the clock: signals (a profiler's timer) may cut every single sleep short. */
        const uint64_t now = phx_now_ns();
        if (now - looked < PHX_SLICE_NS)
            continue;
        looked = now;
        /* The order matters: a peer may raise the word and end right after, so look at the word last. */
        if (!phx_place_alive(place))
            return reached(word, target) ? PHX_OK : phx_break(comm, PHX_PEER_LOST, peer);
        if (now - start > comm->timeout_ns)
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
    return wait_slowly(comm, peer, word, target);
}

/* Compare the calls of `peer`, which has raised `ready` to `seen`, up to that chunk; its words and this rank's own for
 * the last PHX_RING - 1 chunks are intact, and no more than two were left uncompared. */
static int compare_calls(phx_comm *comm, uint32_t peer, uint64_t seen)
{
    const uint64_t *mine = comm->flags[comm->rank].call, *theirs = comm->flags[peer].call;
    for (uint64_t chunk = comm->compared[peer]; chunk < seen; chunk++)
        if (mine[chunk % PHX_RING] != theirs[chunk % PHX_RING])
            return phx_break_at(comm, PHX_MISMATCH, peer, chunk);
    comm->compared[peer] = seen;
    return PHX_OK;
}

int phx_enter(phx_comm *comm, uint64_t chunk, uint64_t call)
{
    /* Also in a broken group: whether its reason lies before this call decides what this rank tells about itself. */
    int again = 0; /* a call that began where the last one did: that one has failed */
    if (chunk == comm->chunk) { /* every call adds up its chunks only at its end */
        again = comm->begun > chunk;
        comm->begun = chunk + 1;
        comm->call = call;
        comm->call_chunk = chunk;
    }
    if (phx_broken(comm)) {
        struct phx_breakage why;
        const int status = phx_breakage(comm, &why);
        /* A rank that is behind goes on to where the group broke: what it needs until there is in the slots or, if
         * not, its wait ends, and the call that it then tells of is the one that its peers tell of. */
        if (again || chunk >= why.chunk)
            return status;
    }
    for (uint32_t p = 0; p < comm->size && chunk > 1; p++) {
        if (p == comm->rank || comm->seen[p] >= chunk - 1)
            continue;
        const int status = phx_wait(comm, p, &comm->flags[p].ready, chunk - 1);
        if (status)
            return status;
        comm->seen[p] = chunk - 1;
    }
    for (uint32_t p = 0; p < comm->size && chunk > 1; p++) {
        const int status = p == comm->rank ? PHX_OK : compare_calls(comm, p, chunk - 1);
        if (status)
            return status;
    }
    comm->flags[comm->rank].call[chunk % PHX_RING] = call;
    return PHX_OK;
}

int phx_wait_ready(phx_comm *comm, uint32_t peer, uint64_t chunk)
{
    const int status = phx_wait(comm, peer, &comm->flags[peer].ready, chunk + 1);
    if (status)
        return status;
    comm->seen[peer] = chunk + 1;
    return compare_calls(comm, peer, chunk + 1);
}
