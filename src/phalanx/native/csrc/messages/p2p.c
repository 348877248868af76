/* The calls about messages: start one, test it, wait for it, give it back.
 *
 * mail.c moves the bytes; here is what a waiting thread does between its attempts: spin, yield, sleep on the bell of
 * its place, and after each slice check whether the message can still come. Cost of a message: n bytes in, n bytes out,
 * one ring of the bell for every piece of 64 KiB. */
#include <poll.h>
#include <sched.h>
#include <stdlib.h>

#include "segment/call.h"
#include "messages/mail.h"
#include "system/futex.h"

#define UNMET_NS 500000000ull /* how long a receive waits until its sender is dialled, to know whether it is there */

static phx_message *new_message(void *data, const struct phx_end *end, uint32_t peer, uint32_t tag)
{
    phx_message *message = malloc(sizeof *message);
    if (message)
        *message = (phx_message){.data = data, .end = *end, .peer = peer, .tag = tag};
    return message;
}

phx_message *phx_send(phx_comm *comm, const void *data, const struct phx_end *sent, uint32_t dst, uint32_t tag)
{
    const int known = dst < comm->mail->size && !phx_lacks_memory(data, sent->nbytes);
    phx_message *message = known ? new_message((void *)data, sent, dst, tag) : NULL;
    if (message)
        phx_mail_send(comm, message);
    return message;
}

int phx_send_now(phx_comm *comm, const void *data, const struct phx_end *sent, uint32_t dst, uint32_t tag)
{
    return dst < comm->mail->size && !phx_lacks_memory(data, sent->nbytes) && phx_mail_send_now(comm, data, sent, dst, tag);
}

