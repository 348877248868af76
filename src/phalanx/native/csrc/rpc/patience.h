/* For how long a thread that waits for a message watches before it sleeps. */
#ifndef PHALANX_RPC_PATIENCE_H
#define PHALANX_RPC_PATIENCE_H

#include <stdatomic.h>
#include <stdint.h>

/* For twice as long as waits have taken lately, because to sleep and to be woken takes longer than a quick call; and not
 * for long if waits are long anyway. */
#define LEAST_SPIN_NS 20000u
#define MOST_SPIN_NS 200000u
#define LONG_WAIT_NS 1000000u

static inline uint64_t phx_rpc_watch_ns(const _Atomic uint32_t *usual)
{
    const uint32_t twice = 2 * atomic_load_explicit(usual, memory_order_relaxed);
    return twice < LEAST_SPIN_NS || twice > MOST_SPIN_NS ? LEAST_SPIN_NS : twice;
}

/* Count a wait in the running mean of how long waits take. Several threads may do so at once: then one of the waits is not
 * counted, which only makes the mean a little older. */
static inline void phx_rpc_note(_Atomic uint32_t *usual, uint64_t took_ns)
{
    const uint32_t before = atomic_load_explicit(usual, memory_order_relaxed);
    const uint32_t took = took_ns < LONG_WAIT_NS ? (uint32_t)took_ns : LONG_WAIT_NS;
    atomic_store_explicit(usual, before - before / 8 + took / 8, memory_order_relaxed);
}

#endif
