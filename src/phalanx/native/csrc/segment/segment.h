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
 * Every shared word: its writer, its readers, the memory order (wr/rd), and what is left if the writer dies right before
 * or after the store. "Found gone" means: who waits for the writer looks at its process once a slice, and breaks the group.
 * Each place, each rank's flags and each counter of a ring has cache lines of its own.
 *
 * word        writer, order              readers, order           if the writer dies
 * magic .. cookie
 *             who makes the file, before each rank as it opens    before: the file has the wrong size, nobody opens it;
 *             anybody can open it        the segment              after: it is complete
 * pid, image, the rank as it opens the   all, once they have met  before: the ranks do not finish meeting; after: found
 * recorder    segment                    through the store        gone. The program may close the recorder's
 *                                                                 descriptor, so readers compare
 * going       the rank as it goes,       who waits, once a slice, before: found gone, and nobody knows how it went;
 *             release; it lowers it only acquire                  after: the others know, and have all that it sent
 *             to open the segment again
 * ready, done the rank, seq_cst: not to  all, acquire             before: found gone; after: its data is used, and the
 *             pass the load of sleepers                           next wait for it finds it gone
 * call[],     the rank, plain, before    all, after acquiring     before: nobody reads them; after `ready`: compared as
 * line[]      `ready`. line 0: unknown,  `ready`, at most two     usual
 *             or not a first chunk       chunks later
 * tensor[]    as call[]: where the rank's tensor  as call[]; the last chunk says    as slots, in whose place the tensor is
 *             lies, 0 if it is in its slots      that nobody reads it any more
 * cpu         the rank as it raises a    all, relaxed             a hint where it ran last
 *             counter or bell, relaxed
 * slots       the rank (in a scatter the all, after acquiring     before: `ready` is not raised, nobody reads the slot;
 *             root) before `ready`; the  that counter             after: as `ready`
 *             reduced slice before `done`
 * sleepers,   added to by who sleeps     who raises or rings,     too high from then on: each raise makes one needless
 * listening   there, seq_cst             seq_cst                  system call
 * breakage    the rank, before it        all, once `breaking`     as `breaking`. Sites in it name texts of recorders,
 *             offers it in `breaking`    names that rank, acquire which were written before `breaking` or `head`
 * breaking    the first to break the     all, acquire             before: the next to notice breaks the group; after:
 *             group: 0 -> rank + 1,                               sleepers wake at the end of their slice
 *             by exchange
 * described   a thread of the rank:      all, acquire             before 2: the others' errors lack this rank's text
 *             0 -> 1 by exchange, 1 -> 2 release
 * text        that thread, in between    all, once described is 2 as `described`
 * crossed     0 -> 1 by exchange, by the first rank that finds    after: nobody tells the user of it
 *             lines crossed; read by nobody else
 * head        the sender, release, after the receiver, acquire    before: the bytes are not seen; after, in the middle of
 *             the bytes                                           a message: the receiver takes them and finds it gone
 * tail        the receiver, release,     the sender, acquire      the ring fills up, and the sender finds it gone
 *             after it has copied them
 * ring bytes  the sender, before `head`, the receiver, after      as `head`
 *             once `tail` covers the old acquiring `head`
 * bell        added to, seq_cst, by who moved bytes to or from    between moving and ringing: the sleeper wakes at the
 *             its rank; read and slept on by its rank, acquire    end of its slice
 */
#ifndef PHALANX_SEGMENT_H
#define PHALANX_SEGMENT_H

#include <stdatomic.h>
#include <stddef.h>

#include "phalanx.h"
#include "recorder/record.h"

#define PHX_LINE 64u  /* bytes of a cache line */
#define PHX_SLOTS 4u  /* slots of each rank */
#define PHX_MAX_RANKS 1024u
#define PHX_OFFSET_BITS 48u /* of a word of tensor[]: the offset; above them the number of the memory, from 1 on */

/* At the start of the segment. */
struct phx_header {
    uint64_t magic;
    uint32_t abi, size;
    uint64_t chunk_bytes, small_bytes, stream_bytes;
    uint8_t cookie[16];
    _Atomic uint32_t breaking, crossed;
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
    _Alignas(PHX_LINE) uint64_t tensor[PHX_SLOTS];
    _Alignas(PHX_LINE) uint32_t pid; /* as the rank's own /proc counts */
    uint64_t image;                  /* of the program that opened the segment: system/process.h */
    struct phx_recorder_file recorder;
    struct phx_breakage breakage;
    _Atomic uint32_t going, described;
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

/* Return how many bytes one ring of a group of `size` ranks holds. */
uint64_t phx_ring_bytes(uint32_t size);

/* Read the header of the file `fd`; 0 if that is a whole segment with this cookie, else -1 with errno set (EPROTO if it
 * is something else). */
int phx_segment_read(int fd, const uint8_t *cookie, struct phx_header *header);

#endif
