/* Memory that two processes share: made so that it cannot shrink, and taken from the system before it is written; and
 * slabs, in which one of them allocates the blocks that the other reads. */
#ifndef PHALANX_RPC_MEMORY_H
#define PHALANX_RPC_MEMORY_H

#include <pthread.h>

#include "rpc/channel.h"

/* Make a file of `nbytes` in memory, whose size nobody can change any more: a mapping of a file that another process
 * truncates would raise SIGBUS. Returns its descriptor, or -1 with errno set. */
int phx_rpc_make_file(uint64_t nbytes);

/* Open descriptor `number` of a process if it is a file that phx_rpc_make_file() made, or -1 with errno set. */
int phx_rpc_open_file(uint32_t pid, int number);

/* Have the system provide the memory of `nbytes` at `data`, which begins at a page. Returns 0 if there is none left;
 * writing there would raise SIGBUS. Kernels before 5.14 cannot tell, and 1 is returned. */
int phx_rpc_back(void *data, uint64_t nbytes);

/* Whether this process has copies of pages of a private mapping of a file, because it has changed them. `pagemap` is a
 * descriptor of its /proc/self/pagemap; without one, or if it says nothing, 1 is returned. */
int phx_rpc_changed(int pagemap, uint64_t where, uint64_t nbytes);

/* The bytes of a page: 4096, or 16384 or 65536 on some ARM systems. */
uint64_t phx_rpc_page_bytes(void);

/* A hub's notes of its slab, in its private memory. The lock guards all but `data` and `bytes`. */
struct phx_rpc_block {
    uint64_t at, nbytes;        /* in the slab */
    uint32_t holders, sequence; /* both 0: it is free */
};

struct phx_rpc_slab {
    pthread_mutex_t lock;
    char *data;
    uint64_t bytes;
    uint64_t backed;  /* everything before this place has memory of the system */
    uint64_t reached; /* nothing behind this place has */
    uint64_t used_ns; /* when a block was last allocated, or trimming was tried */
    uint32_t sequence, used;
    uint16_t order[PHX_RPC_BLOCKS]; /* the blocks in use, by where they lie, and free ones that nobody has looked at since */
    struct phx_rpc_block blocks[PHX_RPC_BLOCKS];
};

/* Allocate a block of `nbytes` with one holder, who may write it; `handle` names it. Returns PHX_OK; PHX_UNDER_WAY if there
 * is no room; PHX_SYSTEM if the system has no memory for it. */
int phx_rpc_allocate(struct phx_rpc_slab *slab, uint64_t nbytes, uint64_t *handle);
/* Find a block by its handle; NULL if it has become free since. With the lock held. */
struct phx_rpc_block *phx_rpc_find(struct phx_rpc_slab *slab, uint64_t handle);
/* Note that a block has a holder less. With the lock held. */
void phx_rpc_let_go(struct phx_rpc_block *block);
/* If nothing was allocated for a while, give the system back what lies between the blocks in use and behind them. */
void phx_rpc_trim(struct phx_rpc_slab *slab, uint64_t now_ns);

#endif
