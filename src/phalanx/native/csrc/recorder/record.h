/* The flight recorder of one process: its last PHX_RECORDS operations, in memory that outlives it.
 *
 * The memory is a part of a file without a name (memfd), which the process maps, and which another process may hold
 * (its launcher) or find through /proc. One process writes, with any number of threads; any process reads, at any time,
 * also when the writer is gone. Nothing here waits, and nothing is a system call but the clock (clock.h), which mostly
 * is none either.
 *
 * Operation n (n = 0, 1, ...) has the record n mod PHX_RECORDS. Its *tag* is the top bit and n below it.
 *
 * Every shared word: its writer, its readers, the memory order, and the state left behind if the writer dies right
 * before or right after the store.
 *
 *   magic, version, pid
 *               Written once by the process that opens the recorder, plainly; `magic` last, release, and read first,
 *               acquire. Death before: readers find no recorder. Death after: an empty one.
 *   size, rank, dtypes
 *               As the script joins a world, written by the thread that opens its group, once for each world: `dtypes`,
 *               release, behind the text that it names; then `rank` and `size`, relaxed. Read by all, on their own. Death
 *               in between: what is not known yet reads as not known, or as in the world before.
 *   next        How many operations have begun: added to by every thread that begins one, relaxed, which takes the
 *               record. Read by all, relaxed. Death before: nothing has happened. Death after: the record of that
 *               operation still is the one of PHX_RECORDS operations ago, whose number does not fit `next`; the
 *               readers show that one, or if it was never used nothing.
 *   word        2n + 1: operation n is being written; 2n + 2: it is there; 0: never used, or dropped. Exchanged for
 *               2n + 1 by the thread of operation n (compare-and-exchange, acquire) if it is even and smaller; a
 *               release fence keeps the fields' stores behind that. Then stored as 2n + 2, release. Read by all, acquire, before the
 *               fields, and again after them behind an acquire fence: a record counts if both are equal and even.
 *               Death before the exchange: as after `next`. Death between: readers leave the record out, and so does
 *               every later operation with that record leave it alone, if there is one (a thread that ends alone, by
 *               pthread_exit, does not end its process). Death after the second store: the operation is there.
 *               An operation that is dropped is exchanged for 0 (compare-and-exchange with 2n + 2, relaxed: nothing is
 *               told by it). Death before or after: it is there, or not.
 *   left        While operation n is under way its tag; then when it ended, in nanoseconds, times two, plus one if it
 *               failed. Written with the fields; then exchanged by the thread that ends the operation (compare-and-
 *               exchange with the tag, release), so that the end of an operation that lasts until its record is used
 *               again changes nothing. That thread reads `entered_ns` before, relaxed, so that no operation ends before it
 *               began; of another operation, it goes into an exchange that fails.
 *               Read by all, relaxed, between the reads of `word`: it may be the older of both.
 *               Death before: the operation is under way for ever. Death after: it has ended.
 *   awaits      The rank that the operation waits for at this moment, -1 for none that is known. Written with the
 *               fields, and then, relaxed, by the thread that is in the operation, only before it sleeps. Read by all,
 *               relaxed. A hint: it may be of the operation that has the record next, for one store. Neither death
 *               matters: it names the rank that was awaited last.
 *   the other fields of a record
 *               Written between the two stores of `word`, relaxed; read between the two loads, relaxed.
 *   step, label What the script has said last. Written by any thread of it, relaxed; read by all, relaxed, on their own.
 *   strings     Texts, each a length of four bytes and the bytes, one after the other, and before each the identity of
 *               the place that it names, of four bytes (0: none); records name them by where the length stands
 *               (recorder.py writes them, under a lock of its own). A text is written before any record names it,
 *               by the same thread or one that has passed that lock on, so the release of `word` covers it; a reader
 *               that has acquired `word` may read it. Death in the middle of one: no record names it.
 *   pieces      How many pieces of its call the group's thread has begun to take, in the upper half, and how many there are,
 *               in the lower; of the last call that had several. Stored by that thread, relaxed; read by all, relaxed, on
 *               its own. Death before or after: the call is as far as that.
 *   lost        How many operations have no record because theirs was being written: added to by their threads, relaxed.
 */
#ifndef PHALANX_RECORD_H
#define PHALANX_RECORD_H

#include <stdatomic.h>

#include "phalanx.h"
#include "recorder/recordings.h"

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

struct phx_record;

/* The record of the collective that this thread is in; NULL outside, and if it is not recorded. */
extern __thread __attribute__((tls_model("initial-exec"))) struct phx_record *phx_record_under_way;

/* Where this process keeps its recorder. */
struct phx_recorder_file phx_recorder_file(void);

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
