/* The C core of Phalanx: collectives of one host through a shared segment, and messages, to other hosts by TCP as well.
 *
 * A segment is an anonymous file (memfd) that one rank makes and formats, and that every rank of a group maps. A
 * `phx_comm` is one rank's view of it. Ranks may be processes or threads.
 *
 * A collective is called by every rank of the group, in the same order, with matching arguments, and by one thread of a
 * rank at a time. It returns when this rank's part is done: PHX_OK; PHX_BAD_ARGUMENT without having done anything; or,
 * from PHX_MISMATCH on, the reason why the group is broken. All data is contiguous.
 *
 * Folders, each of which includes only those before it:
 *   system       what the core asks of Linux: futexes, processes, copies of a process for its stacks
 *   recorder     the flight recorder: records of operations in memory that outlives the process
 *   segment      the shared memory of a group, and its state: who is there, why it broke, which calls match
 *   collectives  chunks, waits, the kernels that combine numbers, and a file for each collective
 *   messages     the mail of a rank, and what moves it: rings inside a host, connections to others
 *   rpc          links between two workers over shared memory
 *   mpi          the end of MPI with its process
 *
 * Nothing here knows Python or torch. Of Python's files only native/core.py knows these signatures; it compares PHX_ABI
 * when it loads the library.
 */
#ifndef PHALANX_H
#define PHALANX_H

#include <stdint.h>

#define PHX_ABI 39
#define PHX_API __attribute__((visibility("default")))

/* The status of a call. From PHX_MISMATCH on, the group is broken for good and phx_breakage() gives the reason. */
enum phx_status {
    PHX_UNMET = -9,       /* of a receive: it has waited, and no connection from another host could bring it */
    PHX_DIFFERS = -8,     /* of a message from another host: its two ends differ, as phx_message_ends() says */
    PHX_OVERDUE = -7,     /* of a message that ranks of other hosts take part in: its time is over */
    PHX_CUT = -6,         /* the same: the connection to its peer has ended, or cannot be made */
    PHX_CROSSED = -4,     /* the collective is done, and phx_crossing() tells of lines that may have been swapped */
    PHX_PEER_LEFT = -3,   /* of a message: its peer has left the group in order, or every rank that could send it has */
    PHX_UNDER_WAY = -1,   /* neither done nor failed yet */
    PHX_OK = 0,
    PHX_BAD_ARGUMENT = 1, /* a dtype, operation, rank or segment that this core does not know, or data at NULL */
    PHX_SYSTEM = 2,       /* a system call failed, and errno has the reason */
    PHX_MISMATCH = 3,     /* two ranks made different calls, or the two ends of a message differ */
    PHX_PEER_LOST = 4,    /* a rank went while another waited for it; phx_breakage() says how */
    PHX_TIMEOUT = 5,      /* a rank did not come in time */
    PHX_INTERRUPTED = 6,  /* the poll function asked a rank to stop, or phx_abort() was called */
};

enum phx_kind {
    PHX_ALL_REDUCE = 1,
    PHX_BROADCAST,
    PHX_ALL_GATHER,
    PHX_BARRIER,
    PHX_REDUCE,
    PHX_REDUCE_SCATTER,
    PHX_GATHER,
    PHX_SCATTER,
    PHX_ALL_TO_ALL,
    PHX_SEND, /* the messages come last: only the recorder distinguishes these */
    PHX_RECV,
    PHX_INIT, /* the wait for ranks that have not joined (recorder.py) */
};

enum phx_dtype {
    PHX_BYTES, /* copies only */
    PHX_F32,
    PHX_F64,
    PHX_F16,
    PHX_BF16,
    PHX_U8,
    PHX_U16,
    PHX_U32,
    PHX_U64,
    PHX_I8,
    PHX_I16,
    PHX_I32,
    PHX_I64,
    PHX_BOOL,
    PHX_DTYPES
};

enum phx_op { PHX_NO_OP, PHX_SUM, PHX_AVG, PHX_PRODUCT, PHX_MIN, PHX_MAX, PHX_BAND, PHX_BOR, PHX_BXOR, PHX_OPS };

typedef struct phx_comm phx_comm;

#define PHX_NOBODY UINT32_MAX

/* How a rank went. One that left in order takes no one with it: only an operation that needs it fails. */
enum phx_going {
    PHX_HERE,     /* it has not gone */
    PHX_LEFT,     /* it has closed its view of the group, or exited with code 0 */
    PHX_FAILED,   /* an exception has ended its script, or it exited with another code */
    PHX_ENDED,    /* its process is gone, and it has not said why */
    PHX_REPLACED, /* its process runs another program (exec) */
};

