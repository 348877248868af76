/* The lines from which the ranks of an MPI group call, each compared with that of every other rank.
 *
 * line_pairs.h has the rule for two ranks; of two, the higher one keeps their pairs. Whether all ranks are at one line
 * comes with the reduction of the calls (mpi/meet.c), in two more words that are reduced to their minima: own[2] says where
 * this rank is, and own[3] is the complement of that. All are equal if the minimum is the maximum.
 *
 * If all ranks are at one line, that is all. If not, they tell each other their lines, and each compares its own with those
 * of the lower ranks. What one finds, all must know, because all must decide alike whether the call is an error, so then
 * they ask for that too (transports/mpi/crossing.py). The ranks *confer*: it takes one or two operations of its own.
 *
 * A program with an `if rank == 0:` would confer at each such call. To spare it that, a rank that was at this line when
 * the ranks conferred last, and has forgotten no pair of lines since, offers in own[2] the number of that conference in the
 * place of its line. If all ranks offer the same number, all are where they were then, and none can find anything new. The
 * numbers are equal on all ranks because every rank takes part in every conference.
 *
 * Arms that ranks take in turns need a conference at each call. It is only the first of its two operations if the same
 * lines have met in an earlier one, since which no rank has forgotten a pair: each rank tells beside its line since when
 * that is so, and all ranks remember the same conferences.
 *
 * All of this is one rank's own memory, used by the thread that is in the collective alone. */
#ifndef PHALANX_MPI_LINES_H
#define PHALANX_MPI_LINES_H

#include "mpi/contract.h"

/* Fill in the words for the call that this thread is in. The group has `lines`. */
void phx_mpi_offer_line(phx_mpi_group *group);

/* Whether the ranks need not confer, as the minima have it; then what has met counts as met. */
int phx_mpi_lines_meet(phx_mpi_group *group);

#endif
