/* The lines of the program from which two ranks make the calls that meet: whether these calls belong together.
 *
 * Two calls that may meet (call.h) need not belong together: a rank that leaves out one of two equal calls, or swaps
 * them, gets wrong numbers. Then they come from different lines. But so do the two arms of an `if rank == 0:`. What
 * distinguishes a mistake is that both ranks run both lines, and not in the same calls: the pairs (A here, B there)
 * and (B here, A there) have met, or in a longer row (A, B), (B, C), (C, A). So per peer the pairs of different lines
 * are kept that met lately, and two lines that each stand on both sides of these pairs are *crossed*. Lines that meet
 * themselves eight times in a row end it: what was before did not shift the ranks against each other.
 *
 * A line here is 16 bits of a hash of a place in the program and of what it calls there: kind, dtype, operation and
 * root. So a line that broadcasts from rank 0 and then from rank 1 counts as two: the root and the others may well
 * change their lines then. Sizes are not in it: in a swap of calls whose size changes from step to step no line would
 * stand on both sides with one size. Two lines have the same bits once in 2^16, and then a mistake passes unseen.
 * docs/design/diagnosis.md has what else does. */
#ifndef PHALANX_LINE_ORDER_H
#define PHALANX_LINE_ORDER_H

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
