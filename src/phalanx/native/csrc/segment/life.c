/* Whether the ranks of a group are still in it.
 *
 * A rank that goes says how: it has left in order, or it has failed. A rank that is killed says nothing, so the others
 * look at its process. Its pid means the same to all of them: each has found rank 0's memory under rank 0's pid in its
 * own /proc (transports/shm/segment.py), so all have one /proc. */
#define _GNU_SOURCE
#include "segment/comm.h"

/* In larger groups nobody holds the others' recorders: so many maps would take a process's room for them. */
#define MOST_RECORDERS 128u

void phx_look(phx_comm *comm)
{
    for (uint32_t p = 0; p < comm->size; p++) {
        const struct phx_place *place = &comm->places[p];
        if (p == comm->rank)
            continue;
        phx_process_read(place->pid, &comm->met[p]);
        comm->met[p].image = place->image; /* it may run another program by now */
        if (place->recorder.fd >= 0 && comm->size <= MOST_RECORDERS)
            comm->recorders[p] = phx_recorder_map(place->pid, &place->recorder);
    }
}

enum phx_going phx_peer_life(const phx_comm *comm, uint32_t peer)
{
    const struct phx_place *place = &comm->places[peer];
    uint32_t told = atomic_load_explicit(&place->going, memory_order_acquire);
    if (told != PHX_HERE || peer == comm->rank)
        return (enum phx_going)told;
    const enum phx_sight sight = phx_process_again(place->pid, &comm->met[peer]);
    if (sight == PHX_RUNNING)
        return PHX_HERE;
    /* It may have told between the two looks. */
    told = atomic_load_explicit(&place->going, memory_order_acquire);
    return told != PHX_HERE ? (enum phx_going)told : sight == PHX_GONE ? PHX_ENDED : PHX_REPLACED;
}

int phx_going(const phx_comm *comm, uint32_t rank, uint32_t *pid)
{
    if (rank >= comm->size)
        return PHX_HERE;
    *pid = comm->places[rank].pid;
    return phx_peer_life(comm, rank);
}

void phx_tell(phx_comm *comm, enum phx_going how)
{
    struct phx_place *place = &comm->places[comm->rank];
    uint32_t told = atomic_load_explicit(&place->going, memory_order_relaxed);
    while (told < (uint32_t)how &&
           !atomic_compare_exchange_weak_explicit(&place->going, &told, how, memory_order_release, memory_order_relaxed))
        ;
}
