/* Whether the ranks of a group are still in it.
 *
 * A rank that goes says how: it has left in order, or it has failed. A rank that is killed says nothing, so the others
 * look at its process. Before that means anything the ranks prove, when they meet, that each sees the others: a pid
 * that one rank reads of itself is another process, or none, for a rank whose /proc is of another pid namespace. The
 * proof is a descriptor of the segment, which only the right process has. */
#define _GNU_SOURCE
#include "segment/comm.h"

#define ALL_SEEN 1u /* in `sees`; UNSEEN + p if rank p is not the process that it says */
#define UNSEEN 2u
/* In larger groups nobody holds the others' recorders: so many maps would take a process's room for them. */
#define MOST_RECORDERS 128u

void phx_look(phx_comm *comm, int fd)
{
    uint32_t found = ALL_SEEN;
    for (uint32_t p = comm->size; p-- > 0;) {
        const struct phx_place *place = &comm->places[p];
        if (p == comm->rank)
            continue;
        if (!phx_process_holds(place->pid, place->fd, fd)) {
            found = UNSEEN + p;
            continue;
        }
        phx_process_read(place->pid, &comm->met[p]);
        if (phx_sees(comm, p) && place->recorder.fd >= 0 && comm->size <= MOST_RECORDERS)
            comm->recorders[p] = phx_recorder_map(place->pid, &place->recorder);
    }
    atomic_store_explicit(&comm->places[comm->rank].sees, found, memory_order_release);
}

int phx_sees(const phx_comm *comm, uint32_t rank)
{
    return comm->met[rank].start_time != 0;
}

/* Return whether a rank that this one has seen is gone; of the others it cannot know. */
static int lost(const phx_comm *comm, uint32_t peer)
{
    return phx_sees(comm, peer) && phx_peer_life(comm, peer) != PHX_HERE;
}

int phx_all_seen(const phx_comm *comm, uint32_t *by, uint32_t *whom)
{
    *by = *whom = PHX_NOBODY;
    for (uint32_t p = 0; p < comm->size; p++) {
        uint32_t found = atomic_load_explicit(&comm->places[p].sees, memory_order_acquire);
        if (!found) {
            /* Once: a rank may look, meet the others and leave in order between two questions. */
            const int gone = lost(comm, p);
            if (gone)
                found = atomic_load_explicit(&comm->places[p].sees, memory_order_acquire); /* its last act, perhaps */
            if (!found) {
                *by = p;
                return gone ? PHX_PEER_LOST : PHX_UNDER_WAY;
            }
        }
        if (found >= UNSEEN && *whom == PHX_NOBODY) {
            *by = p;
            *whom = found - UNSEEN;
        }
    }
    return PHX_OK;
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
