/* One process's private view of its hub and its links. */
#ifndef PHALANX_RPC_HUB_H
#define PHALANX_RPC_HUB_H

#include <poll.h>
#include <pthread.h>

#include "system/process.h"
#include "rpc/rpc.h"
#include "rpc/memory.h"
#include "rpc/ring.h"

#define PHX_RPC_LINKS 4096u

/* A message that was taken out of its ring before the thread that it is for has come for it. */
struct phx_rpc_item {
    struct phx_rpc_item *next;
    struct phx_rpc_box box;
    struct phx_rpc_image image; /* of a small one, the rest follows */
};

/* The receiving end of a link. Everything here is under the hub's lock. */
struct phx_rpc_inbox {
    struct phx_rpc_end_of_ring in;
    struct phx_rpc_item *first, **last; /* taken out of the ring, in order, before what is still in it */
    uint64_t aside;                     /* bytes of those */
    uint32_t notices;                   /* how many of those are notices */
    uint32_t begins;                    /* the kind of the message that a thread took and has not begun with; or 0 */
};

/* A thread that waits for the answer to a call; under the hub's lock. */
struct phx_rpc_waiter {
    struct phx_rpc_waiter *next;
    phx_rpc_link *link;
    uint64_t call;
    struct phx_rpc_box *box;
    _Atomic uint32_t filled;
};

/* A link whose process may read a block of this hub's slab. A loan ends when that process has released the block, or has
 * died; so a link with loans is kept, although it may have ended: its process may go on and read what it has received. */
struct phx_rpc_loan {
    phx_rpc_link *link;
    uint32_t block, sequence;
};

struct phx_rpc_hub {
    pthread_mutex_t lock;
    struct phx_rpc_place *place;
    int fd;
    uint32_t forks, cores;
    _Atomic uint32_t refs; /* the handle, and each link */
    _Atomic uint32_t shut;
    _Atomic uint32_t serving;  /* threads in phx_rpc_next() */
    _Atomic uint32_t sleeping; /* how many of those sleep, or are about to; seq_cst, raised before they sleep */
    _Atomic uint32_t answers;
    /* The running means of how long waits for either take. Only this process has them: any of its threads writes and
     * reads them, relaxed, because they only decide for how long a thread watches before it sleeps. */
    _Atomic uint32_t answer_ns, request_ns;
    pthread_t watcher;
    struct phx_rpc_waiter *waiters;
    phx_rpc_link *links[PHX_RPC_LINKS];   /* under the lock, like `count` and `turn` */
    phx_rpc_link *watched[PHX_RPC_LINKS]; /* the watcher's, which holds those */
    struct pollfd polled[PHX_RPC_LINKS];
    _Atomic uint32_t count;
    uint32_t turn;
    _Atomic int pagemap; /* of this process; -1 if there is none */
    struct phx_rpc_slab slab;
    struct phx_rpc_loan loans[PHX_RPC_BLOCKS]; /* under the slab's lock, like `lent` */
    uint32_t lent;
};

struct phx_rpc_link {
    phx_rpc_hub *hub;
    _Atomic uint32_t refs; /* the handle, the hub's list, each received large image, a thread that works without the lock */
    struct phx_rpc_channel *channel;
    struct phx_rpc_side *own, *other;
    struct phx_rpc_place *peer; /* the other process's; its slab follows */
    char *their_slab, *private_slab; /* the second is the same, mapped privately; NULL if that could not be */
    uint64_t slab_bytes;
    struct phx_process process;
    uint32_t pid;
    int pidfd;
    _Atomic uint64_t looked_ns; /* when the watcher last looked at the process in /proc */
    _Atomic uint32_t ended;   /* why nothing more comes (enum phx_rpc_end); then nothing can be sent */
    uint32_t listed, told;    /* under the hub's lock */
    pthread_mutex_t sending;  /* held while a record is put into a ring */
    struct phx_rpc_end_of_ring out;
    struct phx_rpc_inbox inbox;
};

extern _Atomic uint32_t phx_rpc_forks;

/* Return whether this process has made the hub, and is not a forked child of who did. */
static inline int phx_rpc_mine(const phx_rpc_hub *hub)
{
    return hub->forks == atomic_load_explicit(&phx_rpc_forks, memory_order_relaxed);
}

/* On a bell, threads that serve sleep under bit 0, and one that waits for the answer to a call under a bit of its own.
 */
#define PHX_RPC_SERVERS 1u
#define PHX_RPC_WAITERS 0xfffffffeu
static inline uint32_t phx_rpc_bit(uint64_t call)
{
    return 2u << call % 31;
}

/* Ring a bell and wake a thread that sleeps under one of the bits; if there is none and `otherwise` is not 0, under one
 * of those. */
void phx_rpc_ring(struct phx_rpc_place *place, uint32_t bits, uint32_t otherwise);
/* The same for every thread of this process that sleeps under one of the bits, also if others watch. */
void phx_rpc_call_up(phx_rpc_hub *hub, uint32_t bits);

/* Note why a link ends, and have its threads look. */
void phx_rpc_ends(phx_rpc_link *link, uint32_t why);
/* Cease to receive from a link, with the hub's lock held. */
void phx_rpc_unlist(phx_rpc_link *link);

/* Let go of the blocks that were released, or lent to a process that has died; of all of them if `all`. */
void phx_rpc_collect(phx_rpc_hub *hub, int all);

static inline void phx_rpc_hold(phx_rpc_link *link)
{
    atomic_fetch_add_explicit(&link->refs, 1, memory_order_relaxed);
}

#endif
