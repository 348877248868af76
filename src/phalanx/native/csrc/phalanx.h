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

#define PHX_ABI 1
#define PHX_API __attribute__((visibility("default")))

/* What a call returns. From PHX_MISMATCH on, the group is broken for good and phx_breakage tells why. */
enum phx_status {
    PHX_OK = 0,
    PHX_BAD_ARGUMENT = 1, /* a dtype, operation, rank or segment this core does not know */
    PHX_SYSTEM = 2,       /* a system call failed; errno has the reason */
    PHX_MISMATCH = 3,     /* two ranks called different collectives */
    PHX_PEER_LOST = 4,    /* a rank ended while another waited for it */
    PHX_TIMEOUT = 5,      /* a rank did not come in time */
    PHX_INTERRUPTED = 6,  /* the poll function asked a rank to stop */
};

enum phx_kind { PHX_ALL_REDUCE = 1, PHX_BROADCAST = 2, PHX_ALL_GATHER = 3, PHX_BARRIER = 4 };
enum phx_dtype { PHX_BYTES = 0, PHX_F32 = 1, PHX_F64 = 2, PHX_F16 = 3, PHX_BF16 = 4, PHX_I32 = 5, PHX_I64 = 6 };
enum phx_op { PHX_NO_OP = 0, PHX_SUM = 1 };

typedef struct phx_comm phx_comm;

/* One call as every rank publishes it, so that ranks can compare (see call.h for the packing). */
struct phx_call {
    uint32_t kind, dtype, op, root;
    uint64_t nbytes;
};

/* Why a group broke: what `rank` found, and about whom. */
struct phx_breakage {
    uint32_t status;     /* enum phx_status, or PHX_OK when the group is whole */
    uint32_t rank, peer; /* who noticed, and whom it was waiting for or compared with */
    uint32_t peer_pid;
    struct phx_call call, peer_call; /* peer_call only for PHX_MISMATCH */
};

/* Called while a rank waits, at most once per slice (50 ms) and after a signal; non-zero stops the wait. */
typedef int (*phx_poll)(void);

PHX_API uint32_t phx_abi(void);

/* How many bytes a segment for `size` ranks takes with slots of `chunk_bytes` (a multiple of 64). */
PHX_API uint64_t phx_segment_bytes(uint32_t size, uint64_t chunk_bytes);

/* Write the header into a fresh file of that size. `cookie` (16 bytes) is what attaching ranks check. */
PHX_API int phx_segment_format(int fd, uint32_t size, uint64_t chunk_bytes, const uint8_t *cookie);

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

/* out[i] = in_0[i] + in_1[i] + ... in rank order, on every rank; `in` may be `out`. */
PHX_API int phx_all_reduce(phx_comm *comm, const void *in, void *out, uint64_t count, uint32_t dtype, uint32_t op);

/* `data` of `root` into `data` of every other rank. */
PHX_API int phx_broadcast(phx_comm *comm, void *data, uint64_t nbytes, uint32_t root);

/* `in` of rank r into outs[r] on every rank; outs[own rank] may be `in`. */
PHX_API int phx_all_gather(phx_comm *comm, const void *in, void *const *outs, uint64_t nbytes);

/* Returns when every rank has called it. */
PHX_API int phx_barrier(phx_comm *comm);

#endif
