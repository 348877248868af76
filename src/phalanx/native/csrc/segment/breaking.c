/* Why a group broke, and what each rank was doing then.
 *
 * A rank writes its reason into its own place, and then offers it by an exchange of `breaking`: the first one counts,
 * and is whole whenever others see it. Descriptions are text, which each rank writes only when the group is broken;
 * until then a call costs no more than its call word. */
#define _GNU_SOURCE
#include "segment/comm.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "system/futex.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the list of open views, and of this process's reasons */
static phx_comm *opened;

static int break_for(phx_comm *comm, struct phx_breakage reason)
{
    uint32_t whole = 0;
    int is_first = 0;
    pthread_mutex_lock(&lock);
    if (!phx_broken(comm)) {
        reason.rank = comm->rank;
        reason.peer_pid = comm->places[reason.peer].pid;
        comm->places[comm->rank].breakage = reason;
        is_first = atomic_compare_exchange_strong(&comm->header->breaking, &whole, comm->rank + 1);
    }
    pthread_mutex_unlock(&lock);
    for (uint32_t p = 0; p < comm->size && is_first; p++) {
        phx_wake(phx_low_half(&comm->flags[p].ready));
        phx_wake(phx_low_half(&comm->flags[p].done));
        phx_wake(&comm->places[p].bell);
    }
    return phx_broken(comm);
}

int phx_break_at(phx_comm *comm, int status, uint32_t peer, uint64_t chunk)
{
    return break_for(comm, (struct phx_breakage){.status = (uint32_t)status, .peer = peer, .chunk = chunk});
}

int phx_break_message(phx_comm *comm, uint32_t src, const struct phx_end *sent, const struct phx_end *expected)
{
    return break_for(comm, (struct phx_breakage){.status = PHX_MISMATCH,
                                                 .peer = src,
                                                 .chunk = comm->call_chunk,
                                                 .of_message = 1,
                                                 .sent = *sent,
                                                 .expected = *expected});
}

int phx_break_gone(phx_comm *comm, uint32_t peer, enum phx_going how)
{
    return break_for(comm, (struct phx_breakage){
                               .status = PHX_PEER_LOST, .peer = peer, .chunk = comm->call_chunk, .how = how});
}

int phx_break(phx_comm *comm, int status, uint32_t peer)
{
    return phx_break_at(comm, status, peer, comm->call_chunk);
}

void phx_abort(phx_comm *comm)
{
    phx_break(comm, PHX_INTERRUPTED, comm->rank);
}

int phx_breakage(const phx_comm *comm, struct phx_breakage *out)
{
    const uint32_t first = atomic_load_explicit(&comm->header->breaking, memory_order_acquire);
    *out = first ? comm->places[first - 1].breakage : (struct phx_breakage){0};
    return (int)out->status;
}

void phx_describe(phx_comm *comm, const char *text)
{
    struct phx_place *place = &comm->places[comm->rank];
    uint32_t nothing = 0;
    if (!atomic_compare_exchange_strong(&place->described, &nothing, 1))
        return; /* the first description is that of the call that broke the group */
    strncpy(place->text, text, PHX_TEXT - 1);
    atomic_store_explicit(&place->described, 2, memory_order_release);
}

int phx_description(const phx_comm *comm, uint32_t rank, char *out)
{
    if (rank >= comm->size || atomic_load_explicit(&comm->places[rank].described, memory_order_acquire) != 2)
        return 0;
    memcpy(out, comm->places[rank].text, PHX_TEXT);
    return 1;
}

/* -- the end of the process ---------------------------------------------------------------------------------------- */

/* The views belong to the parent; its threads, which may hold the lock, are not in the child. */
static void forget_all(void)
{
    opened = NULL;
    pthread_mutex_init(&lock, NULL);
}

static void tell_all(enum phx_going how, const char *text)
{
    pthread_mutex_lock(&lock);
    for (phx_comm *comm = opened; comm; comm = comm->next) {
        if (text)
            phx_describe(comm, text);
        phx_tell(comm, how);
    }
    pthread_mutex_unlock(&lock);
}

/* Called by exit(), after the interpreter has ended. A process that a signal or _exit() ends does not come here. */
static void at_exit(int code, void *unused)
{
    char text[32];
    (void)unused;
    snprintf(text, sizeof text, "exit code %d", code & 0xff);
    tell_all(code ? PHX_FAILED : PHX_LEFT, code ? text : NULL);
}

static void prepare(void)
{
    pthread_atfork(NULL, NULL, forget_all);
    on_exit(at_exit, NULL);
}

void phx_remember(phx_comm *comm)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, prepare);
    pthread_mutex_lock(&lock);
    comm->next = opened;
    opened = comm;
    pthread_mutex_unlock(&lock);
}

void phx_forget(phx_comm *comm)
{
    pthread_mutex_lock(&lock);
    for (phx_comm **link = &opened; *link; link = &(*link)->next)
        if (*link == comm) {
            *link = comm->next;
            break;
        }
    pthread_mutex_unlock(&lock);
}

void phx_process_leaves(void)
{
    tell_all(PHX_LEFT, NULL);
}

void phx_process_fails(const char *text)
{
    tell_all(PHX_FAILED, text);
}

void phx_group_fails(phx_comm *comm, const char *text)
{
    phx_describe(comm, text);
    phx_tell(comm, PHX_FAILED);
}
