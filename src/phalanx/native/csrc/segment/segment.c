/* The segment as a file: its layout, its header, and whether a file is the segment that a rank was promised. */
#define _GNU_SOURCE
#include "segment/segment.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "segment/trace.h"

#define MAGIC 0x786e616c61687050ull
#define PAGE_BYTES 4096u

_Static_assert(sizeof(struct phx_header) <= PAGE_BYTES, "the header fits its page");
_Static_assert(sizeof(struct phx_flags) == PHX_LINE, "one rank's flags are one cache line");
_Static_assert(sizeof(struct phx_place) % PHX_LINE == 0, "places do not share cache lines");

phx_tracer_fn phx_tracer;

void phx_trace(phx_tracer_fn tracer)
{
    phx_tracer = tracer;
}

uint32_t phx_abi(void)
{
    return PHX_ABI;
}

/* All rings of a rank take 4 MiB together (1 MiB in a group of more than eight), but none has less than 4 KiB or more
 * than 2 MiB. The two ends copy at the same time only if the ring holds a good part of the message: a message of 1 MiB
 * took 123 us through a ring of 256 KiB, and 50 us through one of 1 MiB. */
uint64_t phx_ring_bytes(uint32_t size)
{
    const uint64_t together = size <= 8 ? 4194304 : 1048576;
    uint64_t bytes = 2097152;
    while (bytes > 4096 && bytes * size > together)
        bytes /= 2;
    return bytes;
}

struct phx_layout phx_layout_of(uint32_t size, uint64_t chunk_bytes)
{
    const uint64_t ranks = size, pairs = ranks * ranks;
    struct phx_layout at = {.flags = PAGE_BYTES};
    at.places = at.flags + ranks * sizeof(struct phx_flags);
    at.slots = (at.places + ranks * sizeof(struct phx_place) + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    at.rings = at.slots + ranks * PHX_SLOTS * chunk_bytes;
    at.ring_data = at.rings + pairs * sizeof(struct phx_ring);
    at.end = at.ring_data + pairs * phx_ring_bytes(size);
    return at;
}

int phx_segment_format(int fd, uint32_t size, uint64_t chunk_bytes, uint64_t small_bytes, uint64_t stream_bytes,
                       const uint8_t *cookie)
{
    if (size < 1 || size > PHX_MAX_RANKS || chunk_bytes < (uint64_t)size * PHX_LINE || chunk_bytes % PHX_LINE)
        return PHX_BAD_ARGUMENT;
    struct phx_header header = {.magic = MAGIC, .abi = PHX_ABI, .size = size, .chunk_bytes = chunk_bytes,
                                .small_bytes = small_bytes, .stream_bytes = stream_bytes};
    memcpy(header.cookie, cookie, sizeof header.cookie);
    if (ftruncate(fd, (off_t)phx_layout_of(size, chunk_bytes).end) != 0)
        return PHX_SYSTEM;
    return pwrite(fd, &header, sizeof header, 0) == (ssize_t)sizeof header ? PHX_OK : PHX_SYSTEM;
}

int phx_segment_read(int fd, const uint8_t *cookie, struct phx_header *header)
{
    struct stat file;
    if (fstat(fd, &file) != 0)
        return -1;
    /* The descriptor's number may belong to another file by now, so nothing is mapped before this check. */
    if (pread(fd, header, sizeof *header, 0) == (ssize_t)sizeof *header && header->magic == MAGIC &&
        header->abi == PHX_ABI && memcmp(header->cookie, cookie, sizeof header->cookie) == 0 &&
        (uint64_t)file.st_size == phx_layout_of(header->size, header->chunk_bytes).end)
        return 0;
    errno = EPROTO;
    return -1;
}
