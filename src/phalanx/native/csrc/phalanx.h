/* The C core of Phalanx: collectives between processes of one host, through one shared segment.
 *
 * A segment is an anonymous file (memfd) that one rank makes and formats and every rank of a group maps. A
 * `phx_comm` is one rank's view of it. Each function below is called by every rank of the group, in the same
 * order, with matching arguments; one thread at a time per phx_comm. Ranks may be processes or threads.
 *
 * Everything blocks until this rank's part is done. Nothing here knows Python or torch; the one file that
 * knows these signatures is native/core.py, which compares PHX_ABI at load.
 */
#ifndef PHALANX_H
#define PHALANX_H

#include <stdint.h>

#define PHX_ABI 9
#define PHX_API __attribute__((visibility("default")))

/* What a call returns. From PHX_MISMATCH on, the group is broken for good and phx_breakage tells why. */
enum phx_status {
    PHX_NOTICE = -2,      /* of MPI: all have come, and somebody has told something (mpi_notices.py) */
    PHX_UNDER_WAY = -1,   /* of a message: neither done nor failed yet */
    PHX_OK = 0,
    PHX_BAD_ARGUMENT = 1, /* a dtype, operation, rank or segment this core does not know */
    PHX_SYSTEM = 2,       /* a system call failed; errno has the reason */
    PHX_MISMATCH = 3,     /* two ranks called different collectives */
    PHX_PEER_LOST = 4,    /* a rank ended while another waited for it */
    PHX_TIMEOUT = 5,      /* a rank did not come in time */
    PHX_INTERRUPTED = 6,  /* the poll function asked a rank to stop */
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

/* Why a group broke: what `rank` found, and about whom. */
struct phx_breakage {
    uint32_t status; /* enum phx_status, or PHX_OK when the group is whole */
    uint32_t rank, peer, peer_pid; /* who noticed, and whom it was waiting for or compared with; or PHX_NOBODY, if a
                                      rank that lives broke the group but has not written down why */
    uint64_t chunk;                /* of a mismatch: the chunk for which the calls differ */
};

/* Called while a rank waits, at most once per slice (50 ms) and after a signal; non-zero stops the wait. */
typedef int (*phx_poll)(void);

PHX_API uint32_t phx_abi(void);

/* Write the header into a fresh file of that size. `small_bytes`: reductions whose inputs add up to at most so much
 * take one synchronisation (see all_reduce.c). `stream_bytes`: outputs of at least so much are written past the caches
 * (see copy.h). `cookie` (16 bytes) is what attaching ranks check. */
PHX_API int phx_segment_format(int fd, uint32_t size, uint64_t chunk_bytes, uint64_t small_bytes,
                               uint64_t stream_bytes, const uint8_t *cookie);

/* Map a formatted segment as `rank`. Returns NULL with errno set, EPROTO when it is not the segment the
 * cookie belongs to. `spin` is how often a wait looks before it yields the core. */
PHX_API phx_comm *phx_open(int fd, uint32_t rank, const uint8_t *cookie, uint32_t spin, phx_poll poll);

/* Unmap. The file goes when the last rank has unmapped and closed it. */
PHX_API void phx_close(phx_comm *comm);

/* Break the group: calls under way on any rank end with PHX_INTERRUPTED. May be called by any thread. */
PHX_API void phx_abort(phx_comm *comm);

/* How long a call waits for another rank, in nanoseconds. */
PHX_API void phx_set_timeout(phx_comm *comm, uint64_t timeout_ns);

/* Fill `out` with the reason the group broke; returns its status. */
PHX_API int phx_breakage(const phx_comm *comm, struct phx_breakage *out);

/* The chunk this rank's last call began with: a mismatch at an earlier one concerns an earlier call. */
PHX_API uint64_t phx_call_chunk(const phx_comm *comm);

/* What a rank tells the others about itself once the group is broken; at most PHX_TEXT - 1 bytes. */
#define PHX_TEXT 376
PHX_API void phx_describe(phx_comm *comm, const char *text);

/* Copy what `rank` told into `out` (PHX_TEXT bytes); 0 if it has told nothing yet. */
PHX_API int phx_description(const phx_comm *comm, uint32_t rank, char *out);

/* Collectives. `shape` is a number that must be equal on all ranks, beside everything else that must. Data is
 * contiguous. Lists of blocks have one entry per rank. */

/* out[i] = in_0[i] op in_1[i] op ... in rank order, on every rank; `in` may be `out`. */
PHX_API int phx_all_reduce(phx_comm *comm, const void *in, void *out, uint64_t count, uint32_t dtype, uint32_t op,
                           uint64_t shape);

/* The same on `root` only; `out` is not touched elsewhere. */
PHX_API int phx_reduce(phx_comm *comm, const void *in, void *out, uint64_t count, uint32_t dtype, uint32_t op,
                       uint32_t root, uint64_t shape);

/* out = the reduction of every rank's ins[own rank], of `count` elements; `out` may be ins[own rank]. */
PHX_API int phx_reduce_scatter(phx_comm *comm, const void *const *ins, void *out, uint64_t count, uint32_t dtype,
                               uint32_t op, uint64_t shape);

/* `data` of `root` into `data` of every other rank. */
PHX_API int phx_broadcast(phx_comm *comm, void *data, uint64_t nbytes, uint32_t dtype, uint32_t root, uint64_t shape);

/* `in` of rank r into outs[r] on every rank; outs[own rank] may be `in`. */
PHX_API int phx_all_gather(phx_comm *comm, const void *in, void *const *outs, uint64_t nbytes, uint32_t dtype,
                           uint64_t shape);

/* The same on `root` only; `outs` is not read elsewhere. */
PHX_API int phx_gather(phx_comm *comm, const void *in, void *const *outs, uint64_t nbytes, uint32_t dtype,
                       uint32_t root, uint64_t shape);

/* ins[r] of `root` into `out` of rank r; `ins` is read on the root only. */
PHX_API int phx_scatter(phx_comm *comm, const void *const *ins, void *out, uint64_t nbytes, uint32_t dtype,
                        uint32_t root, uint64_t shape);

/* ins[r], of in_bytes[r], to rank r; outs[r], of out_bytes[r], from rank r. What one rank sends another must be what
 * that one expects. */
PHX_API int phx_all_to_all(phx_comm *comm, const void *const *ins, const uint64_t *in_bytes, void *const *outs,
                           const uint64_t *out_bytes, uint32_t dtype);

/* Returns when every rank has called it. */
PHX_API int phx_barrier(phx_comm *comm);

/* Point to point. Messages between two ranks with one tag arrive in the order they were sent. Any thread may call
 * these, also while another thread is in a collective of the group. */

#define PHX_ANY_SOURCE UINT32_MAX
typedef struct phx_message phx_message;

/* Start sending or receiving; the data must stay where it is until the message is done. Returns NULL without memory,
 * or for a rank that the group does not have; its own rank is a peer as any. */
PHX_API phx_message *phx_send(phx_comm *comm, const void *data, uint64_t nbytes, uint32_t dtype, uint32_t dst,
                              uint32_t tag);
PHX_API phx_message *phx_recv(phx_comm *comm, void *data, uint64_t nbytes, uint32_t dtype, uint32_t src, uint32_t tag);

/* Send at once, if nothing is waiting to be sent there and the ring has room for all of it: 1, and there is no message
 * to look after. Else do nothing: 0. What a short message usually takes. */
PHX_API int phx_send_now(phx_comm *comm, const void *data, uint64_t nbytes, uint32_t dtype, uint32_t dst, uint32_t tag);

/* The calls about one message are made by one thread at a time; those about two may overlap. */

/* Whether the message is done or the group broken, after moving along what can be moved now; never blocks. With `watch`
 * it also looks, once a slice, whether the peer has ended or the time that was expected of the message has passed. */
PHX_API int phx_message_test(phx_comm *comm, phx_message *message, int watch);

/* From now on the group's timeout counts for the message, as if somebody waited for it. */
PHX_API void phx_message_expect(phx_comm *comm, phx_message *message);

/* Wait until the message is done. With `timeout_ns` other than 0, PHX_UNDER_WAY after that long without harm to the
 * group; otherwise the group's own timeout, counted from the last byte that moved, which breaks it. */
PHX_API int phx_message_wait(phx_comm *comm, phx_message *message, uint64_t timeout_ns);

/* Move messages along until one is done, for a slice at most. `finished` is what the last call returned, at first 0: one
 * that was done since then counts. */
PHX_API uint64_t phx_messages_rest(phx_comm *comm, uint64_t finished);

/* Let no message move any more, and end every wait for one with PHX_UNDER_WAY. phx_close may follow when all threads have
 * come back; it frees the messages that are not done. */
PHX_API void phx_messages_end(phx_comm *comm);

/* Who sent what was received. */
PHX_API uint32_t phx_message_source(const phx_message *message);

/* Give the handle back. A message that is not done goes on by itself as long as anybody calls into the group. */
PHX_API void phx_message_free(phx_comm *comm, phx_message *message);

/* MPI's end with its process (mpi_end.c). */

/* MPI is under way in this process: its functions, and the communicator of the whole job. `abort` and
 * `finalize` may be NULL. */
PHX_API void phx_mpi_begin(void *abort, void *finalized, void *finalize, intptr_t comm);

/* MPI cannot be finalised any more, because something that others must answer was left unanswered: abort instead. */
PHX_API void phx_mpi_hopeless(void);

/* MPI has been finalised. */
PHX_API void phx_mpi_ended(void);

/* What mpi_meet.c knows of one group over MPI: words that are reduced to their minimum by a persistent request, MPI's
 * functions and handles. Filled in by transports/mpi/direct.py; `spins` tests come before PHX_UNDER_WAY. Notices come on
 * the communicator `world` with the tag `notice_tag`. */
typedef struct phx_mpi_group {
    int64_t own[2], common[2];
    uint64_t sequence; /* how many comparisons have begun */
    int (*start)(void *request);
    int (*test)(void *request, int *done, void *status);
    int (*all_reduce)(const void *send, void *receive, int count, intptr_t datatype, intptr_t op, intptr_t comm);
    int (*probe)(int source, int tag, intptr_t comm, int *flag, void *status);
    void *request, *in_place;
    intptr_t comm, world;
    int any_source, notice_tag;
    uint32_t spins;
    uint32_t looks; /* how often to probe for notices: MPICH looks first, and then for what is new */
    uint32_t under_way; /* an all_reduce has begun and has not come to its end: interrupting it breaks the group */
} phx_mpi_group;

/* Whether every rank calls the same: PHX_OK, PHX_MISMATCH, PHX_UNDER_WAY if somebody has not come yet (then the request
 * is to be tested further), PHX_NOTICE if one that came may have given up since, PHX_SYSTEM for an error of MPI's. */
PHX_API int phx_mpi_meet(phx_mpi_group *group, int64_t call);

/* One kind of all_reduce of a group, prepared when it is first called. Filled in by transports/mpi/direct.py. */
typedef struct phx_mpi_reduction {
    phx_mpi_group *group;
    int64_t call;
    intptr_t datatype, op;
    int count;
} phx_mpi_reduction;

/* phx_mpi_meet, and if that is PHX_OK the all_reduce of `data`, in place. `under_way` is cleared when it has ended; after
 * any other status the caller does that, at the end of the operation. */
PHX_API int phx_mpi_all_reduce(const phx_mpi_reduction *reduction, void *data);

/* For glibc's on_exit: end MPI by the process's exit code. */
PHX_API void phx_mpi_end(int code, void *unused);

#endif
