/* Included before every source of the core (cc -include) by the test of deaths. It makes each store to an atomic word,
 * each exchange and each copy a point at which the process may end: right before it, right after it, or half way. */
#ifndef PHALANX_TEST_DEATHS_H
#define PHALANX_TEST_DEATHS_H

#define _GNU_SOURCE
#include <stdatomic.h>
#include <string.h>

/* Counts its calls; ends the process by SIGKILL at the chosen one. */
void death_point(void);

#undef atomic_store_explicit
#define atomic_store_explicit(word, value, order) \
    (death_point(), __atomic_store_n((word), (value), (order)), death_point())

#undef atomic_fetch_add_explicit
#define atomic_fetch_add_explicit(word, value, order) (death_point(), __atomic_fetch_add((word), (value), (order)))

#undef atomic_compare_exchange_strong
#define atomic_compare_exchange_strong(word, expected, value)                                                    \
    ({                                                                                                           \
        death_point();                                                                                           \
        const int won_ = __atomic_compare_exchange_n((word), (expected), (value), 0, __ATOMIC_SEQ_CST,           \
                                                     __ATOMIC_SEQ_CST);                                          \
        death_point();                                                                                           \
        won_;                                                                                                    \
    })

#undef atomic_compare_exchange_weak_explicit
#define atomic_compare_exchange_weak_explicit(word, expected, value, won, lost)                                  \
    ({                                                                                                           \
        death_point();                                                                                           \
        const int won_ = __atomic_compare_exchange_n((word), (expected), (value), 1, (won), (lost));             \
        death_point();                                                                                           \
        won_;                                                                                                    \
    })

static inline void *death_copy(void *to, const void *from, size_t nbytes)
{
    memcpy(to, from, nbytes / 2);
    death_point();
    memcpy((char *)to + nbytes / 2, (const char *)from + nbytes / 2, nbytes - nbytes / 2);
    return to;
}
#define memcpy(to, from, nbytes) death_copy((to), (from), (nbytes))

#endif