phx_message *phx_recv(phx_comm *comm, void *data, const struct phx_end *expected, uint32_t src, uint32_t tag)
{
    const int known = src < comm->mail->size || src == PHX_ANY_SOURCE;
    phx_message *message = known && !phx_lacks_memory(data, expected->nbytes) ? new_message(data, expected, src, tag) : NULL;
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

static uint32_t peer_of(const phx_message *message)
{
    return atomic_load_explicit(&message->peer, memory_order_relaxed);
}

/* The place of the message's peer; PHX_NOBODY of one on another host, or of any. */
static uint32_t place_of(const phx_comm *comm, const phx_message *message)
{
    const uint32_t peer = peer_of(message);
    return peer == PHX_ANY_SOURCE ? PHX_NOBODY : comm->mail->streams[peer].place;
}

/* How the message's peer went, with its place; of one from any rank, how the first of this host that went otherwise than
 * in order did, or PHX_LEFT if all others have left, of which so many on other hosts have not. */
static enum phx_going find_gone_peer(const phx_comm *comm, const phx_message *message, uint32_t here, uint32_t *gone)
{
    const uint32_t place = place_of(comm, message);
    if (place != PHX_NOBODY)
        return place == comm->rank ? PHX_HERE : phx_peer_life(comm, *gone = place);
    if (peer_of(message) != PHX_ANY_SOURCE)
        return PHX_HERE;
    for (uint32_t p = 0; p < comm->size; p++) {
        const enum phx_going how = p == comm->rank ? PHX_LEFT : phx_peer_life(comm, p);
        here += how == PHX_HERE;
        if (how > PHX_LEFT) {
            *gone = p;
            return how;
        }
    }
    return here ? PHX_HERE : PHX_LEFT;
}

/* Whether the messages' timeout counts for this one and has passed since bytes of it moved. */
static int overdue(phx_comm *comm, phx_message *message, uint64_t elapsed_ns)
{
    if (!message->expected)
        return 0;
    const uint64_t progress = phx_mail_progress(comm, message);
    message->waited = progress == message->progress ? message->waited + phx_waited_ns(elapsed_ns) : 0;
    message->progress = progress;
    return message->waited > comm->message_timeout_ns;
}

/* Once a slice, by the clock: if the message will not come, fail it if its peer has left in order, or is on another host,
 * else break the group. A peer may send and then go, so messages are moved once more after it was found gone. */
static int check(phx_comm *comm, phx_message *message, uint64_t now)
{
    uint32_t gone = PHX_NOBODY;
    if (!message->checked)
        message->checked = now;
    const uint64_t elapsed_ns = now - message->checked;
    if (elapsed_ns < PHX_SLICE_NS)
        return PHX_OK;
    message->checked = now;
    const int elsewhere = comm->mail->size > comm->size && place_of(comm, message) == PHX_NOBODY;
    const uint32_t left = elsewhere ? phx_mail_check_elsewhere(comm, message) : 0;
    if (is_done(message))
        return PHX_OK;
    const enum phx_going how = find_gone_peer(comm, message, left, &gone);
    if (how != PHX_HERE) {
        phx_mail_move(comm);
        if (how == PHX_LEFT && !phx_broken(comm)) /* in a broken group every rank leaves sooner or later */
            phx_mail_fail(comm, message, PHX_PEER_LEFT);
        return is_done(message) ? PHX_OK : phx_break_gone(comm, gone, how);
    }
    if (!overdue(comm, message, elapsed_ns) || is_done(message))
        return PHX_OK;
    const uint32_t place = place_of(comm, message);
    if (!elsewhere)
        return phx_break(comm, PHX_TIMEOUT, place == PHX_NOBODY ? comm->rank : place);
    phx_mail_fail(comm, message, PHX_OVERDUE);
    return PHX_OK;
}

int phx_message_test(phx_comm *comm, phx_message *message, int watch)
{
    if (is_done(message))
        return 1;
    phx_mail_move(comm);
    const uint64_t checked = message->checked;
    if (!is_done(message) && !phx_broken(comm) && watch)
        check(comm, message, phx_now_ns());
    if (is_done(message) || phx_broken(comm))
        return 1;
    return message->checked != checked && phx_mail_is_unmet(comm, message) ? PHX_UNMET : 0;
}

void phx_message_expect(phx_comm *comm, phx_message *message)
{
    (void)comm;
    message->expected = 1;
}

/* Sleep on the connection itself where only what comes from there can end the wait: so one thread is woken, and not two. */
static enum phx_sleep sleep_until_ready(phx_comm *comm, const phx_message *message, uint32_t bell)
{
    const int socket = comm->spin ? -1 : phx_remote_socket(comm, message);
    if (socket < 0) {
        struct phx_place *place = &comm->places[comm->rank];
        phx_mail_watch(comm);
        return phx_sleep(&place->bell, bell, &place->listening);
    }
    struct pollfd awaited = {.fd = socket, .events = POLLIN};
    const int ready = poll(&awaited, 1, (int)(PHX_SLICE_NS / 1000000));
    return ready > 0 ? PHX_WOKEN : ready == 0 ? PHX_SLEPT_OUT : PHX_SIGNALLED;
}

int phx_message_wait(phx_comm *comm, phx_message *message, uint64_t timeout_ns)
{
    struct phx_place *place = &comm->places[comm->rank];
    uint64_t start = 0, looked = 0, waited = 0;
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
            start = looked = phx_now_ns();
            if (!timeout_ns)
                phx_message_expect(comm, message);
            if (place_of(comm, message) != PHX_NOBODY)
                phx_move_apart(comm, place_of(comm, message));
        }
        if (phx_broken(comm)) {
            struct phx_breakage why;
            return phx_breakage(comm, &why);
        }
        if (comm->spin && phx_now_ns() - start < PHX_YIELD_NS) {
            sched_yield();
            continue;
        }
        if (sleep_until_ready(comm, message, bell) != PHX_WOKEN && comm->poll && comm->poll())
            return phx_break(comm, PHX_INTERRUPTED, comm->rank);
        const uint64_t now = phx_now_ns();
        waited += phx_waited_ns(now - looked);
        looked = now;
        const int status = check(comm, message, now);
        if (status)
            return status;
        if (timeout_ns && waited > timeout_ns && !is_done(message))
            return PHX_UNDER_WAY;
        if (!timeout_ns && waited > UNMET_NS && !message->asked && phx_mail_is_unmet(comm, message)) {
            message->asked = 1;
            return PHX_UNMET;
        }
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
        else {
            phx_mail_watch(comm);
            phx_sleep(&place->bell, bell, &place->listening);
        }
    }
}

const char *phx_message_ends(const phx_message *message, struct phx_end *sent, struct phx_end *expected)
{
    *sent = message->sent;
    *expected = message->end;
    return message->line ? message->line : "";
}

uint32_t phx_message_source(const phx_message *message)
{
    return peer_of(message);
}
