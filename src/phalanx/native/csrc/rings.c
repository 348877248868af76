/* How large the rings of a group are: a megabyte of them per rank, none below 4 KiB or above 256 KiB. */
#include "p2p.h"

uint64_t phx_ring_bytes(uint32_t size)
{
    uint64_t bytes = 262144;
    while (bytes > 4096 && bytes * size > 1048576)
        bytes /= 2;
    return bytes;
}

uint64_t phx_rings_bytes(uint32_t size)
{
    return (uint64_t)size * size * (sizeof(struct phx_ring) + phx_ring_bytes(size));
}
