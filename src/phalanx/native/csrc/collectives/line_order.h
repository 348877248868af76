/* The lines of the program from which the ranks of a segment make the calls that meet (line_pairs.h). */
#ifndef PHALANX_LINES_H
#define PHALANX_LINES_H

#include "segment/comm.h"

/* Publish, beside the call word, from which line this rank makes the call that begins with `chunk`. */
void phx_publish_line(phx_comm *comm, uint64_t chunk);

/* Note which lines of this rank and of `peer` have met in a slot; sets `crossed` if two are crossed now. */
void phx_meet_line(phx_comm *comm, uint32_t peer, uint64_t slot);

/* The status of a collective that is done. */
static inline int phx_done(phx_comm *comm)
{
    if (!comm->crossed)
        return PHX_OK;
    comm->crossed = 0;
    return PHX_CROSSED;
}

#endif
