/* The kernel leaves two ranks that wait for each other on one core: it does not move a thread that ran within half a
 * millisecond, and while one of the two sleeps it sees no reason to. So the ranks do it themselves. */
#define _GNU_SOURCE
#include "segment/comm.h"

#include <sched.h>

#include "system/futex.h"

#define MOVE_AGAIN_NS 10000000ull

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
    /* Excluding this core for a moment moves the thread, which then stays where it is. Cores that somebody else sets
     * between these calls are lost. */
    if (CPU_COUNT(&others) && sched_setaffinity(0, sizeof others, &others) == 0)
        sched_setaffinity(0, sizeof all, &all);
}
