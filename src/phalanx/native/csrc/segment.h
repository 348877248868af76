/* The shared segment: every word that two ranks share, who writes it, who reads it, in which order.
 *
 * Time in a group is counted in chunks. Every collective takes a number of chunks that follows from its
 * arguments alone, so all ranks number them alike: chunk k is the k-th of the group's life. A rank's data
 * for chunk k lies in its slot k mod PHX_RING.
 *
 *   `ready` = k + 1   "my part of chunk k is in my slot (or I have nothing to put in), and I have finished
 *                      chunk k - 2 and all before it": a rank works on at most two chunks at a time.
 *   `done`  = k + 1   "the slice of chunk k that is mine to reduce lies reduced in my slot".
 *
 * Before a rank writes its slot or its call word for chunk k, it waits until every `ready` >= k - 1: then
 * every rank has put in chunk k - 2, hence finished chunk k - 4, the last one that used the same slot.
 *
 * Who writes, who reads, and what a death leaves behind:
 *   ready, done  written by their rank only, seq_cst (the store must not pass the load of `sleepers`); read by
 *                all, acquire. Death before: peers wait, find the process gone, break the group. Death after:
 *                the data is whole and is used; the next wait finds the process gone.
 *   call[]       written by their rank only, before `ready`; read by all after `ready` was acquired. Death
 *                between: nobody has been told to look.
 *                Whoever waits for a rank compares then; who does not (a broadcast's root) does so when it enters
 *                a later chunk or next waits for that rank, at most two chunks later: the word is still there.
 *   cpu          where the rank last raised a word; written by it, read by all, relaxed: a hint and nothing more.
 *   slots        the same as call[]; the reduced slice the same with `done`.
 *   told         0 -> 1 by the one thread of its rank that wins the exchange, which then writes `text` and stores 2
 *                (release). Death between: the others do without that rank's words.
 *   text         written as said; read by all after `told` was acquired as 2.
 *   sleepers     added to and subtracted from by ranks that sleep on the words of this place, seq_cst; read by
 *                the place's rank. Death of a sleeper leaves it too high: a needless wake per store, in a group
 *                that is about to break because of that death.
 *   breaking     0 -> 1 by the one rank that wins the exchange, which then fills `breakage` and stores 2
 *                (release). Read by all. Death between: after 100 ms readers look themselves for a process that is
 *                gone; if none is, the winner is stopped, and they know only that the group is broken.
 *   header, pid  written before the ranks meet (through the store), read only afterwards.
 */
#ifndef PHALANX_SEGMENT_H
#define PHALANX_SEGMENT_H

#include <stdatomic.h>
#include <stddef.h>

#include "phalanx.h"

#define PHX_LINE 64
#define PHX_RING 4u
#define PHX_MAX_RANKS 1024u

struct phx_header {
    uint64_t magic;
    uint32_t abi, size;
    uint64_t chunk_bytes, small_bytes, stream_bytes;
    uint8_t cookie[16];
    _Atomic uint32_t breaking;
    struct phx_breakage breakage;
};

struct phx_flags {
    _Alignas(PHX_LINE) _Atomic uint64_t ready;
    _Atomic uint64_t done;
    uint64_t call[PHX_RING];
    _Atomic uint32_t cpu;
};

struct phx_place {
    _Alignas(PHX_LINE) _Atomic uint32_t sleepers;
    _Alignas(PHX_LINE) _Atomic uint32_t bell, listening; /* see p2p.h */
    _Alignas(PHX_LINE) uint32_t pid;
    uint64_t start_time; /* tells a process from a later one with the same pid */
    _Atomic uint32_t told;
    char text[PHX_TEXT];
};

/* One rank's private view. */
struct phx_comm {
    uint32_t rank, size, spin, cores;
    uint64_t chunk; /* the next chunk's number, the same on every rank between two calls */
    uint64_t call;  /* the word of the call this rank is in now */
    uint64_t call_chunk; /* the chunk that call began with */
    uint64_t begun; /* the same + 1, or 0 before the first call */
    uint64_t chunk_bytes, small_bytes, stream_bytes, timeout_ns;
    phx_poll poll;
    struct phx_header *header;
    struct phx_flags *flags;
    struct phx_place *places;
    char *slots;
    struct phx_ring *rings;
    uint64_t mapped_bytes;
    struct phx_mail *mail; /* this rank's end of the point-to-point rings */
    uint64_t *seen;      /* the last `ready` this rank saw of each: spares a look at the shared line */
    uint64_t *compared;  /* up to which chunk each other rank's calls have been compared with this one's */
    const void **inputs; /* scratch of `size` pointers for the reduction kernels */
};

static inline char *phx_slot(const phx_comm *comm, uint32_t rank, uint64_t chunk)
{
    return comm->slots + ((uint64_t)rank * PHX_RING + chunk % PHX_RING) * comm->chunk_bytes;
}

/* Whether the process that opened this place still runs (a zombie does not). */
int phx_place_alive(const struct phx_place *place);
uint64_t phx_process_start_time(uint32_t pid);

#endif
