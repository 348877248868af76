/* The shared segment: every word and byte that ranks share.
 *
 * A *chunk* is one round of exchange within a group: every collective takes a number of chunks that follows from its
 * arguments, so all ranks count them alike, and chunk k is the k-th of the group's life. A *slot* is a buffer of
 * `chunk_bytes` in the segment; each rank has PHX_SLOTS of them, and its data for chunk k lies in slot k mod PHX_SLOTS.
 * The *call word* of a rank for chunk k is a hash of the call that it makes there (call.h), so two ranks have made the
 * same call if their call words match.
 *
 * Two counters of each rank say how far it is:
 *
 *   ready = k + 1   "My data for chunk k is in my slot (or I have none), and I have finished every chunk up to k - 2":
 *                   a rank works on at most two chunks at a time.
 *   done  = k + 1   "The slice of chunk k that I reduce lies reduced in my slot."
 *
 * Before a rank writes its slot or its call word for chunk k, it waits until every rank's `ready` is at least k - 1.
 * Then every rank has put in chunk k - 2, and so has finished chunk k - 4, which was the last one in the same slot.
 *
 * A message goes through a *ring*, a circular buffer of bytes; there is one for each ordered pair of ranks. Its `head`
 * and `tail` count all bytes that ever went in and came out.
 *
 * Every shared word: its writer, its readers, the memory order, and the state left behind if the writer dies right
 * before or right after the store. Each place, each rank's flags and each counter of a ring has cache lines of its own.
 *
 *   magic, abi, size, chunk_bytes, small_bytes, stream_bytes, cookie
 *               Written by the rank that makes the file, before any other can open it; read by each rank when it opens
 *               the segment. Ordered by the store through which the ranks meet. Death before: the others wait in the
 *               store, or find a file of the wrong size, and do not open it. Death after: the segment is complete.
 *   pid, fd     Written by their rank when it opens the segment; read by all after the ranks have met through the
 *               store, which orders them. Death before: the ranks do not finish meeting. Death after: any rank that
 *               checks finds the process gone. `fd` is good until every rank has stored `sees`.
 *   recorder    Written and read as `pid`: where the rank keeps its flight recorder. The descriptor is good while the
 *               process lives, unless the program closes it; so a reader compares the file with what is said here.
 *   sees        Written once by its rank, release, when it has looked at the processes of all others; read by all,
 *               acquire. Death before: a rank that waits for it finds the process gone, or waits a little longer.
 *               Death after: the ranks finish meeting, and the first to wait for the dead one finds it gone.
 *   going       Raised by its rank, release, when it closes the group, whether in order or because of an exception, when
 *               an exception ends its script, or when it exits; read by all, acquire, by a rank that waits once a slice.
 *               Lowered only by its rank, relaxed, as that opens the segment once more after it had given up meeting;
 *               the store orders that as it does `pid`. Death before:
 *               the process is found gone, and how it went is unknown. Death after: the others have it; all that the
 *               rank has published and sent before it closed the group is there.
 *   ready, done Written by their rank, seq_cst, because the store must not pass the load of `sleepers`; read by all,
 *               acquire. Death before: a rank that waits finds the process gone and breaks the group. Death after: the
 *               data is complete and is used; the next wait for this rank finds the process gone.
 *   call[]      Written by their rank, plainly, before `ready`; read by all after they have acquired `ready`. Death
 *               before, or between the two stores: no rank reads the word. Death after `ready`: it is compared as
 *               usual. A rank that waits for another compares then. A rank that does not wait (a broadcast's root)
 *               compares when it enters a later chunk or next waits, at most two chunks later, when the word is still
 *               there.
 *   line[]      Written and read as call[], by the same ranks at the same times. 0: not known, or not the call's first
 *               chunk.
 *   cpu         Written by its rank, relaxed, when it raises a counter or rings a bell; read by all, relaxed. It is a
 *               hint on where the rank ran last, so neither death matters.
 *   slots       Written by their rank, or in a scatter by the root, plainly, before `ready` of the writer; the reduced
 *               slice before `done`. Read after that counter was acquired. Death in the middle of a copy: `ready` is
 *               not raised, and no rank reads the slot. Death after `ready`: see there.
 *   sleepers    Added to and subtracted from by ranks that sleep on a counter of this place, seq_cst; read by the
 *               place's rank, seq_cst. Death of a sleeper leaves it too high: each raise then makes one needless
 *               system call, in a group that will break because of that death.
 *   breaking    0 -> 1 by the first rank that breaks the group (compare-and-exchange, seq_cst), which fills in
 *               `breakage` and stores 2, release. Read by all, acquire. Death before: the next rank to notice breaks
 *               the group. Death between: after 100 ms readers search for a process that is gone, and if there is none
 *               (the writer is stopped) they know only that the group is broken. Death after 2, before the sleepers
 *               were woken: they wake at the end of their slice (PHX_SLICE_NS).
 *   breakage    Written by that rank, plainly, between the two stores; read by all after `breaking` was acquired as 2.
 *               The `site` of a message's end names a text in a rank's recorder, which that rank wrote before it gave
 *               the message: its receiver before `breaking`, its sender before the `head` that the receiver acquired. So
 *               who has acquired `breaking` may read both texts, also when their ranks are gone.
 *   described   0 -> 1 by the one thread of its rank that wins the exchange (seq_cst), which then writes `text` and
 *               stores 2, release. Read by all, acquire. Death before or between: the others' errors lack this rank's
 *               description. Death after: they have it.
 *   text        Written by that thread, plainly; read by all after `described` was acquired as 2.
 *   crossed     0 -> 1 by the first rank that finds lines crossed (compare-and-exchange, seq_cst), which then tells the
 *               user; read by no other operation. Death after it: nobody tells.
 *   head        Written by the ring's sender, release, after the bytes that it covers; read by the receiver, acquire.
 *               Death before: those bytes are not seen. Death after, in the middle of a message: the receiver takes
 *               what is there, waits for the rest and finds the process gone.
 *   tail        Written by the ring's receiver, release, after the bytes that it covers were copied out; read by the
 *               sender, acquire. Death before or after: the ring stays full or fills up, and the sender, waiting for
 *               room, finds the process gone.
 *   ring bytes  Written by the sender, plainly, before `head`; read by the receiver after it has acquired `head`. They
 *               are overwritten only after the sender has acquired a `tail` that covers them. Death: as for `head`.
 *   bell        Added to by any rank that moved bytes to or from its rank, and by its own threads, seq_cst; read and
 *               slept on by its rank, acquire. Death between moving bytes and ringing: the sleeper wakes at the end
 *               of its slice.
 *   listening   How many threads of its rank sleep on `bell`: added to and subtracted from by them, read by ranks that
 *               ring, all seq_cst. Death of the sleeping rank leaves it too high: as `sleepers`.
 */
