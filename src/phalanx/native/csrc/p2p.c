/* The calls about messages: start one, test it, wait for it, give it back.
 *
 * mail.c moves the bytes; here is what a waiting thread does between its attempts: spin, yield, sleep on the bell of
 * its place, and after each slice check whether the message can still come. Cost of a message: n bytes in, n bytes out,
 * one ring of the bell for every piece of 64 KiB. */
#include <sched.h>
#include <stdlib.h>

#include "call.h"
#include "breaking.h"
#include "cores.h"
#include "futex.h"
#include "mail.h"
#include "process.h"

static phx_message *new_message(void *data, uint64_t nbytes, uint32_t dtype, uint32_t peer, uint32_t tag)
{
    phx_message *message = malloc(sizeof *message);
    if (message)
        *message = (phx_message){.data = data, .nbytes = nbytes, .peer = peer, .tag = tag, .dtype = dtype};
    return message;
}

phx_message *phx_send(phx_comm *comm, const void *data, uint64_t nbytes, uint32_t dtype, uint32_t dst, uint32_t tag)
{
    phx_message *message = dst < comm->size && !phx_lacks_memory(data, nbytes) ? new_message((void *)data, nbytes, dtype, dst, tag) : NULL;
    if (message)
        phx_mail_send(comm, message);
    return message;
}

int phx_send_now(phx_comm *comm, const void *data, uint64_t nbytes, uint32_t dtype, uint32_t dst, uint32_t tag)
{
    return dst < comm->size && !phx_lacks_memory(data, nbytes) && phx_mail_send_now(comm, data, nbytes, dtype, dst, tag);
}

phx_message *phx_recv(phx_comm *comm, void *data, uint64_t nbytes, uint32_t dtype, uint32_t src, uint32_t tag)
{
    const int known = src < comm->size || src == PHX_ANY_SOURCE;
    phx_message *message = known && !phx_lacks_memory(data, nbytes) ? new_message(data, nbytes, dtype, src, tag) : NULL;
    if (!message)
        return NULL;
    message->receiving = 1;
    phx_mail_receive(comm, message);
    return message;
}

static int is_done(const phx_message *message)
{
    return atomic_load_explicit(&message->done, memory_order_acquire);
}

/* A peer whose end means that the message will not come: its one peer, or any rank if any may send it. */
static int find_lost_peer(phx_comm *comm, const phx_message *message, uint32_t *lost)
{
    for (uint32_t p = 0; p < comm->size; p++)
        if (p != comm->rank && (message->peer == p || message->peer == PHX_ANY_SOURCE) &&
            !phx_place_alive(&comm->places[p])) {
            *lost = p;
            return 1;
        }
    return 0;
}

/* Whether the group's timeout counts for the message and has passed since bytes of it moved. */
static int overdue(phx_comm *comm, phx_message *message, uint64_t now)
{
    if (!message->clock)
        return 0;
    const uint64_t progress = phx_mail_progress(comm, message);
    if (progress != message->progress) {
        message->progress = progress;
        message->clock = now;
    }
    return now - message->clock > comm->timeout_ns;
}

/* Once a slice, by the clock: break the group if the message will not come. A peer may send and then end, so messages
 * are moved once more after its process was found gone. */
static int check(phx_comm *comm, phx_message *message, uint64_t now)
{
    uint32_t lost;
    if (!message->checked)
        message->checked = now;
    if (now - message->checked < PHX_SLICE_NS)
        return PHX_OK;
    message->checked = now;
    if (find_lost_peer(comm, message, &lost)) {
        phx_mail_move(comm);
        return is_done(message) ? PHX_OK : phx_break(comm, PHX_PEER_LOST, lost);
    }
    if (overdue(comm, message, now) && !is_done(message))
        return phx_break(comm, PHX_TIMEOUT, message->peer == PHX_ANY_SOURCE ? comm->rank : message->peer);
    return PHX_OK;
}

int phx_message_test(phx_comm *comm, phx_message *message, int watch)
{
    if (is_done(message))
        return 1;
    phx_mail_move(comm);
    if (!is_done(message) && !phx_broken(comm) && watch)
        check(comm, message, phx_now_ns());
    return is_done(message) || phx_broken(comm);
}

void phx_message_expect(phx_comm *comm, phx_message *message)
{
    (void)comm;
    if (!message->clock)
        message->clock = phx_now_ns();
}

int phx_message_wait(phx_comm *comm, phx_message *message, uint64_t timeout_ns)
{
    struct phx_place *place = &comm->places[comm->rank];
    uint64_t start = 0;
    for (uint32_t idle = 0;; idle++) {
        const uint32_t bell = atomic_load_explicit(&place->bell, memory_order_acquire);
        const struct phx_movement movement = phx_mail_move(comm);
        if (is_done(message))
            return message->status;
        if (movement.moved)
            idle = 0;
        if (movement.ended)
            return PHX_UNDER_WAY;
        if (idle < comm->spin / 4) {
            phx_relax();
            continue;
        }
        if (!start) {
            start = phx_now_ns();
            if (!timeout_ns)
                phx_message_expect(comm, message);
            if (message->peer != PHX_ANY_SOURCE)
                phx_move_apart(comm, message->peer);
        }
        if (phx_broken(comm)) {
            struct phx_breakage why;
            return phx_breakage(comm, &why);
        }
        if (phx_now_ns() - start < PHX_YIELD_NS) {
            sched_yield();
            continue;
        }
        const enum phx_sleep slept = phx_sleep(&place->bell, bell, &place->listening);
        if (slept != PHX_WOKEN && comm->poll && comm->poll())
            return phx_break(comm, PHX_INTERRUPTED, comm->rank);
        const uint64_t now = phx_now_ns();
        const int status = check(comm, message, now);
        if (status)
            return status;
        if (timeout_ns && now - start > timeout_ns && !is_done(message))
            return PHX_UNDER_WAY;
    }
}

uint64_t phx_messages_rest(phx_comm *comm, uint64_t finished)
{
    struct phx_place *place = &comm->places[comm->rank];
    const uint64_t start = phx_now_ns();
    uint64_t moved_at = 0;
    for (;;) {
        const uint32_t bell = atomic_load_explicit(&place->bell, memory_order_acquire);
        const struct phx_movement movement = phx_mail_move(comm);
        const uint64_t now = phx_now_ns();
        if (movement.ended || phx_broken(comm) || movement.finished != finished || now - start > PHX_SLICE_NS)
            return movement.finished;
        if (movement.moved)
            moved_at = now;
        if (now - moved_at < PHX_YIELD_NS)
            sched_yield();
        else
            phx_sleep(&place->bell, bell, &place->listening);
    }
}

void phx_messages_end(phx_comm *comm)
{
    phx_mail_end(comm);
}

uint32_t phx_message_source(const phx_message *message)
{
    return message->peer;
}

void phx_message_free(phx_comm *comm, phx_message *message)
{
    phx_mail_release(comm, message);
}
