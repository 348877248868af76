/* How MPI ends with its process: in order after success, by MPI_Abort after a failure.
 *
 * The exit code decides, because MPI_Finalize of a rank that failed would wait for ranks that wait for it. Python has
 * no hook that gets the code of a `sys.exit(3)`; glibc's on_exit() calls phx_mpi_end() with it, after Python has
 * finalised. A communicator is an int or a pointer, depending on the library, and either fits into an intptr_t.
 *
 * The thread that starts MPI, and later the one that ends the process, write these variables; nobody else reads them.
 */
#define _DEFAULT_SOURCE /* on_exit() */
#include "phalanx.h"

#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

static struct {
    pid_t pid;                             /* 0: there is nothing to end. In a forked child, the parent's */
    int (*abort)(intptr_t comm, int code); /* NULL: no other rank waits */
    int (*finalized)(int *flag);
    int (*finalize)(void); /* NULL: not ours to call */
    intptr_t comm;
    int must_abort;
} mpi;

void phx_mpi_begin(void *abort_, void *finalized, void *finalize, intptr_t comm)
{
    mpi.abort = (int (*)(intptr_t, int))abort_;
    mpi.finalized = (int (*)(int *))finalized;
    mpi.finalize = (int (*)(void))finalize;
    mpi.comm = comm;
    mpi.pid = getpid();
    on_exit(phx_mpi_end, NULL);
}

void phx_mpi_prepare(int must_abort)
{
    mpi.must_abort = must_abort;
}

void phx_mpi_end(int code, void *unused)
{
    (void)unused;
    int done = 0;
    if (mpi.pid != getpid() || mpi.finalized(&done) || done)
        return;
    mpi.pid = 0;
    if (mpi.abort && (code || mpi.must_abort))
        mpi.abort(mpi.comm, code ? code : 1);
    else if (mpi.finalize)
        mpi.finalize();
}
