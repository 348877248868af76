/* The lines of the program from which two ranks make the calls that meet: whether these calls belong together.
 *
 * Two calls that may meet (call.h) need not belong together: a rank that leaves out one of two equal calls, or swaps
 * them, gets wrong numbers. Then they come from different lines. But so do the two arms of an `if rank == 0:`. What
 * distinguishes a mistake is that both ranks run both lines, and not in the same calls: the pairs (A here, B there) and
 * (B here, A there) have met, or in a longer row (A, B), (B, C), (C, A). So per peer the pairs of different lines are kept
 * that met lately, and two lines that each stand on both sides of these pairs are *crossed*. Lines that meet themselves
 * PHX_CALM times in a row end it: what was before did not shift the ranks against each other.
 *
 * A line here is 16 bits of a hash of a place in the program and of what it calls there: kind, dtype, operation and root.
 * So a line that broadcasts from rank 0 and then from rank 1 counts as two: the root and the others may well change their
 * lines then. Sizes are not in it: in a swap of calls whose size changes from step to step no line would stand on both
 * sides with one size. Two lines have the same bits once in 2^16, and then a mistake passes unseen.
 * docs/design/diagnosis.md has what else does. */
#ifndef PHALANX_LINE_PAIRS_H
#define PHALANX_LINE_PAIRS_H

#include "recorder/record.h"

#define PHX_PAIRS 16u /* how many pairs of lines are kept for each peer */
#define PHX_CALM 8u   /* how many calls in a row that met at the same line end the matter */

/* A call in which this rank and a peer were at different lines. */
struct phx_line_pair {
    uint16_t mine, theirs;
    uint32_t line, in_group; /* as in struct phx_record_place */
};

/* Those of one peer. Only the thread that is in a collective uses them; all zero is a beginning. */
struct phx_line_pairs {
    uint32_t kept; /* how many pairs there have been; the last PHX_PAIRS are here */
    uint32_t calm; /* how many calls in a row have met at the same line since the last of them */
    struct phx_line_pair pairs[PHX_PAIRS];
};

/* A place of the program and what is called there as the bits that are compared; 0: the place is not known. */
uint16_t phx_line_of(struct phx_record_place place);

/* Note that this rank's line, at `place`, and the peer's have met; neither is 0. Returns 1 if two lines are crossed now,
 * and says in `out` which, but for the peer. With NULL for `out` the pair is noted, and nothing is judged. */
int phx_meet_pair(struct phx_line_pairs *with, uint16_t mine, uint16_t theirs, struct phx_record_place place,
                  struct phx_crossing *out);

/* Whether these lines would change nothing if they met but the count of calm calls: they are equal, or noted already. */
int phx_pair_is_known(const struct phx_line_pairs *with, uint16_t mine, uint16_t theirs);

#endif
