/* Images that several processes read in one place: a hub has a slab of its own for them, beside those of its links. */
#ifndef PHALANX_RPC_LOANS_H
#define PHALANX_RPC_LOANS_H

#include "rpc/slab.h"

/* One link's share in an image; under the lock of the loans. */
struct phx_rpc_loan {
    struct phx_rpc_link *link; /* NULL: this number is free; else the loan holds it */
    struct phx_rpc_block block;
    uint32_t sequence;
};

struct phx_rpc_loans {
    pthread_mutex_t lock;
    struct phx_rpc_slab slab;
    uint32_t used, sequence;
    uint32_t holders[PHX_RPC_BLOCKS]; /* of each block: its loans, and the caller between share and unshare */
    _Atomic uint32_t released[PHX_RPC_BLOCKS];
    struct phx_rpc_loan loans[PHX_RPC_LOANS];
};

/* Take back what has been returned, or was lent to a process that has died; all of it if `all`. */
void phx_rpc_collect(struct phx_rpc_loans *loans, int all);

#endif