/* One end of a message. */
struct phx_end {
    uint64_t nbytes;
    uint32_t dtype; /* the caller's number for it */
    uint32_t site;  /* the line of the program that called, by its number in that rank's recorder; 0: not known */
};

/* Why a group broke: what one rank found, and about which other. */
struct phx_breakage {
    uint32_t status;         /* enum phx_status; PHX_OK if the group is whole */
    uint32_t rank;           /* the rank that broke the group */
    uint32_t peer, peer_pid; /* the rank that it waited for or compared itself with, or PHX_NOBODY */
    uint64_t chunk;          /* where the calls differ, if that is why; else where the call of `rank` began */
    uint32_t how;            /* enum phx_going: how `peer` went, if the status is PHX_PEER_LOST */
    uint32_t of_message;     /* with PHX_MISMATCH: whether a message's ends differ, which `peer` sent and `rank` received */
    struct phx_end sent, expected; /* and its ends */
};

/* Called while a rank waits, at most once per slice (50 ms) and after a signal; non-zero stops the wait. */
typedef int (*phx_poll)(void);

/* The PHX_ABI that the library was built with. */
PHX_API uint32_t phx_abi(void);

/* -- the group --------------------------------------------------------------------------------------------------- */

/* Make an empty file a segment of at most 1024 ranks, which these recognise by the 16 random bytes of the cookie.
 * Called by one rank, before the others open it. A slot has `chunk_bytes`: a multiple of 64, and at least 64 per rank.
 * Reductions whose inputs add up to at most `small_bytes` take one synchronisation (reductions.c); outputs of at least
 * `stream_bytes` are written past the caches (copy.h). Returns PHX_OK, PHX_BAD_ARGUMENT, or PHX_SYSTEM with errno
 * set. */
PHX_API int phx_segment_format(int fd, uint32_t size, uint64_t chunk_bytes, uint64_t small_bytes,
                               uint64_t stream_bytes, const uint8_t *cookie);

/* Map a formatted segment as one rank, once. A wait checks `spin` times for its peer before it yields the core; a wait
 * for a message sleeps at once if that is 0. `poll` may be NULL. Returns NULL with errno set: EPROTO if the file is not
 * the segment of this cookie. */
PHX_API phx_comm *phx_open(int fd, uint32_t rank, const uint8_t *cookie, uint32_t spin, phx_poll poll);

/* Look at the processes of all other ranks, once all have opened the segment and before any other call. */
PHX_API void phx_look(phx_comm *comm);

/* Return how `rank` stands to the group (enum phx_going), also once it is broken, and its pid. By any thread. */
PHX_API int phx_going(const phx_comm *comm, uint32_t rank, uint32_t *pid);

/* Compare this rank's last calls with those of the others before it closes the group, by a thread that is alone in it.
 * Waits at most `patience_ns`. Returns PHX_OK, also if some have ended before; PHX_UNDER_WAY if some are behind;
 * PHX_MISMATCH; or PHX_PEER_LOST if a rank has left without that call. */
PHX_API int phx_compare_rest(phx_comm *comm, uint64_t patience_ns);

/* The calls from now on are parts of one call of a larger group, and match only where `call` is equal. */
PHX_API void phx_begin_parts(phx_comm *comm, uint64_t call);

/* Where a chunk is: -1 before this rank's last call (with parts, the whole one), 0 in it, 1 after it or in the present
 * one. */
PHX_API int phx_beside_last_call(const phx_comm *comm, uint64_t chunk);

/* Tell the ranks of all groups that this process goes: its exit handlers are running, or an exception, in words, has
 * ended its script. A process that exits otherwise tells by itself, from its exit code. */
PHX_API void phx_process_leaves(void);
PHX_API void phx_process_fails(const char *text);

/* Tell the other ranks of one group that this rank is about to close it because of an exception, in words. */
PHX_API void phx_group_fails(phx_comm *comm, const char *text);

/* Tell the others that this rank leaves, unless it has told otherwise, and free all. No other thread may be in a
 * call. */
PHX_API void phx_close(phx_comm *comm);

/* Break the group, from any thread: calls under way on any rank end with PHX_INTERRUPTED. */
PHX_API void phx_abort(phx_comm *comm);

