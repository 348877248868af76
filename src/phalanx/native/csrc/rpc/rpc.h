/* The functions of the core for RPC between processes of one host, called by rpc/links/shared.py. In this folder channel.h
 * is the shared memory, on which stand memory.h and ring.h; on these hub.h, the private side; on that send.c and receive.c.
 *
 * A *hub* is a process's end of all its *links*; a link goes to one other process. A message is an *image*: one piece of
 * memory that begins with a phx_rpc_image, which is all that the core reads (rpc/links/shared.py has the rest). Images arrive
 * in the order in which they are sent. A large one is copied first to where its receivers read it (phx_rpc_share).
 *
 * No call sleeps longer than about PHX_RPC_NAP_NS, so that Python can handle signals between two calls: a function
 * that waits returns PHX_UNDER_WAY if there is nothing yet, and its caller calls it again. In a forked child, every
 * function leaves what the parent has alone, and those that return a status return PHX_PEER_LOST.
 */
#ifndef PHALANX_RPC_H
#define PHALANX_RPC_H

#include <stdatomic.h>

#include "phalanx.h"

#define PHX_RPC_SMALL 126976u /* bytes of an image that goes through the ring: less than half of it */
#define PHX_RPC_NAP_NS 200000000ull

enum phx_rpc_kind { PHX_RPC_REQUEST = 1, PHX_RPC_ANSWER, PHX_RPC_FAILURE, PHX_RPC_NOTICE };

/* How a link ended. */
enum phx_rpc_end {
    PHX_RPC_OPEN,      /* it has not */
    PHX_RPC_HERE,      /* this process called phx_rpc_end() */
    PHX_RPC_CLOSED,    /* the other one did */
    PHX_RPC_GONE,      /* the other process has died */
    PHX_RPC_REPLACED,  /* the other process runs another program now */
    PHX_RPC_GAVE_UP,   /* the other process found one of the following */
    PHX_RPC_DAMAGED,   /* the shared memory holds something that no sender writes; from here on, nothing more is received */
    PHX_RPC_NO_MEMORY, /* the system has no memory left for a message */
};

struct phx_rpc_image {
    uint64_t call;
    uint32_t head_bytes;
    uint16_t service_bytes;
    uint8_t kind, unused;
    uint32_t buffers, padding;
    uint64_t nbytes; /* of the whole image */
};

#define PHX_RPC_INLINE 0xfffffffeu /* the image follows in the box */
#define PHX_RPC_COPY 0x40000000u    /* in a block's number: copy the image, and release it at once */
#define PHX_RPC_SEVERAL 0x80000000u /* the same: other processes read the image as well */

/* What a thread gets from phx_rpc_next() or phx_rpc_await(): a message, or the news that a link has ended. It is
 * followed by room for PHX_RPC_SMALL bytes, which receive the whole image of a small message, or the phx_rpc_image of
 * a large one. */
struct phx_rpc_box {
    uint64_t link;            /* the handle of the link, as phx_rpc_accept() or phx_rpc_offer() returned it */
    uint64_t where, nbytes;   /* the image: its address, if it is large, and its size */
    uint32_t block, sequence; /* what phx_rpc_release() needs; or PHX_RPC_INLINE */
    uint32_t ended;           /* 0 for a message; else there is none, and the link has ended (enum phx_rpc_end) */
    uint32_t idle;            /* how many other threads are in phx_rpc_next() */
    uint32_t taken;           /* how often something was put into this box; callers compare it and do not change it */
    uint32_t unused[5];
};

typedef struct phx_rpc_hub phx_rpc_hub;
typedef struct phx_rpc_link phx_rpc_link;

/* Make this process's hub. `cookie` is 16 random bytes; `slab_bytes` is the size of the slab for large images.
 * Returns NULL with errno set if it cannot be made. */
PHX_API phx_rpc_hub *phx_rpc_open(const uint8_t *cookie, uint64_t slab_bytes);
/* The descriptor under which other processes find the hub's place. */
PHX_API int phx_rpc_descriptor(phx_rpc_hub *hub);
/* End every link, and have every call that waits return PHX_PEER_LOST. The handle stays valid. */
PHX_API void phx_rpc_shut(phx_rpc_hub *hub);
/* Give the handle back. The hub's memory is freed when its last link and its last received image are gone, too. */
PHX_API void phx_rpc_close(phx_rpc_hub *hub);

/* Make a channel to another process. `fd` receives its descriptor, which the other process opens through /proc, and
 * which the caller closes after that. Returns NULL with errno set if it cannot be made. */
