/* Memory that two processes share: made so that it cannot shrink, and taken from the system before it is written. */
#ifndef PHALANX_RPC_MEMORY_H
#define PHALANX_RPC_MEMORY_H

#include <stdint.h>

/* Make a file of `nbytes` in memory, whose size nobody can change any more: a mapping of a file that another process
 * truncates would raise SIGBUS. Returns its descriptor, or -1 with errno set. */
int phx_rpc_make_file(uint64_t nbytes);

/* Open descriptor `number` of a process if it is a file that phx_rpc_make_file() made, or -1 with errno set. Nothing else
 * is opened, since opening a FIFO may wait, and opening a device may do anything. */
int phx_rpc_open_file(uint32_t pid, int number);

/* Have the system provide the memory of `nbytes` at `data`, which begins at a page. Returns 0 if there is none left;
 * writing there would raise SIGBUS. Kernels before 5.14 cannot tell, and 1 is returned. */
int phx_rpc_back(void *data, uint64_t nbytes);

/* Whether this process has copies of pages of a private mapping of a file, because it has changed them. `pagemap` is a
 * descriptor of its /proc/self/pagemap; without one, or if it says nothing, 1 is returned. */
int phx_rpc_changed(int pagemap, uint64_t where, uint64_t nbytes);

/* The bytes of a page: 4096, or 16384 or 65536 on some ARM systems. */
uint64_t phx_rpc_page_bytes(void);

#endif
