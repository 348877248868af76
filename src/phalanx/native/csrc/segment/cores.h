/* Keeping ranks that wait for each other on different cores. */
#ifndef PHALANX_CORES_H
#define PHALANX_CORES_H

#include "segment/comm.h"

/* Publish which core this rank runs on, for ranks that wait for it. */
void phx_note_cpu(phx_comm *comm);

/* Move this thread to another core if `peer` was last seen on the same one, although there is a core for each rank. Of
 * two ranks the higher one moves, at most once in 10 ms. */
void phx_move_apart(phx_comm *comm, uint32_t peer);

#endif