/* Set how long this rank waits in a collective, and for a message, before it breaks the group. At first there is no
 * limit. */
PHX_API void phx_set_timeout(phx_comm *comm, uint64_t timeout_ns, uint64_t message_timeout_ns);

/* Get the reason why the group broke; returns its status, or PHX_OK if the group is whole. */
PHX_API int phx_breakage(const phx_comm *comm, struct phx_breakage *out);

/* Publish what this rank was doing when the group broke, for the others' errors. Only a rank's first text counts. */
#define PHX_TEXT 376
PHX_API void phx_describe(phx_comm *comm, const char *text);

/* Copy the description of `rank` into `out` (PHX_TEXT bytes). Returns 0 if there is none yet. */
PHX_API int phx_description(const phx_comm *comm, uint32_t rank, char *out);

/* -- the order of lines (line_order.h) ----------------------------------------------------------------------------- */

/* Two lines of the program that this rank and another have both called, but not in the same calls. */
struct phx_crossing {
    uint32_t peer;
    uint32_t lines[2];  /* texts of this process's recorder: where this rank called each */
    uint32_t mine[2];   /* which collective of the group that was on this rank, counted from 1, for each line */
    uint32_t theirs[2]; /* and on the peer */
};

/* Compare the lines from which the ranks make the calls of this group: before the first collective, and until
 * `most_crossings` times PHX_CROSSED, since a program that takes turns between many lines finds the same ones again. */
PHX_API void phx_compare_lines(phx_comm *comm, uint32_t most_crossings);

/* Get what made a collective return PHX_CROSSED. By the thread that called it, before the group's next call. */
PHX_API void phx_crossing(const phx_comm *comm, struct phx_crossing *out);

/* 1 to the first rank of the group that asks, which then tells the user, and 0 to the others. */
PHX_API int phx_tells_crossing(phx_comm *comm);

/* Break the group with PHX_MISMATCH at the call that this rank has made last, because of what phx_crossing() said. */
PHX_API void phx_break_crossed(phx_comm *comm);

/* The lines of this rank and one other that have met in calls. Calls from equal lines need not be noted while `kept` is
 * 0. Only the thread that is in a collective uses it; all zero is a beginning. */
#define PHX_LINE_PAIRS 16u
struct phx_line_pairs {
    uint32_t kept; /* how many pairs there have been; the last PHX_LINE_PAIRS are here */
    uint32_t calm; /* how many calls in a row have met at the same line since the last of them */
    struct phx_line_pair {
        uint16_t mine, theirs;
        uint32_t line, in_group; /* as in struct phx_record_place */
    } pairs[PHX_LINE_PAIRS];     /* each a call in which the two were at different lines */
};

/* The line from which this thread's collective was called, in 16 bits, alike in every process; 0 if it is not known. */
PHX_API uint32_t phx_line_now(void);

/* Note that collectives of this rank and of one with which it shares no memory have met, from these lines; neither is 0.
 * PHX_OK, or PHX_CROSSED if two lines are crossed now, with all of `out` but the peer. */
PHX_API int phx_pairs_meet(struct phx_line_pairs *pairs, uint32_t mine, uint32_t theirs, struct phx_crossing *out);

/* -- collectives -------------------------------------------------------------------------------------------------- */

/* Arguments that several of them have:
 *   in, out, data  this rank's input, output, or both
 *   ins, outs      one address for each rank of the group
 *   count, nbytes  length of one input: in elements where numbers are combined, else in bytes
 *   dtype, op      enum phx_dtype, enum phx_op
 *   root           group rank of the one that has, or gets, the data
 *   shape          a number that must be equal on all ranks that do not give 0; count or nbytes, dtype, op and root must
 *                  be equal on all
 * An address may be NULL only if the call moves no bytes there: PHX_BAD_ARGUMENT.
 * docs/algorithms.md has what each costs, and its file how it works. */

/* Combine inputs of this process, as the collectives combine those of the ranks: out[i] = ins[0][i] op ins[1][i] op ...
 * `out` overlaps no input. Returns PHX_OK or PHX_BAD_ARGUMENT. */
PHX_API int phx_combine(const void *const *ins, uint32_t nins, void *out, uint64_t count, uint32_t dtype, uint32_t op);

/* Combine: out[i] = in_0[i] op in_1[i] op ..., in rank order, on every rank. `out` may be `in`. */
PHX_API int phx_all_reduce(phx_comm *comm, const void *in, void *out, uint64_t count, uint32_t dtype, uint32_t op,
                           uint64_t shape);

