/* Whether the ranks of a group are still in it: proven when they meet, read while they wait, told when they go. */
#ifndef PHALANX_LIFE_H
#define PHALANX_LIFE_H

#include "segment/comm.h"

/* How a rank stands to the group: PHX_HERE, or how it went. */
enum phx_going phx_peer_life(const phx_comm *comm, uint32_t peer);

/* Tell the others that this rank goes; a worse way than one told before counts. */
void phx_tell(phx_comm *comm, enum phx_going how);

/* Enter the view in the list of those that this process tells of its end, or take it out. */
void phx_remember(phx_comm *comm);
void phx_forget(phx_comm *comm);

#endif
