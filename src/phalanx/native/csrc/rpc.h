/* The functions of the core for RPC between processes of one host (rpc/links/shared.py): the contract with
 * native/core.py, like phalanx.h.
 *
 * A *hub* is a process's end of all its *links*; a link goes to one other process. A message is an *image*: one piece of
 * memory that begins with a phx_rpc_image, followed by the sizes of its buffers, the service's name, the head, and the
 * buffers. The core reads only the phx_rpc_image.
 *
 * Images up to PHX_RPC_SMALL go through the small lane, larger ones through the bulk lane. Each lane keeps its order, and
 * a small message overtakes large ones. No call sleeps longer than about PHX_RPC_NAP_NS: the caller asks again, so Python
 * handles signals between two calls. A forked child may call any of these with what it has inherited: nothing happens,
 * and the status is PHX_PEER_LOST.
 */
#ifndef PHALANX_RPC_H
#define PHALANX_RPC_H

#include "phalanx.h"

#define PHX_RPC_SMALL 126976u /* bytes of an image in the small lane: less than half of its ring */
#define PHX_RPC_NAP_NS 200000000ull

enum phx_rpc_kind { PHX_RPC_REQUEST = 1, PHX_RPC_ANSWER, PHX_RPC_FAILURE, PHX_RPC_NOTICE };
enum phx_rpc_lane { PHX_RPC_SMALL_LANE, PHX_RPC_BULK_LANE, PHX_RPC_LANES };

/* How a link ended. */
enum phx_rpc_end { PHX_RPC_OPEN, PHX_RPC_HERE, PHX_RPC_CLOSED, PHX_RPC_GONE, PHX_RPC_REPLACED, PHX_RPC_DAMAGED, PHX_RPC_NO_MEMORY };

struct phx_rpc_image {
    uint64_t call;
    uint32_t head_bytes;
    uint16_t service_bytes;
    uint8_t kind, unused;
    uint32_t buffers, padding;
    uint64_t nbytes; /* of the whole image */
};

#define PHX_RPC_OWN 0xffffffffu   /* the image lies in memory that the core has taken for it alone */
#define PHX_RPC_INLINE 0xfffffffeu /* the image follows in the box */

/* What a receiving thread gets. It is followed by room for PHX_RPC_SMALL bytes: a small message's whole image, or the
 * phx_rpc_image of a large one. */
struct phx_rpc_box {
    uint64_t link;            /* the handle of the link, as phx_rpc_accept() or phx_rpc_offer() returned it */
    uint64_t where, nbytes;   /* a large image */
    uint32_t block, sequence; /* to give it back with phx_rpc_release() */
    uint32_t lane;
    uint32_t ended;           /* nothing but news: the link has ended so (enum phx_rpc_end) */
    uint32_t idle;            /* how many other threads are in phx_rpc_next() */
    uint32_t unused[5];
};

typedef struct phx_rpc_hub phx_rpc_hub;
typedef struct phx_rpc_link phx_rpc_link;

/* Make this process's hub. `cookie` are 16 random bytes. NULL with errno set if there can be none. */
PHX_API phx_rpc_hub *phx_rpc_open(const uint8_t *cookie);
/* The descriptor under which other processes find the hub's place. */
PHX_API int phx_rpc_descriptor(phx_rpc_hub *hub);
/* End every link, and have every call that waits return PHX_PEER_LOST. The handle stays valid. */
PHX_API void phx_rpc_shut(phx_rpc_hub *hub);
/* Give the handle back. Its memory goes with its last link and its last received image. */
PHX_API void phx_rpc_close(phx_rpc_hub *hub);

/* Make a channel to another process, whose descriptor is put in `fd` for it to find; the caller closes that. */
PHX_API phx_rpc_link *phx_rpc_offer(phx_rpc_hub *hub, const uint8_t *cookie, uint64_t slab_bytes, int *fd);
/* Attach to a channel that the process `pid` has made. NULL with errno set if that cannot be. */
PHX_API phx_rpc_link *phx_rpc_accept(phx_rpc_hub *hub, uint32_t pid, int fd, const uint8_t *cookie, int place_fd,
                                     const uint8_t *place_cookie);