/* The same on the root only; elsewhere `out` is neither read nor written. */
PHX_API int phx_reduce(phx_comm *comm, const void *in, void *out, uint64_t count, uint32_t dtype, uint32_t op,
                       uint32_t root, uint64_t shape);

/* Combine every rank's ins[r], of `count` elements, into `out` of rank r. `out` may be this rank's own ins[r]. */
PHX_API int phx_reduce_scatter(phx_comm *comm, const void *const *ins, void *out, uint64_t count, uint32_t dtype,
                               uint32_t op, uint64_t shape);

/* Let all_reduce take tensors in this memory where they lie, without a copy. Every rank has mapped the same memory,
 * calls this at the same point, and keeps it mapped until phx_close(). */
PHX_API int phx_share_memory(phx_comm *comm, const void *base, uint64_t nbytes);

/* Copy `data` of the root into `data` of every other rank. The root does not wait for them. */
PHX_API int phx_broadcast(phx_comm *comm, void *data, uint64_t nbytes, uint32_t dtype, uint32_t root, uint64_t shape);

/* Copy `in` of rank r into outs[r] of every rank. This rank's own outs[r] may be `in`. */
PHX_API int phx_all_gather(phx_comm *comm, const void *in, void *const *outs, uint64_t nbytes, uint32_t dtype,
                           uint64_t shape);

/* The same on the root only; elsewhere `outs` is not read. The others do not wait. */
PHX_API int phx_gather(phx_comm *comm, const void *in, void *const *outs, uint64_t nbytes, uint32_t dtype,
                       uint32_t root, uint64_t shape);

/* Copy ins[r] of the root into `out` of rank r; elsewhere `ins` is not read. The root does not wait for the others. */
PHX_API int phx_scatter(phx_comm *comm, const void *const *ins, void *out, uint64_t nbytes, uint32_t dtype,
                        uint32_t root, uint64_t shape);

/* Copy ins[r], of in_bytes[r], to rank r, and into outs[r], of out_bytes[r], what rank r sends: exactly as many
 * bytes. */
PHX_API int phx_all_to_all(phx_comm *comm, const void *const *ins, const uint64_t *in_bytes, void *const *outs,
                           const uint64_t *out_bytes, uint32_t dtype);

/* Wait until every rank has called it. */
PHX_API int phx_barrier(phx_comm *comm);

/* -- messages ------------------------------------------------------------------------------------------------------ */

/* Messages between two ranks with one tag arrive in the order in which they were sent. Any thread may call these, also
 * while another is in a collective of the group; calls about one message are made by one thread at a time. */

#define PHX_ANY_SOURCE UINT32_MAX
typedef struct phx_message phx_message;
#define PHX_SENT ((phx_message *)1) /* a message that was done as soon as it was sent: there is no handle of it */

/* Start to send to the group rank `dst`, or to receive from `src` (or PHX_ANY_SOURCE). If the ends do not agree, but
 * for their sites, the group breaks with PHX_MISMATCH. The data must stay where it is until the message is done. A rank
 * may be its own peer. Returns PHX_SENT, a handle, or NULL if there is no memory or no such rank, or if the data is at
 * NULL. */
PHX_API phx_message *phx_send(phx_comm *comm, const void *data, const struct phx_end *sent, uint32_t dst, uint32_t tag);
PHX_API phx_message *phx_recv(phx_comm *comm, void *data, const struct phx_end *expected, uint32_t src, uint32_t tag);

/* Send at once to a rank of this host if nothing waits to be sent there and there is room for all of it: 1. Else do
 * nothing: 0. */
PHX_API int phx_send_now(phx_comm *comm, const void *data, const struct phx_end *sent, uint32_t dst, uint32_t tag);

/* Move what can be moved now; 1 if the message is done or the group broken, else 0. Never blocks. With `watch` it also
 * checks, once a slice, that the peer lives and that the message's timeout has not passed, and else breaks the group;
 * then it returns PHX_UNMET for a receive that no connection could bring. */
PHX_API int phx_message_test(phx_comm *comm, phx_message *message, int watch);

/* Start the group's timeout for this message, as if a thread waited for it. */
PHX_API void phx_message_expect(phx_comm *comm, phx_message *message);

/* Wait until the message is done; returns its status. After `timeout_ns`, unless it is 0, it returns PHX_UNDER_WAY.
 * With 0 the group's own timeout, counted from the last byte that moved, breaks the group. */