#ifndef PHALANX_SEGMENT_H
#define PHALANX_SEGMENT_H

#include <stdatomic.h>
#include <stddef.h>

#include "phalanx.h"
#include "recorder/recordings.h"

#define PHX_LINE 64u  /* bytes of a cache line */
#define PHX_SLOTS 4u  /* slots of each rank */
#define PHX_MAX_RANKS 1024u

/* At the start of the segment. */
struct phx_header {
    uint64_t magic;
    uint32_t abi, size;
    uint64_t chunk_bytes, small_bytes, stream_bytes;
    uint8_t cookie[16];
    _Atomic uint32_t breaking, crossed;
    struct phx_breakage breakage;
};

/* One for each rank: what the others read in every collective, in one cache line. */
struct phx_flags {
    _Alignas(PHX_LINE) _Atomic uint64_t ready;
    _Atomic uint64_t done;
    uint64_t call[PHX_SLOTS];
    _Atomic uint32_t cpu;
    uint16_t line[PHX_SLOTS];
};

/* One for each rank: what is used only to sleep, to wake and to explain. */
struct phx_place {
    _Alignas(PHX_LINE) _Atomic uint32_t sleepers;
    _Alignas(PHX_LINE) _Atomic uint32_t bell, listening;
    _Alignas(PHX_LINE) uint32_t pid; /* as the rank's own /proc counts */
    int32_t fd;
    struct phx_recorder_file recorder;
    _Atomic uint32_t sees, going, described;
    char text[PHX_TEXT];
};

/* One for each ordered pair of ranks; the bytes of all rings follow after the last of these. */
struct phx_ring {
    _Alignas(PHX_LINE) _Atomic uint64_t head;
    _Alignas(PHX_LINE) _Atomic uint64_t tail;
};

/* The header that precedes the bytes of a message in a ring. */
struct phx_message_header {
    struct phx_end sent;
    uint32_t tag;
};

/* Where each part begins, in bytes from the start of the segment. */
struct phx_layout {
    uint64_t flags, places, slots, rings, ring_data, end;
};
struct phx_layout phx_layout_of(uint32_t size, uint64_t chunk_bytes);

/* How many bytes one ring of a group of `size` ranks holds. */
uint64_t phx_ring_bytes(uint32_t size);

/* Read the header of the file `fd`; 0 if that is a whole segment with this cookie, else -1 with errno set (EPROTO if it
 * is something else). */
int phx_segment_read(int fd, const uint8_t *cookie, struct phx_header *header);

#endif
