/* Sleeping on a shared word and waking its sleepers; the clock, and the times that all waits have in common.
 *
 * This folder is what the core asks of Linux; nothing in it knows groups. Beside this: processes and threads
 * (process.h), and a copy of the process that writes its stack (stacks.c). */
#ifndef PHALANX_FUTEX_H
#define PHALANX_FUTEX_H

#include <stdatomic.h>
#include <stdint.h>

#define PHX_SLICE_NS 50000000ull /* the longest sleep: after each, a wait checks whether it is still worth waiting */
#define PHX_YIELD_NS 200000ull   /* how long a wait yields the core before it sleeps: about four times a wake-up */

uint64_t phx_now_ns(void);

/* How much of the time since a wait last looked at the clock counts towards its timeout. A process that was stopped, as
 * its whole job may have been (SIGSTOP, docker pause, a batch system's suspend), did not wait meanwhile. */
static inline uint64_t phx_waited_ns(uint64_t elapsed_ns)
{
    return elapsed_ns < 2 * PHX_SLICE_NS ? elapsed_ns : 2 * PHX_SLICE_NS;
}

/* Make a spinning wait easier on the core. */
static inline void phx_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The low half of a 64-bit counter, which is what the kernel compares and sleeps on. */
static inline _Atomic uint32_t *phx_low_half(_Atomic uint64_t *word)
{
    return (_Atomic uint32_t *)word;
}

enum phx_sleep { PHX_WOKEN, PHX_SLEPT_OUT, PHX_SIGNALLED };

/* Sleep for at most a slice while `*word` is `value`. The sleeper counts itself in `*sleepers` meanwhile, which the
 * rank that changes the word reads, to know whether to wake anybody. */
enum phx_sleep phx_sleep(_Atomic uint32_t *word, uint32_t value, _Atomic uint32_t *sleepers);

/* Wake every thread, of any process, that sleeps on the word. */
void phx_wake(_Atomic uint32_t *word);

#endif
