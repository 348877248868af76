/* How large the rings of a group are: 4 MiB of them per rank (1 MiB in a group of more than eight), none below 4 KiB or
 * above 2 MiB. Both ends copy at once only if a ring holds a good part of the message: with 256 KiB a message of 1 MiB
 * took 123 us, with 1 MiB 50. */
#include "p2p.h"

uint64_t phx_ring_bytes(uint32_t size)
{
    const uint64_t together = size <= 8 ? 4194304 : 1048576;
    uint64_t bytes = 2097152;
    while (bytes > 4096 && bytes * size > together)
        bytes /= 2;
    return bytes;
}

uint64_t phx_rings_bytes(uint32_t size)
{
    return (uint64_t)size * size * (sizeof(struct phx_ring) + phx_ring_bytes(size));
}
