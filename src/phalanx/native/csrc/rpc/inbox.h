/* The receiving end of a lane: which thread gets the next message. All of these are called with the hub's lock held. */
#ifndef PHALANX_RPC_INBOX_H
#define PHALANX_RPC_INBOX_H

#include "rpc/hub.h"

enum phx_rpc_step {
    PHX_RPC_NOTHING, /* there is nothing for this thread */
    PHX_RPC_MINE,    /* the box is filled */
    PHX_RPC_MOVED    /* a piece was copied, or a message went to another thread: look again */
};

/* Look at one lane of one link, for a thread that serves (`self` is NULL) or for one that waits. The lock is released
 * while a piece of a large message is copied. */
enum phx_rpc_step phx_rpc_look(phx_rpc_hub *hub, phx_rpc_link *link, uint32_t lane, struct phx_rpc_box *box,
                               struct phx_rpc_waiter *self);

/* Whether the next call or notice of a lane has to wait for one of another lane, for a bounded time. */
int phx_rpc_held(const phx_rpc_link *link, uint32_t lane);

/* Hand answers that were set aside to the threads that wait for them, up to the first notice. */
void phx_rpc_settle(phx_rpc_hub *hub, phx_rpc_link *link, struct phx_rpc_inbox *inbox);

/* Take the thread that waits for a call off the hub's list, and return it; NULL if no thread waits. */
struct phx_rpc_waiter *phx_rpc_unhook(phx_rpc_hub *hub, const phx_rpc_link *link, uint64_t call);

#endif
