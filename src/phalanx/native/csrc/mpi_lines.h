/* The lines from which the ranks of an MPI group call, each compared with that of the group's first rank.
 *
 * line_pairs.h has the rule for two ranks; whoever is out of order is so against the first one. What a rank must know for
 * it comes with the reduction of the calls (mpi_meet.c), in three more words that are reduced to their minima:
 *
 *   own[2], own[3]  where this rank is, and the complement of that. All are equal if the minimum is the maximum.
 *   own[4]          the first rank's line; INT64_MAX on the others. The minimum is the first rank's line.
 *
 * If all ranks are at one line, that is all. If not, each rank learns from own[4] whether its line and the first one's are
 * crossed, but not whether those of another rank are, and all must decide alike whether the call is an error. So all ranks
 * then tell each other what they have found (transports/mpi/crossing.py): they *confer*, which takes a reduction of its own.
 *
 * A program with an `if rank == 0:` would confer at each such call. To spare it that, a rank that was at this line when
 * the ranks conferred last, and knows the pair of lines that has met there, offers in own[2] the number of that conference
 * in the place of its line. If all ranks offer the same number, all are where they were then, and none has found anything
 * new. The numbers are equal on all ranks because every rank takes part in every conference.
 *
 * All of this is one rank's own memory, used by the thread that is in the collective alone. */
#ifndef PHALANX_MPI_LINES_H
#define PHALANX_MPI_LINES_H

#include "mpi_contract.h"

/* Fill in the words for the call that this thread is in. The group has `lines`. */
void phx_mpi_offer_line(phx_mpi_group *group);

/* Whether the ranks need not confer, as the minima have it; then what has met counts as met. */
int phx_mpi_lines_meet(phx_mpi_group *group);

#endif