PHX_API phx_rpc_link *phx_rpc_offer(phx_rpc_hub *hub, const uint8_t *cookie, int *fd);
/* Attach to a channel that the process `pid` has made: `fd` and `place_fd` are descriptors of that process, of its
 * channel and its hub's place. Returns NULL with errno set if one of them cannot be opened or has another cookie. */
PHX_API phx_rpc_link *phx_rpc_accept(phx_rpc_hub *hub, uint32_t pid, int fd, const uint8_t *cookie, int place_fd,
                                     const uint8_t *place_cookie);
/* Attach to the other process, after it has attached to a channel of this one. Returns PHX_OK, or PHX_SYSTEM with errno
 * set. */
PHX_API int phx_rpc_confirm(phx_rpc_link *link);
/* Receive from a link from now on. Returns PHX_OK, or PHX_SYSTEM with errno set. */
PHX_API int phx_rpc_begin(phx_rpc_link *link);
/* End a link. What has been sent arrives; nothing more is received. */
PHX_API void phx_rpc_end(phx_rpc_link *link);
/* Give the handle back. */
PHX_API void phx_rpc_drop(phx_rpc_link *link);
/* Why a link has ended (enum phx_rpc_end). */
PHX_API uint32_t phx_rpc_why(phx_rpc_link *link);
/* This process's pid, by which those that accept its offers find it in /proc. */
PHX_API uint32_t phx_rpc_pid(void);

/* Send a small image without waiting. Returns PHX_OK; PHX_UNDER_WAY if the ring is full, so that the caller tries again
 * after phx_rpc_wait_room(); PHX_PEER_LOST if the link has ended. */
PHX_API int phx_rpc_send(phx_rpc_link *link, const void *image, uint64_t nbytes);
/* Copy a large image, given in pieces, into the slab; `shared` receives a handle, or 0. (A result could be lost: a signal's
 * handler may raise as soon as Python has it.) Then comes phx_rpc_lend() for each link, and phx_rpc_unshare(), which leaves
 * 0. The memory is free when all receivers have released the image. Returns PHX_OK; PHX_UNDER_WAY if there is no room now,
 * so that the caller tries again; PHX_BAD_ARGUMENT if it is larger than half of the slab; PHX_SYSTEM if the system has no
 * memory for it; PHX_PEER_LOST if the hub is shut. */
PHX_API int phx_rpc_share(phx_rpc_hub *hub, uint32_t pieces, const void *const *data, const uint64_t *sizes,
                          uint64_t *shared);
PHX_API void phx_rpc_unshare(phx_rpc_hub *hub, uint64_t *shared);
/* Send what was shared, with the number of its call here; to `several` links, or to this one alone, which may then change
 * it in place. Returns what phx_rpc_send() does; or PHX_BAD_ARGUMENT if this link has it already, or cannot have what
 * several have. */
PHX_API int phx_rpc_lend(phx_rpc_link *link, uint64_t handle, uint64_t call, int several);
/* Return how many bytes the other process has taken from the ring since the channel was made. */
PHX_API uint64_t phx_rpc_taken(phx_rpc_link *link);
/* Sleep until the other process has taken more than `taken`, read before no room was found; 50 ms at most. */
PHX_API void phx_rpc_wait_room(phx_rpc_link *link, uint64_t taken);

/* Wait for a message or a piece of news. Returns PHX_OK if one is in the box, PHX_UNDER_WAY if there is none yet, and
 * PHX_PEER_LOST if the hub is shut. After a request or a notice no thread gets the next one of its link until
 * phx_rpc_begun() is called, so that they begin in order. */
PHX_API int phx_rpc_next(phx_rpc_hub *hub, struct phx_rpc_box *box);
PHX_API void phx_rpc_begun(phx_rpc_link *link);
/* Wait for the answer to one call; other messages that arrive meanwhile are left for the threads they are for. Returns
 * what phx_rpc_next() does. An answer that a thread in phx_rpc_next() took cannot arrive here: that thread delivers it
 * and calls phx_rpc_answered(), which adds one to *phx_rpc_answers(). `answers` is that number as the caller read it
 * before it looked whether its answer was delivered; as soon as it has changed, PHX_UNDER_WAY is returned. */
PHX_API int phx_rpc_await(phx_rpc_hub *hub, phx_rpc_link *link, uint64_t call, uint32_t answers,
                          struct phx_rpc_box *box);
PHX_API void phx_rpc_answered(phx_rpc_hub *hub);
PHX_API const void *phx_rpc_answers(phx_rpc_hub *hub);
/* Give a large image back, by what its box said of it. */
PHX_API void phx_rpc_release(phx_rpc_link *link, uint32_t block, uint32_t sequence, uint64_t where, uint64_t nbytes);

#endif
