/* The flight recorder of one process: its last PHX_RECORDS operations, in memory that outlives it.
 *
 * The memory is a part of a file without a name (memfd), which the process maps, and which another process may hold
 * (its launcher) or find through /proc. One process writes, with any number of threads; any process reads, at any time,
 * also when the writer is gone. Nothing here waits.
 *
 * Operation n (n = 0, 1, ...) has the record n mod PHX_RECORDS. Its *tag* is the top bit and n below it.
 *
 * Every shared word, its writer, its readers, the memory order, and what is left if the writer dies right before or after:
 *
 * word        writer, order              readers, order            if the writer dies
 * magic,      who opens the recorder,    all; `magic` first,       before: there is no recorder; after: an empty one
 * version, pid once; `magic` last, release acquire
 * dtypes,     who opens the world's      all, relaxed, each on     in between: not known yet, or as in the world before
 * rank, size  group; `dtypes` release,   its own
 *             behind its text
 * next        who begins an operation,   all, relaxed              after: the record is still that of PHX_RECORDS
 *             by adding, relaxed                                   operations ago, and readers show that one
 * word        2n+1: n is being written (exchanged, acquire, if it is even and smaller; then a release fence);
 *             2n+2: it is there (release); 0: unused, or dropped (exchanged for 2n+2, relaxed)
 *             its operation's thread     all, acquire, before and  at 2n+1: readers and later operations leave the record
 *                                        after the fields: both    alone
 *                                        equal and even
 * left        with the fields: the tag. At the end, by whichever   before: under way for ever; after: it has ended
 *             thread ends it: 2 * ns + failed, exchanged for the
 *             tag, release; read by all, relaxed, with the fields
 * awaits      with the fields; then its  all, relaxed, a hint: it  it names the rank that was awaited last
 *             thread before it sleeps,   may be of the next
 *             relaxed                    operation for one store
 * other fields between the stores of     all, between the loads    as `word`
 *             `word`, relaxed            of `word`, relaxed
 * step, label, any thread, relaxed       all, relaxed, each on     as far as it had come
 * pieces, lost                           its own
 * strings     recorder.py, under its     all, after acquiring the  in the middle: no record names the text
 *             lock, before a record      `word` of a record that
 *             names the text             names it
 *
 * A text is a length of four bytes and the bytes; before it stands the identity of the place that it names, of four bytes
 * (0: none). `pieces` has in its upper half how many pieces of its last call the group's thread has begun to take, and in
 * the lower how many there are. */
#ifndef PHALANX_RECORD_H
#define PHALANX_RECORD_H

#include <stdatomic.h>

#include "phalanx.h"

#define PHX_RECORDER_MAGIC 0x31636552786c6850ull /* "PhlxRec1" */

struct phx_recorder_header {
    _Atomic uint64_t magic;
    uint32_t version;
    _Atomic uint32_t size; /* of the world; 0 if it is not known */
    uint32_t pid;
    _Atomic int32_t rank;    /* in the world; -1 if it is not known */
    _Atomic uint32_t dtypes; /* a text: the names of the core's dtype numbers */
    _Atomic int32_t step;
    _Atomic uint32_t label;
    _Alignas(64) _Atomic uint64_t next;
    _Atomic uint64_t lost, pieces;
};

/* Where the collective that this thread is in was called, and what it is. */
struct phx_record_place {
    uint32_t line;     /* a text of the recorder's; 0: not known */
    uint32_t identity; /* of that place in the program: equal in every process that runs this program (recorder.py) */
    uint32_t in_group; /* which collective of its group it is */
    uint32_t what;     /* as in struct phx_record */
    int32_t peer;
};

struct phx_record_place phx_record_place(void);

/* Where a process keeps its recorder.
 *   fd             its descriptor of the file, -1 without a recorder
 *   at             where in the file the recorder begins
 *   device, inode  which file that is: the program may close the descriptor, and its number may become another file's
 */
struct phx_recorder_file {
    int32_t fd;
    uint64_t at, device, inode;
};

/* Copy a text of this process's recorder, without an end; returns its length, 0 if it is not known or has no room. */
uint32_t phx_record_text(uint32_t number, char *out, uint32_t room);

/* Where this process keeps its own. */
struct phx_recorder_file phx_recorder_file(void);

/* Map that of a living process, to read it when the process is gone. NULL if it cannot be mapped, or the descriptor is
 * another file's by now. The caller unmaps PHX_RECORDER_BYTES. */
const char *phx_recorder_map(uint32_t pid, const struct phx_recorder_file *place);

struct phx_record {
    _Alignas(64) _Atomic uint64_t word;
    _Atomic uint64_t left, entered_ns;
    _Atomic uint64_t nbytes;   /* and from PHX_NBYTES_BITS on the shape, a text: no tensor has so many bytes */
    _Atomic uint32_t in_group; /* which collective of the group, or which message, counted from 1 */
    _Atomic uint32_t what;     /* kind, dtype and operation, a byte each, from the lowest; PHX_FOUND_LATE */
    _Atomic uint32_t group, site, label; /* texts */
    _Atomic int32_t peer;      /* the root, or the other end of a message; -1 for none or any */
    _Atomic int32_t awaits;
    _Atomic int32_t step;      /* -1: the script has said none */
};
_Static_assert(sizeof(struct phx_record) == 64, "a record is one cache line");
_Static_assert(PHX_STRINGS <= 1ull << (64 - PHX_NBYTES_BITS), "a text's number has room above the bytes");
_Static_assert(sizeof(struct phx_recorder_header) <= PHX_RECORDS_AT, "the records begin behind the header");

#endif
