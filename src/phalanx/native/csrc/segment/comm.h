/* One rank's private view of a segment, which no other rank reads.
 *
 * The thread that is in a collective, one at a time, alone uses `chunk`, `begun`, `whole`, `whole_chunk`, `seen`,
 * `compared`, `inputs`, `rests`, `lines` and what follows it, and writes `call_chunk`. `met` is written by the one
 * thread that meets the others, before any other call. Another thread of the rank reads `call_chunk` when it breaks
 * the group or explains why it broke; a value that is one call old does no harm there. Any thread may write the
 * timeouts; a wait under way then has the old limit or the new one. `mail` has a lock of its own. The other fields do
 * not change. */
#ifndef PHALANX_COMM_H
#define PHALANX_COMM_H

#include "system/process.h"
#include "segment/segment.h"

struct phx_comm {
    uint32_t rank, size;
    uint32_t spin;       /* how often a wait checks its counter before it yields the core */
    uint32_t cores;      /* how many cores this process may run on */
    uint64_t chunk;      /* the number of the next call's first chunk, the same on every rank between two calls */
    _Atomic uint64_t call_chunk; /* the first chunk of the call that this rank is in, or was in last */
    uint64_t begun;      /* call_chunk + 1, or 0 before the first call */
    uint64_t whole;      /* of the call of a larger group of which the calls are parts: a hash, or 0 */
    uint64_t whole_chunk; /* the first chunk of that call */
    uint64_t chunk_bytes, small_bytes, stream_bytes;
    _Atomic uint64_t timeout_ns, message_timeout_ns; /* of a collective, and of a message */
    uint32_t rests;      /* a wait in a collective sleeps before it has yielded the core for a while */
    phx_poll poll;
    int32_t *names;      /* what the recorder calls the ranks, if that is not their number here; else NULL */
    struct phx_header *header;
    struct phx_flags *flags;
    struct phx_place *places;
    char *slots;
    struct phx_ring *rings;
    char *ring_data;
    uint64_t mapped_bytes;
    struct phx_mail *mail;   /* this rank's messages (mail.c) */
    uint64_t *seen;          /* the last `ready` this rank read of each: spares reading the shared line again */
    uint64_t *compared;      /* up to which chunk each other rank's call words have been compared with this one's */
    const void **inputs;     /* scratch of `size` pointers for the reduction kernels */
    struct phx_lines *lines; /* what has been noticed of the lines of calls (line_order.c); NULL: they are not compared */
    uint32_t unsettled;      /* with how many ranks lines have differed lately */
    uint32_t crossed;        /* the call under way has found lines crossed */
    const char **recorders;  /* each other rank's flight recorder, if it can be read; only the last call closes them */
    struct phx_process *met; /* each other rank's process, as this one saw it when they met; zeros if it did not */
    phx_comm *next;          /* in the list of the views of this process (life.c), under its lock */
};

static inline char *phx_slot(const phx_comm *comm, uint32_t rank, uint64_t chunk)
{
    return comm->slots + ((uint64_t)rank * PHX_SLOTS + chunk % PHX_SLOTS) * comm->chunk_bytes;
}

#endif