PHX_API int phx_message_wait(phx_comm *comm, phx_message *message, uint64_t timeout_ns);

/* Move messages until one is done, for a slice at most. Returns how many have been done so far; `finished` is what the
 * last call returned, at first 0. */
PHX_API uint64_t phx_messages_rest(phx_comm *comm, uint64_t finished);

/* Let no message move any more, and end every wait for one with PHX_UNDER_WAY. With `in_order` the ranks of other hosts
 * are told that this one has left. */
PHX_API void phx_messages_end(phx_comm *comm, int in_order);

/* The group rank that sent what was received. */
PHX_API uint32_t phx_message_source(const phx_message *message);

/* Give the handle back. A message that is not done goes on as long as any thread of the rank calls into the group. */
PHX_API void phx_message_free(phx_comm *comm, phx_message *message);

/* Messages with ranks of other hosts. The status of such a message is its own, and the group stays whole:
 * PHX_PEER_LEFT, PHX_CUT, PHX_OVERDUE or PHX_DIFFERS. */

#define PHX_LINE_BYTES 256u /* of the line of a program, with its end */

/* Have messages number ranks as a group of `size` ranks does, whose ranks on this host are `here`. Before the first
 * one. */
PHX_API int phx_messages_join(phx_comm *comm, uint32_t size, const int32_t *here);

/* Use a connected socket for messages from a rank (`incoming`), or to it. With PHX_OK the core closes it in the end; it
 * is refused with PHX_BAD_ARGUMENT when messages have been ended. phx_messages_refused(): there can be no socket to the
 * rank, and whether that is because it has left. */
PHX_API int phx_messages_connect(phx_comm *comm, uint32_t rank, int socket, int incoming);
PHX_API void phx_messages_refused(phx_comm *comm, uint32_t rank, int left);

/* Return whether messages can come from a rank, or with 0 for `receiving` go there: it is on this host, or connected. */
PHX_API int phx_messages_met(phx_comm *comm, uint32_t rank, int receiving);

/* End the connections, without a word. */
PHX_API void phx_messages_cut(phx_comm *comm);

/* Add 1 to those of `ranks` that are on another host and with which a thread waits for a message. Get one message that
 * is under way, rather one that is waited for, and rather with a rank that had 2; returns 0 if there is none. */
struct phx_message_seen {
    struct phx_end end;
    uint32_t peer;
    uint32_t receiving;
};
PHX_API int phx_messages_waiting(phx_comm *comm, uint8_t *ranks, struct phx_message_seen *out);

/* Get both ends of a message with PHX_DIFFERS; returns the sender's line, which is good as long as the message. */
PHX_API const char *phx_message_ends(const phx_message *message, struct phx_end *sent, struct phx_end *expected);

/* -- the flight recorder (record.h has the protocol) ------------------------------------------------------------------- */

#define PHX_RECORDS 4096u
#define PHX_RECORDS_AT 4096u
#define PHX_STRINGS_AT (PHX_RECORDS_AT + PHX_RECORDS * 64u)
#define PHX_STRINGS 262144u
#define PHX_RECORDER_BYTES (PHX_STRINGS_AT + PHX_STRINGS)

/* A group as its process records it: its name, and how many operations of it have begun here. */
struct phx_record_group {
    uint32_t name; /* a text of the recorder's */
    uint32_t pad;
    _Atomic uint32_t collectives, messages;
};

/* A record as a reader gets it. */
struct phx_record_seen {
    uint64_t number, entered_ns, left_ns, nbytes; /* `left_ns`: 0 while the operation is under way */
    uint32_t in_group, what, group, site, label;
    int32_t peer, awaits, step;
    uint32_t failed;
    uint32_t shape; /* a text; 0: not recorded */
};

/* Map PHX_RECORDER_BYTES of `fd` from `offset` on and record this process's operations there, not those of a forked
 * child. Returns the memory, which stays mapped, or NULL with errno. `rank` is -1 if it is not known. */
PHX_API void *phx_recorder_open(int fd, uint64_t offset, uint32_t pid, int32_t rank, uint32_t size);

/* Note where the text with the dtypes' names is, and this process's rank, once they are known. */
PHX_API void phx_recorder_names(uint32_t dtypes, int32_t rank, uint32_t size);

/* Note the step (-1: none) and the label (a text, 0: none) of the operations that begin from now on. */
PHX_API void phx_recorder_mark(int32_t step, uint32_t label);

