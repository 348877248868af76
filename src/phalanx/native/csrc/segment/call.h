/* The call word: a hash of a call, so that comparing two ranks' calls is comparing two integers.
 *
 * Its upper part covers everything that must be equal: kind, dtype, operation, root, bytes. Two different calls have
 * the same one once in 2^40. Its lower part is a hash of the shape that the caller computes, or 0 if any shape will do:
 * a shape must be equal only where both ranks care about theirs (a matrix, and not a vector of as many elements). If
 * two call words do not match, the ranks' descriptions say what the calls were (breaking.c). In a group that is a part
 * of a larger one, the upper part covers the call of that one as well (phx_begin_parts()).
 *
 * A call without data has no memory, and a call with data must have some: a tensor that only stands for another
 * (torch's wrapper subclasses) has the address NULL. */
#ifndef PHALANX_CALL_H
#define PHALANX_CALL_H

#include <stdint.h>

#define PHX_SHAPE_BITS 24
#define PHX_SHAPE_MASK ((1ull << PHX_SHAPE_BITS) - 1)

static inline uint64_t phx_mix(uint64_t word)
{
    word *= 0xff51afd7ed558ccdull;
    word = (word ^ word >> 33) * 0xc4ceb9fe1a85ec53ull;
    return word ^ word >> 33;
}

static inline uint64_t phx_call(uint32_t kind, uint32_t dtype, uint32_t op, uint32_t root, uint64_t nbytes,
                                uint64_t shape)
{
    const uint64_t word = (uint64_t)kind | (uint64_t)dtype << 8 | (uint64_t)op << 16 | (uint64_t)root << 32;
    const uint64_t known_shape = shape ? (phx_mix(shape) & PHX_SHAPE_MASK) | 1 : 0;
    return (phx_mix(word ^ nbytes * 0x9e3779b97f4a7c15ull) & ~PHX_SHAPE_MASK) | known_shape;
}

static inline int phx_same_call(uint64_t one, uint64_t other)
{
    const uint64_t difference = one ^ other;
    return !difference || (!(difference & ~PHX_SHAPE_MASK) && (!(one & PHX_SHAPE_MASK) || !(other & PHX_SHAPE_MASK)));
}

static inline int phx_lacks_memory(const void *data, uint64_t nbytes)
{
    return nbytes && !data;
}

static inline int phx_any_lacks_memory(const void *const *data, uint32_t size, uint64_t nbytes)
{
    for (uint32_t p = 0; p < size && nbytes; p++)
        if (!data[p])
            return 1;
    return 0;
}

#endif
