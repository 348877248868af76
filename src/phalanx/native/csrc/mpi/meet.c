/* The comparison of calls before an MPI collective, and an all_reduce after it, in one call from Python.
 *
 * mpi4py could make the same few calls of MPI, but from Python they take longer than in MPI itself. This file is kept
 * because the figures in docs/mpi.md ("What it costs") are reached only with it.
 *
 * MPI's functions come as pointers and its handles as integers, so that this needs no MPI to be built: a handle is an
 * int or a pointer, depending on the library, and is passed in a register either way on the machines that
 * transports/mpi/direct.py allows.
 *
 * A phx_mpi_group is one rank's own memory. Only the thread that holds the group's lock in Python calls these functions
 * or writes it. Other threads of the rank read `sequence` when they abort the group, leave it or give up a message of
 * it; a value that is one too old does no harm there, since it only names the operation.
 */
#include "mpi/contract.h"
#include "mpi/lines.h"

void phx_mpi_offer(phx_mpi_group *group, int64_t call)
{
    group->own[0] = call;
    group->own[1] = ~call;
    if (group->lines)
        phx_mpi_offer_line(group);
    group->sequence++;
}

int phx_mpi_compared(phx_mpi_group *group)
{
    /* min(~x) = ~max(x): all ranks made the same call if the minimum is the maximum. */
    if (group->common[0] != ~group->common[1])
        return PHX_MISMATCH;
    return group->lines && !phx_mpi_lines_meet(group) ? PHX_LINES_DIFFER : PHX_OK;
}

int phx_mpi_meet(phx_mpi_group *group, int64_t call)
{
    char status[256]; /* an MPI_Status; the largest known has 40 bytes */
    int done = 0, notice = 0;
    phx_mpi_offer(group, call);
    if (group->start(group->request))
        return PHX_SYSTEM;
    for (uint32_t spin = 0; !done; spin++) {
        if (spin == group->spins)
            return PHX_UNDER_WAY;
        if (group->test(group->request, &done, status))
            return PHX_SYSTEM;
    }
    /* A rank may have given up after it took part in the comparison; the operation would wait for it without end. */
    for (uint32_t i = 0; i < group->probes; i++) {
        if (group->probe(group->any_source, group->notice_tag, group->world, &notice, status))
            return PHX_SYSTEM;
        if (notice)
            return PHX_NOTICE;
    }
    return phx_mpi_compared(group);
}

int phx_mpi_all_reduce(const phx_mpi_reduction *reduction, void *data)
{
    phx_mpi_group *group = reduction->group;
    group->under_way = 1;
    int status = phx_mpi_meet(group, reduction->call);
    if (status != PHX_OK)
        return status;
    if (group->all_reduce(group->in_place, data, reduction->count, reduction->datatype, reduction->op, group->comm))
        return PHX_SYSTEM;
    group->under_way = 0;
    return PHX_OK;
}