/* The other process has attached to a channel of this one. PHX_OK, or PHX_SYSTEM with errno set. */
PHX_API int phx_rpc_confirm(phx_rpc_link *link);
/* Receive from a link from now on. PHX_OK, or PHX_SYSTEM with errno set. */
PHX_API int phx_rpc_begin(phx_rpc_link *link);
/* End a link. What has been sent arrives; nothing is received any more. */
PHX_API void phx_rpc_end(phx_rpc_link *link);
/* Give the handle back. */
PHX_API void phx_rpc_drop(phx_rpc_link *link);
/* Why a link has ended (enum phx_rpc_end). */
PHX_API uint32_t phx_rpc_why(phx_rpc_link *link);
/* This process's pid, as those that accept its offers must be told it. */
PHX_API uint32_t phx_rpc_pid(void);
/* The other process's pid; how long ago its hub and its interpreter showed that they run. */
PHX_API uint32_t phx_rpc_facts(phx_rpc_link *link, uint64_t *alive_ns, uint64_t *python_ns);

/* Send a small image without waiting. PHX_OK; PHX_UNDER_WAY: there is no room; PHX_PEER_LOST: the link has ended. */
PHX_API int phx_rpc_send(phx_rpc_link *link, const void *image, uint64_t nbytes);
/* Put a large image, given in pieces, into the slab. A handle for phx_rpc_post(); 0: there is no room. */
PHX_API uint64_t phx_rpc_put(phx_rpc_link *link, uint32_t pieces, const void *const *data, const uint64_t *sizes);
/* Send what was put. One thread at a time, together with phx_rpc_stream(). If it is not PHX_OK, the caller may try again,
 * or take it back. */
PHX_API int phx_rpc_post(phx_rpc_link *link, uint64_t handle);
PHX_API void phx_rpc_take_back(phx_rpc_link *link, uint64_t handle);
/* Send as much of a large image as there is room for, from byte `*done` on, which is updated. PHX_OK: all is sent. */
PHX_API int phx_rpc_stream(phx_rpc_link *link, uint32_t pieces, const void *const *data, const uint64_t *sizes,
                           uint64_t *done);
/* How many bytes the other process has taken from the lane since it was made. */
PHX_API uint64_t phx_rpc_taken(phx_rpc_link *link, uint32_t lane);
/* Sleep until that is more than `taken`, as it was before a send that found no room, 50 ms at most. */
PHX_API void phx_rpc_wait_room(phx_rpc_link *link, uint32_t lane, uint64_t taken);

/* Receive one message. PHX_OK: there is one, or news, in the box; PHX_UNDER_WAY: nothing yet; PHX_PEER_LOST: the hub is
 * shut. After a request or a notice nobody receives the next one of its lane before phx_rpc_begun(). */
PHX_API int phx_rpc_next(phx_rpc_hub *hub, struct phx_rpc_box *box);
PHX_API void phx_rpc_begun(phx_rpc_link *link, uint32_t lane);
/* Receive the answer to one call, and hand everything else to others. PHX_UNDER_WAY also if phx_rpc_answered() was called
 * since *phx_rpc_answers() was `answers`: another thread may have delivered it. */
PHX_API int phx_rpc_await(phx_rpc_hub *hub, phx_rpc_link *link, uint64_t call, uint32_t answers,
                          struct phx_rpc_box *box);
PHX_API void phx_rpc_answered(phx_rpc_hub *hub);
PHX_API const void *phx_rpc_answers(phx_rpc_hub *hub);
/* Give a large image back. */
PHX_API void phx_rpc_release(phx_rpc_link *link, uint32_t block, uint32_t sequence, uint64_t where, uint64_t nbytes);

#endif
