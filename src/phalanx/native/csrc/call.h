/* The call word: a hash of a call, so that comparing two ranks' calls is comparing two integers.
 *
 * It covers everything that must agree: kind, dtype, operation, root, bytes, and a hash of the shape that the caller
 * computes. Two different calls have the same one once in 2^64. If two call words differ, the ranks' descriptions say
 * what the calls were (breaking.c). */
#ifndef PHALANX_CALL_H
#define PHALANX_CALL_H

#include <stdint.h>

static inline uint64_t phx_call(uint32_t kind, uint32_t dtype, uint32_t op, uint32_t root, uint64_t nbytes,
                                uint64_t shape)
{
    uint64_t word = (uint64_t)kind | (uint64_t)dtype << 8 | (uint64_t)op << 16 | (uint64_t)root << 32;
    word = (word ^ nbytes * 0x9e3779b97f4a7c15ull ^ (shape << 31 | shape >> 33)) * 0xff51afd7ed558ccdull;
    word = (word ^ word >> 33) * 0xc4ceb9fe1a85ec53ull;
    return word ^ word >> 33;
}

#endif
