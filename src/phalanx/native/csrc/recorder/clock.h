/* The time of the monotonic clock for records, at a third of the price of asking for it: from the processor's counter.
 *
 * A thread asks for the time once in PHX_CLOCK_NS at least, and in between adds what its counter says has passed. How
 * fast the counter runs it learns by asking. So a counter that jumps, or one that differs from core to core, leads a
 * record astray by no more than that, and one that the kernel itself uses (phx_clock_open) by some tenths of a
 * microsecond: nothing keeps a processor from reading it before what comes before it is done. */
#ifndef PHALANX_CLOCK_H
#define PHALANX_CLOCK_H

#include <stdint.h>

#define PHX_CLOCK_NS 100000ull

/* One thread's, which no other reads. All zero is a beginning. */
struct phx_clock {
    uint64_t count, ns;             /* the counter and the clock at one moment */
    uint64_t valid;                 /* for how many counts from then on; 0: ask */
    uint64_t rate;                  /* nanoseconds for a count, times 2^32 */
    uint64_t since_count, since_ns; /* another moment, from which on the rate is measured */
};
extern __thread __attribute__((tls_model("initial-exec"))) struct phx_clock phx_clock;

/* Find out whether the counter can be used; before that it is not. */
void phx_clock_open(void);

/* Ask for the time, and learn from it. */
uint64_t phx_clock_ask(void);

static inline uint64_t phx_clock_now(void)
{
#if defined(__x86_64__)
    const uint64_t since = __builtin_ia32_rdtsc() - phx_clock.count; /* huge if the counter has gone back */
    if (since < phx_clock.valid)
        return phx_clock.ns + (since * phx_clock.rate >> 32);
#endif
    return phx_clock_ask();
}

#endif
