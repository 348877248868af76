/* The lines of the program from which the ranks make the calls that meet.
 *
 * Two calls that may meet (call.h) need not belong together: a rank that leaves out one of two equal calls, or swaps
 * them, gets wrong numbers. Then they come from different lines. But so do the two arms of an `if rank == 0:`. What
 * distinguishes a mistake is that both ranks run both lines, and not in the same calls: the pairs (A here, B there) and
 * (B here, A there) have met, or in a longer row (A, B), (B, C), (C, A). So per peer the pairs of different lines are kept
 * that met lately, and two lines that each stand on both sides of these pairs are *crossed*. Lines that meet themselves
 * PHX_CALM times in a row end it: what was before did not shift the ranks against each other.
 *
 * A line here is 16 bits of a hash of a place in the program and of the call word, so that a line that broadcasts from
 * rank 0 and then from rank 1 counts as two: the root and the others may well change their lines then. Two lines have the
 * same bits once in 2^16, and then a mistake passes unseen. docs/diagnosis.md has the rule for users. */
#ifndef PHALANX_LINES_H
#define PHALANX_LINES_H

#include "comm.h"

#define PHX_PAIRS 16u /* how many pairs of lines are kept for each peer */
#define PHX_CALM 8u   /* how many calls in a row that met at the same line end the matter */

/* Publish, beside the call word, from which line this rank makes the call that begins with `chunk`. */
void phx_publish_line(phx_comm *comm, uint64_t chunk, uint64_t call);

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
