/* Every function and number of the core that Python uses over MPI, as phalanx.h has the others.
 *
 * MPI's functions come as pointers and its handles as integers: the core is built without MPI. */
#ifndef PHALANX_MPI_CONTRACT_H
#define PHALANX_MPI_CONTRACT_H

#include "phalanx.h"

/* Have phx_mpi_end() end MPI by these functions of MPI. `abort` is NULL if no other rank waits, `finalize` if the
 * script ends MPI itself; `comm` is the communicator of the whole job. */
PHX_API void phx_mpi_begin(void *abort, void *finalized, void *finalize, intptr_t comm);

/* Have phx_mpi_end() abort MPI: it cannot be finalised, because an operation of several ranks was given up. Any thread
 * may call it. */
PHX_API void phx_mpi_hopeless(void);

/* Have phx_mpi_end() remove files before it aborts MPI, which leaves them. `paths` has `nbytes`, a NUL after each path.
 * Called once, at the end of the process. Without memory for it the files stay. */
PHX_API void phx_mpi_remove_at_abort(const char *paths, uint64_t nbytes);

/* Have phx_mpi_end() do nothing: MPI has been finalised. */
PHX_API void phx_mpi_ended(void);

/* One group over MPI: the integers that a persistent request reduces to their minima, and MPI's functions and handles.
 * Filled in by transports/mpi/direct.py. */
#define PHX_MPI_WORDS 4u
typedef struct phx_mpi_group {
    int64_t own[PHX_MPI_WORDS]; /* a call and its complement; where lines are compared, two more (lines.h) */
    int64_t common[PHX_MPI_WORDS]; /* their minima over the group */
    struct phx_mpi_lines *lines;   /* NULL if no lines are compared */
    uint64_t sequence;             /* how many comparisons have begun */
    int (*start)(void *request);
    int (*test)(void *request, int *done, void *status);
    int (*all_reduce)(const void *send, void *receive, int count, intptr_t datatype, intptr_t op, intptr_t comm);
    int (*probe)(int source, int tag, intptr_t comm, int *flag, void *status);
    void *request, *in_place;
    intptr_t comm, world;       /* the group's communicator, and the one on which notices come */
    int any_source, notice_tag; /* source and tag of notices */
    uint32_t spins;             /* how many tests come before PHX_UNDER_WAY */
    uint32_t probes;            /* how many MPI_Iprobe calls to make for a notice: MPICH searches what has arrived
                                   before it polls the network, so it finds a new message only in the next call */
    uint32_t under_way;         /* an all_reduce has begun and has not ended: interrupting it breaks the group */
} phx_mpi_group;

/* Compare the call with that of every other rank. Called by all ranks of the group.
 * Returns what phx_mpi_compared() does; or, before that is called: PHX_UNDER_WAY if a rank has not come yet (the request
 * is to be tested further); PHX_NOTICE if a rank that came may have given up since; PHX_SYSTEM if MPI reports an error. */
PHX_API int phx_mpi_meet(phx_mpi_group *group, int64_t call);

/* The two ends of phx_mpi_meet(), for those who make MPI's calls themselves: begin a comparison by filling in `own`, and
 * learn from `common` how it came out: PHX_OK, PHX_MISMATCH or PHX_LINES_DIFFER. Once for each comparison, by the thread
 * that is in the collective. */
PHX_API void phx_mpi_offer(phx_mpi_group *group, int64_t call);
PHX_API int phx_mpi_compared(phx_mpi_group *group);

/* Have the lines compared from which the ranks of the group call; before its first call, on all ranks or none. If it
 * gets no memory it returns PHX_SYSTEM, and the lines are not compared; else PHX_OK. */
PHX_API int phx_mpi_compare_lines(phx_mpi_group *group, int rank, int size);

/* After PHX_LINES_DIFFER, on all ranks, in this order. Get what this rank tells the others. */
PHX_API uint64_t phx_mpi_tell_line(const phx_mpi_group *group);

/* Take what every rank has told, by rank. Returns PHX_OK if no rank can find crossed lines that it has not found before;
 * else PHX_LINES_DIFFER; the same on all ranks. */
PHX_API int phx_mpi_hear_lines(phx_mpi_group *group, const uint64_t *told);

/* Note the lines of this rank and the lower ones. Returns PHX_CROSSED if two lines are crossed now, and says in `out` which:
 * then there may be more, and it is to be called again. Returns PHX_OK at the end. */
PHX_API int phx_mpi_next_crossing(phx_mpi_group *group, struct phx_crossing *out);

/* Compare lines no longer; on all ranks after the same call, or when the group is given up. */
PHX_API void phx_mpi_end_lines(phx_mpi_group *group);

/* One kind of all_reduce of a group, prepared when it is first called. Filled in by transports/mpi/direct.py. */
typedef struct phx_mpi_reduction {
    phx_mpi_group *group;
    int64_t call;
    intptr_t datatype, op;
    int count;
} phx_mpi_reduction;

/* phx_mpi_meet(), and if that is PHX_OK MPI's all_reduce of `data` in place. Clears `under_way` if it returns PHX_OK;
 * after any other status the caller does, at the end of the operation. */
PHX_API int phx_mpi_all_reduce(const phx_mpi_reduction *reduction, void *data);

/* End MPI by the process's exit code. Called by glibc, for on_exit(). */
PHX_API void phx_mpi_end(int code, void *unused);

#endif
