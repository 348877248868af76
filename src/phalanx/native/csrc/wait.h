/* Raising a word for others and waiting for theirs; entering a chunk; breaking the group. */
#ifndef PHALANX_WAIT_H
#define PHALANX_WAIT_H

#include "segment.h"

#define PHX_SLICE_NS 50000000ull

uint64_t phx_now_ns(void);

static inline void phx_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int phx_broken(const phx_comm *comm)
{
    return atomic_load_explicit(&comm->header->breaking, memory_order_acquire) != 0;
}

enum phx_sleep { PHX_WOKEN, PHX_SLEPT_OUT, PHX_SIGNALLED };

/* Sleep for a slice while `*word` is `value`, counted in `*sleepers` meanwhile; whoever changes the word looks there. */
enum phx_sleep phx_sleep(_Atomic uint32_t *word, uint32_t value, _Atomic uint32_t *sleepers);
void phx_futex_wake(_Atomic uint32_t *word);

/* Leave word of the core this rank runs on, for those that wait for it. */
void phx_note_cpu(phx_comm *comm);
/* Move this thread to another core if `peer` was last seen on this one, although there is one for each rank. The kernel
 * leaves two ranks that wait for each other together: it does not move what ran within half a millisecond, and while one
 * of them sleeps it sees no reason to. Of two, the higher rank moves; at most once in 10 ms. */
void phx_move_apart(phx_comm *comm, uint32_t peer);

/* Store `value` into a word of this rank and wake whoever sleeps on it. */
void phx_raise(phx_comm *comm, _Atomic uint64_t *word, uint64_t value);

/* Wait until a word of `peer` is at least `target`: spin, yield, then sleep, and every slice look
 * whether the peer lives, the group is whole, the time is up, and whether `poll` wants to stop. */
int phx_wait(phx_comm *comm, uint32_t peer, _Atomic uint64_t *word, uint64_t target);

/* Break the group unless it is broken already; returns the status that stands. */
int phx_break(phx_comm *comm, int status, uint32_t peer);
/* The same for two calls that differ, which were made for `chunk`. */
int phx_break_at(phx_comm *comm, int status, uint32_t peer, uint64_t chunk);

/* Wait for the right to write slot and call word of `chunk`, and publish the call. */
int phx_enter(phx_comm *comm, uint64_t chunk, uint64_t call);

/* Say that this rank's part of `chunk` is in its slot. */
static inline void phx_put(phx_comm *comm, uint64_t chunk)
{
    phx_raise(comm, &comm->flags[comm->rank].ready, chunk + 1);
}

/* Wait until `peer` has put in its part of `chunk`, and compare its calls up to that one with this rank's. */
int phx_wait_ready(phx_comm *comm, uint32_t peer, uint64_t chunk);

#endif
