/* A call packed into one word, so that comparing two ranks' calls is comparing two integers.
 *
 * Exact, not a hash: what differs can be read back and said. 5 bits kind, 5 dtype, 4 reduce operation,
 * 10 root, 40 bytes (a terabyte).
 */
#ifndef PHALANX_CALL_H
#define PHALANX_CALL_H

#include "phalanx.h"

static inline uint64_t phx_call_pack(uint32_t kind, uint32_t dtype, uint32_t op, uint32_t root, uint64_t nbytes)
{
    return (uint64_t)kind | (uint64_t)dtype << 5 | (uint64_t)op << 10 | (uint64_t)root << 14 | nbytes << 24;
}

static inline struct phx_call phx_call_unpack(uint64_t word)
{
    struct phx_call call = {
        .kind = word & 31, .dtype = word >> 5 & 31, .op = word >> 10 & 15, .root = word >> 14 & 1023, .nbytes = word >> 24,
    };
    return call;
}

#endif
