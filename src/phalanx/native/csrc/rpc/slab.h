/* Allocating blocks of a slab that another process reads. */
#ifndef PHALANX_RPC_SLAB_H
#define PHALANX_RPC_SLAB_H

#include <pthread.h>

#include "rpc/channel.h"

/* One side's notes of its slab, in its private memory. The lock guards all but `data`, `bytes` and `released`. */
struct phx_rpc_slab {
    pthread_mutex_t lock;
    char *data;
    uint64_t bytes;
    _Atomic uint32_t *released;
    uint64_t backed;  /* everything before this place has memory of the system */
    uint64_t reached; /* nothing behind this place has */
    uint64_t used_ns; /* when a block was last allocated, or trimming was tried */
    uint32_t sequence, used;
    uint16_t order[PHX_RPC_BLOCKS]; /* the used blocks, by where they lie */
    struct phx_rpc_block blocks[PHX_RPC_BLOCKS]; /* by number; one that is not used has the sequence number 0 */
    uint8_t handed_over[PHX_RPC_BLOCKS];         /* by number: the other process alone releases it from now on */
};

/* Allocate a block of `nbytes`, whose memory the caller may write. Returns 1; or 0 if the slab is full, or the system has
 * no memory for it. */
int phx_rpc_allocate(struct phx_rpc_slab *slab, uint64_t nbytes, struct phx_rpc_block *block);
/* If nothing was allocated for a while, give the system back what lies between the blocks in use and behind them. */
void phx_rpc_trim(struct phx_rpc_slab *slab, uint64_t now_ns);
/* Allocate a block for an image that is given in pieces, and copy it there. Returns as phx_rpc_allocate(). */
int phx_rpc_copy_in(struct phx_rpc_slab *slab, uint32_t pieces, const void *const *data, const uint64_t *sizes,
                    struct phx_rpc_block *block);
/* Describe a block by its number and sequence number. Returns 1, or 0 if it has been released since. */
int phx_rpc_find(struct phx_rpc_slab *slab, uint32_t number, uint32_t sequence, struct phx_rpc_block *block);
/* Note that the other process alone may release this block from now on. Called right before it is told of the block. */
void phx_rpc_hand_over(struct phx_rpc_slab *slab, const struct phx_rpc_block *block);
/* Free a block by its number and sequence number, unless it was handed over. */
void phx_rpc_free(struct phx_rpc_slab *slab, uint32_t number, uint32_t sequence);

#endif
