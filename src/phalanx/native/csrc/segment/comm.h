/* One rank's private view of a segment, which no other rank reads. Fields that are not named here do not change.
 *
 * field                            writer                          readers
 * chunk .. whole_chunk,            the thread that is in a         the same; another thread reads `call_chunk`, maybe one
 * compared .. crossed              collective, one at a time       call old, to break the group or to explain why it broke
 * met, recorders                   the thread that meets the       all, later
 *                                  others, before any other call
 * timeout_ns, message_timeout_ns   any thread                      waits under way go on with the old limit or the new one
 * mail                             any thread, under its own lock  the same
 */
#ifndef PHALANX_COMM_H
#define PHALANX_COMM_H

#include "system/process.h"
#include "segment/segment.h"

/* Memory beside the segment that every rank has mapped somewhere. */
struct phx_memory {
    const char *base;
    uint64_t nbytes;
};

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
    phx_poll poll;
    const int32_t *names; /* what the recorder calls the ranks, if that is not their number here; else NULL */
    struct phx_header *header;
    struct phx_flags *flags;
    struct phx_place *places;
    char *slots;
    struct phx_ring *rings;
    char *ring_data;
    uint64_t mapped_bytes;
    struct phx_mail *mail;   /* this rank's messages (mail.c) */
    uint64_t *compared;      /* up to which chunk each other rank has been awaited, and its call words compared */
    const void **inputs;     /* scratch of `size` pointers for the reduction kernels */
    struct phx_memory *shared; /* what phx_share_memory() was given, in order: alike on all ranks but for the addresses */
    uint64_t nshared;
    const char **tensors;    /* where each rank's tensor of a reduction lies in shared memory; NULL: not there */
    struct phx_lines *lines; /* what has been noticed of the lines of calls (line_order.c); NULL: they are not compared */
    uint32_t unsettled;      /* with how many ranks lines have differed lately */
    uint32_t crossed;        /* the call under way has found lines crossed */
    const char **recorders;  /* each other rank's flight recorder, if it can be read; only the last call closes them */
    struct phx_process *met; /* each other rank's process, as this one saw it when they met; zeros if it did not */
    phx_comm *next;          /* in the list of the views of this process (breaking.c), under its lock */
};

static inline char *phx_slot(const phx_comm *comm, uint32_t rank, uint64_t chunk)
{
    return comm->slots + ((uint64_t)rank * PHX_SLOTS + chunk % PHX_SLOTS) * comm->chunk_bytes;
}

/* -- life.c: whether the ranks are still there --------------------------------------------------------------------- */

/* How a rank stands to the group: PHX_HERE, or how it went. */
enum phx_going phx_peer_life(const phx_comm *comm, uint32_t peer);

/* Tell the others that this rank goes; a worse way than one told before counts. */
void phx_tell(phx_comm *comm, enum phx_going how);

/* -- breaking.c: the first rank to notice a problem writes down why, and every wait of every rank ends ------------- */

/* The status of the reason that counts, PHX_OK if the group is whole. */
static inline int phx_broken(const phx_comm *comm)
{
    const uint32_t first = atomic_load_explicit(&comm->header->breaking, memory_order_acquire);
    return first ? (int)comm->places[first - 1].breakage.status : PHX_OK;
}

/* Break the group because of `peer`, unless it is broken already; returns the status of the reason that counts, which
 * is the first. */
int phx_break(phx_comm *comm, int status, uint32_t peer);

/* The same for two calls that differ at `chunk`. */
int phx_break_at(phx_comm *comm, int status, uint32_t peer, uint64_t chunk);

/* The same for a message from `src` whose ends differ. */
int phx_break_message(phx_comm *comm, uint32_t src, const struct phx_end *sent, const struct phx_end *expected);

/* The same for a rank that went, and how. */
int phx_break_gone(phx_comm *comm, uint32_t peer, enum phx_going how);

/* Enter the view in the list of those that this process tells of its end, or take it out. */
void phx_remember(phx_comm *comm);
void phx_forget(phx_comm *comm);

/* -- cores.c: keeping ranks that wait for each other on different cores -------------------------------------------- */

/* Publish which core this rank runs on, for ranks that wait for it. */
void phx_note_cpu(phx_comm *comm);

/* Move this thread to another core if `peer` was last seen on the same one, although there is a core for each rank. Of
 * two ranks the higher one moves, at most once in 10 ms. */
void phx_move_apart(phx_comm *comm, uint32_t peer);

#endif