/* Record that an operation begins. `what` is an enum phx_kind, plus a dtype << 8, plus an enum phx_op << 16. The bits
 * of `nbytes` from PHX_NBYTES_BITS on are the tensor's shape, a text, or 0. Returns a ticket for phx_record_end(),
 * which any thread may call; 0 if nothing is recorded, which that takes too. */
#define PHX_NBYTES_BITS 44
PHX_API uint64_t phx_record_begin(struct phx_record_group *group, uint32_t what, uint64_t nbytes, uint32_t site,
                                  int32_t peer);
/* The same for a collective that has begun before. It is not counted: it gets the number of the group's next one. With
 * PHX_FOUND_LATE in `what`, another rank may be in the same collective without a record. */
#define PHX_FOUND_LATE (1u << 24)
PHX_API uint64_t phx_record_begin_at(struct phx_record_group *group, uint32_t what, uint64_t nbytes, uint32_t site,
                                     int32_t peer, uint64_t entered_ns);
/* Take back a record, on the thread that began it. */
PHX_API void phx_record_drop(uint64_t ticket);
PHX_API void phx_record_end(uint64_t ticket, int failed);

/* Give the ranks of a group that is a part of another one the numbers that they have there. Before the first call;
 * `names` must stay as long as the group. */
PHX_API void phx_name_ranks(phx_comm *comm, const int32_t *names);

/* Note whom the collective that this thread is in waits for, and how many of its pieces it has moved. */
PHX_API void phx_record_awaits(int32_t rank);
PHX_API void phx_record_piece(uint64_t done, uint64_t of);

/* The recorder of another rank, which may be gone; NULL if it cannot be read. Good until phx_close(). */
PHX_API const char *phx_recorder_of(const phx_comm *comm, uint32_t rank);

/* Copy those records of a recorder's memory that are of operation `first` or a later one to `out`, which has room for
 * PHX_RECORDS, in no order. Returns how many there are, and in `next` how many operations have begun. */
PHX_API uint32_t phx_records_read(const char *memory, uint64_t first, struct phx_record_seen *out, uint64_t *next);

/* -- stacks on demand (stacks.py) ---------------------------------------------------------------------------------- */

/* What stands behind the beginning of a stack that could not be written, as a rule because it was being changed. */
#define PHX_STACK_CHANGED "  (it was being changed)"

/* Have this signal's handler, which writes to `fd` the stack of the thread that gets the signal, do so in a copy of the
 * process if that thread is in the interpreter, of which `in_interpreter` is any function. That costs a fork(). Returns
 * PHX_BAD_ARGUMENT if there is no such handler. */
PHX_API int phx_stacks_in_copy(int number, int fd, void *in_interpreter);

/* -- the end of MPI with its process: MPI's functions come as pointers, since the core is built without MPI ------------ */

/* Have MPI ended by these functions of MPI when the process exits; once in a process. `abort` is NULL if no other rank
 * waits, `finalize` if the script ends MPI itself; `comm` is the communicator of the whole job. */
PHX_API void phx_mpi_begin(void *abort, void *finalized, void *finalize, intptr_t comm);

/* Say what is known before the exit code is. With `must_abort` MPI is aborted even after success, because it cannot be
 * finalised. */
PHX_API void phx_mpi_prepare(int must_abort);

/* End MPI by the process's exit code, unless it has been finalised. glibc calls it, by on_exit(). */
PHX_API void phx_mpi_end(int code, void *unused);

/* -- tracing ------------------------------------------------------------------------------------------------------ */

enum phx_traced {
    PHX_PUT = 1,  /* copied into a slot of the segment, or a sum left there */
    PHX_TAKEN,    /* copied out of a slot */
    PHX_ADDED,    /* read in a slot by a reduction */
    PHX_COMBINED, /* added up by phx_combine(): `at` is how many inputs it had */
    PHX_RAISED,   /* a barrier's counter of this rank raised */
    PHX_SAW,      /* that of the rank `at` seen raised */
};

/* Called right after what it tells. `at` is where the bytes lie, from the first slot on; `data` is their address. */
typedef void (*phx_tracer_fn)(uint32_t what, uint64_t at, const void *data, uint64_t nbytes);

/* Have this process's collectives tell what they move; NULL ends that. No collective may be under way. */
PHX_API void phx_trace(phx_tracer_fn tracer);

#endif
