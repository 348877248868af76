/* Allocating blocks of a slab that another process reads. */
#ifndef PHALANX_RPC_SLAB_H
#define PHALANX_RPC_SLAB_H

#include <pthread.h>

#include "rpc_segment.h"

struct phx_rpc_slab {
    pthread_mutex_t lock;
    char *data;
    uint64_t bytes;
    _Atomic uint32_t *released;
    uint64_t touched; /* how far memory has been taken for it */
    uint64_t used_ns; /* when a block was last allocated */
    uint32_t sequence, used;
    uint16_t order[PHX_RPC_BLOCKS]; /* the used blocks, by where they lie */
    struct phx_rpc_block blocks[PHX_RPC_BLOCKS];
};

/* A block of `nbytes`: 1, or 0 if there is no room. Its memory belongs to the caller. */
int phx_rpc_allocate(struct phx_rpc_slab *slab, uint64_t nbytes, struct phx_rpc_block *block);
/* Give memory back that has not been used for a while. */
void phx_rpc_trim(struct phx_rpc_slab *slab, uint64_t now_ns);
/* What a block that was allocated here is; 0 if it is none any more. */
int phx_rpc_find(struct phx_rpc_slab *slab, uint32_t number, uint32_t sequence, struct phx_rpc_block *block);

#endif
