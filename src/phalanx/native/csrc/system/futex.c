/* The futex is the low half of the awaited counter itself, so there is no second word that could disagree with it. */
#define _GNU_SOURCE
#include "system/futex.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the futex is the low half of a 64-bit word, taken at its address: little-endian only"
#endif

uint64_t phx_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

void phx_wake(_Atomic uint32_t *word)
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
