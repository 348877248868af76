/* The end of MPI with its process. MPI's functions come as pointers and its communicator as an integer: the core is built
 * without MPI. */
#ifndef PHALANX_MPI_END_H
#define PHALANX_MPI_END_H

#include "phalanx.h"

/* Have MPI ended by these functions of MPI when the process exits; once in a process. `abort` is NULL if no other rank
 * waits, `finalize` if the script ends MPI itself; `comm` is the communicator of the whole job. */
PHX_API void phx_mpi_begin(void *abort, void *finalized, void *finalize, intptr_t comm);

/* Say what is known before the exit code is. With `must_abort` MPI is aborted even after success, because it cannot be
 * finalised. `paths` has `nbytes`, a NUL after each path: files to remove before MPI is aborted, which leaves them. */
PHX_API void phx_mpi_prepare(int must_abort, const char *paths, uint64_t nbytes);

/* End MPI by the process's exit code, unless it has been finalised. glibc calls it, by on_exit(). */
PHX_API void phx_mpi_end(int code, void *unused);

#endif
