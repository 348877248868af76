/* Moving messages between this rank and the others, through one ring for each direction.
 *
 * A message is a header and its bytes in the ring from its sender to its receiver. A thread that waits for one message
 * moves all messages of its rank, so two ranks that send each other more than a ring holds do not block each other. A
 * message whose receive has not been posted stays in its ring, so a sender that is ahead is held up and no rank's
 * memory fills. It is set aside, in memory of its own, only when a receive with another tag waits for what comes after
 * it. */
#include "messages/mail.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "segment/breaking.h"
#include "messages/rings.h"

#define PIECE 65536u /* bytes copied before the other side is notified, so that both copy at the same time */

struct list {
    phx_message *first, *last;
};

struct phx_mail {
    pthread_mutex_t lock;
    int ended;              /* nothing moves any more: the owners of the data may free it */
    uint64_t finished;      /* how many messages have been done */
    struct list posted;     /* receives without a message yet, in the order of the calls */
    struct list aside;      /* messages without a receive, in the order of their arrival */
    struct list *sends;     /* by destination */
    phx_message **arriving; /* by source: where the bytes that come next belong */
};

static void append(struct list *list, phx_message *message)
{
    message->next = NULL;
    if (list->last)
        list->last->next = message;
    else
        list->first = message;
    list->last = message;
}

static void take_out(struct list *list, phx_message *message)
{
    phx_message *before = NULL;
    for (phx_message *m = list->first; m != message; m = m->next)
        before = m;
    *(before ? &before->next : &list->first) = message->next;
    if (list->last == message)
        list->last = before;
    message->next = NULL;
}

static int contains(const struct list *list, const phx_message *message)
{
    const phx_message *m = list->first;
    while (m && m != message)
        m = m->next;
    return m != NULL;
}

static void free_list(struct list *list)
{
    for (phx_message *m = list->first, *next; m; m = next) {
        next = m->next;
        free(m);
    }
}

struct phx_mail *phx_mail_open(uint32_t size)
{
    struct phx_mail *mail = calloc(1, sizeof *mail);
    if (!mail)
        return NULL;
    mail->sends = calloc(size, sizeof *mail->sends);
    mail->arriving = calloc(size, sizeof(phx_message *));
    if (!mail->sends || !mail->arriving) {
        free(mail->sends);
        free(mail->arriving);
        free(mail);
        return NULL;
    }
    pthread_mutex_init(&mail->lock, NULL);
    return mail;
}

void phx_mail_close(struct phx_mail *mail, uint32_t size)
{
    /* A message that is set aside may be arriving too, and a receive that waits for one is in no list. */
    for (phx_message *m = mail->aside.first; m; m = m->next) {
        if (mail->arriving[m->peer] == m)
            mail->arriving[m->peer] = NULL;
        free(m->claimed_by);
        free(m->data);
    }
    for (uint32_t p = 0; p < size; p++) {
        free_list(&mail->sends[p]);
        free(mail->arriving[p]);
    }
    free_list(&mail->posted);
    free_list(&mail->aside);
    pthread_mutex_destroy(&mail->lock);
    free(mail->sends);
    free(mail->arriving);
    free(mail);
}

/* Whether messages may move. In a broken group their owners have an error for them, and may have freed the data. */
static int may_move(const phx_comm *comm)
{
    return !phx_broken(comm) && !comm->mail->ended;
}

static void finish(phx_comm *comm, phx_message *message, int status)
{
    message->status = status;
    comm->mail->finished++;
    if (message->abandoned) {
        free(message);
        return;
    }
    atomic_store_explicit(&message->done, 1, memory_order_release);
    phx_ring_bell(&comm->places[comm->rank]); /* another thread of this rank may be the one that waits for it */
}

/* -- sending ---------------------------------------------------------------------------------------------------- */

/* How many bytes of a message are put in before its receiver is notified. A receiver that streams reads faster from the
 * cache that all cores share than from the sender's own, so it is kept as far behind as the ring allows: 64 MiB took
 * 4.0 ms instead of 6.5. */
static uint64_t piece_bytes(const phx_comm *comm, const phx_message *message)
{
    const uint64_t quarter = phx_ring_bytes(comm->size) / 4;
    return message->end.nbytes >= comm->stream_bytes && quarter > PIECE ? quarter : PIECE;
}

/* Whether nobody will read what is sent to this rank. One that leaves a broken group has broken it, or seen it broken,
 * before it told that it leaves. */
static int has_left(const phx_comm *comm, uint32_t dst)
{
    return atomic_load_explicit(&comm->places[dst].going, memory_order_acquire) == PHX_LEFT && !phx_broken(comm);
}

static int move_sends(phx_comm *comm, uint32_t dst)
{
    struct list *sends = &comm->mail->sends[dst];
    struct phx_ring *ring = phx_ring_of(comm, comm->rank, dst);
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    int moved = 0;
    while (sends->first && has_left(comm, dst)) {
        phx_message *message = sends->first;
        take_out(sends, message);
        finish(comm, message, PHX_PEER_LEFT);
        moved = 1;
    }
    while (sends->first) {
        phx_message *message = sends->first;
        uint64_t room = phx_ring_bytes(comm->size) - (head - atomic_load_explicit(&ring->tail, memory_order_acquire));
        const int begins = !message->started;
        if (begins && room < PHX_ALIGN)
            break;
        uint64_t at = head;
        if (begins) {
            const struct phx_message_header header = {message->end, message->tag};
            phx_ring_write(comm, dst, at, &header, sizeof header);
            at += PHX_ALIGN;
            room -= PHX_ALIGN;
            message->started = 1;
        }
        uint64_t length = message->end.nbytes - message->moved;
        const uint64_t most = piece_bytes(comm, message);
        if (length > most)
            length = most;
        if (phx_padded(length) > room)
            length = room / PHX_ALIGN * PHX_ALIGN;
        phx_ring_write(comm, dst, at, message->data + message->moved, length);
        at += phx_padded(length);
        message->moved += length;
        if (at == head && message->moved < message->end.nbytes)
            break;
        head = at;
        atomic_store_explicit(&ring->head, head, memory_order_release);
        phx_ring_bell_of(comm, dst);
        moved = 1;
        if (message->moved == message->end.nbytes) {
            take_out(sends, message);
            finish(comm, message, PHX_OK);
        }
    }
    return moved;
}

void phx_mail_send(phx_comm *comm, phx_message *message)
{
    const uint32_t dst = message->peer;
    pthread_mutex_lock(&comm->mail->lock);
    append(&comm->mail->sends[dst], message);
    if (may_move(comm))
        move_sends(comm, dst);
    pthread_mutex_unlock(&comm->mail->lock);
}

int phx_mail_send_now(phx_comm *comm, const void *data, const struct phx_end *sent, uint32_t dst, uint32_t tag)
{
    const uint64_t nbytes = sent->nbytes;
    struct phx_ring *ring = phx_ring_of(comm, comm->rank, dst);
    int is_sent = 0;
    pthread_mutex_lock(&comm->mail->lock);
    const uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    const uint64_t taken = head - atomic_load_explicit(&ring->tail, memory_order_acquire);
    if (!comm->mail->sends[dst].first && nbytes <= PIECE && may_move(comm) && !has_left(comm, dst) &&
        PHX_ALIGN + phx_padded(nbytes) <= phx_ring_bytes(comm->size) - taken) {
        const struct phx_message_header header = {*sent, tag};
        phx_ring_write(comm, dst, head, &header, sizeof header);
        phx_ring_write(comm, dst, head + PHX_ALIGN, data, nbytes);
        atomic_store_explicit(&ring->head, head + PHX_ALIGN + phx_padded(nbytes), memory_order_release);
        phx_ring_bell_of(comm, dst);
        is_sent = 1;
    }
    pthread_mutex_unlock(&comm->mail->lock);
    return is_sent;
}

/* -- receiving --------------------------------------------------------------------------------------------------- */

static int fits(const phx_message *receive, uint32_t src, uint32_t tag)
{
    return (receive->peer == src || receive->peer == PHX_ANY_SOURCE) && receive->tag == tag;
}

static int agree(const phx_message *receive, const struct phx_end *sent)
{
    return receive->end.nbytes == sent->nbytes && receive->end.dtype == sent->dtype;
}

static phx_message *set_aside(struct phx_mail *mail, uint32_t src, const struct phx_message_header *header)
{
    phx_message *aside = malloc(sizeof *aside);
    char *data = malloc(header->sent.nbytes ? header->sent.nbytes : 1);
    if (!aside || !data) {
        free(aside);
        free(data);
        return NULL;
    }
    *aside = (phx_message){.data = data, .end = header->sent, .peer = src, .tag = header->tag, .receiving = 1};
    append(&mail->aside, aside);
    return aside;
}

/* The receive that this message is for. If there is none, but another receive waits for a later message of this ring, a
 * new message in which this one is set aside; else NULL. */
static phx_message *claim(struct phx_mail *mail, uint32_t src, const struct phx_message_header *header)
{
    int in_the_way = 0;
    for (phx_message *m = mail->posted.first; m; m = m->next) {
        if (fits(m, src, header->tag)) {
            take_out(&mail->posted, m);
            m->peer = src;
            return m;
        }
        in_the_way |= m->peer == src || m->peer == PHX_ANY_SOURCE;
    }
    return in_the_way ? set_aside(mail, src, header) : NULL;
}

static void hand_over(phx_comm *comm, phx_message *aside, phx_message *receive)
{
    take_out(&comm->mail->aside, aside);
    memcpy(receive->data, aside->data, aside->end.nbytes);
    free(aside->data);
    free(aside);
    finish(comm, receive, PHX_OK);
}

/* All bytes of the message are there. */
static void arrived(phx_comm *comm, phx_message *message)
{
    for (phx_message *m = comm->mail->aside.first; m; m = m->next)
        if (m == message) {
            atomic_store_explicit(&message->done, 1, memory_order_release);
            if (message->claimed_by)
                hand_over(comm, message, message->claimed_by);
            return;
        }
    finish(comm, message, PHX_OK);
}

static int move_arrivals(phx_comm *comm, uint32_t src)
{
    struct phx_ring *ring = phx_ring_of(comm, src, comm->rank);
    phx_message **arriving = &comm->mail->arriving[src];
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    int moved = 0;
    for (;;) {
        uint64_t there = atomic_load_explicit(&ring->head, memory_order_acquire) - tail;
        if (there == 0)
            return moved;
        uint64_t at = tail;
        if (!*arriving) {
            struct phx_message_header header;
            phx_ring_read(comm, src, tail, &header, sizeof header, 0);
            phx_message *message = claim(comm->mail, src, &header);
            if (!message)
                return moved;
            if (!agree(message, &header.sent)) {
                finish(comm, message, phx_break_message(comm, src, &header.sent, &message->end));
                return 1;
            }
            *arriving = message;
            at += PHX_ALIGN;
            there -= PHX_ALIGN;
        }
        phx_message *message = *arriving;
        uint64_t length = message->end.nbytes - message->moved;
        if (length > PIECE)
            length = PIECE;
        if (phx_padded(length) > there)
            length = there;
        phx_ring_read(comm, src, at, message->data + message->moved, length, message->end.nbytes);
        at += phx_padded(length);
        message->moved += length;
        if (message->moved == message->end.nbytes) {
            *arriving = NULL;
            arrived(comm, message);
        }
        if (at != tail) {
            tail = at;
            atomic_store_explicit(&ring->tail, tail, memory_order_release);
            phx_ring_bell_of(comm, src);
            moved = 1;
        }
    }
}

static int move_all(phx_comm *comm)
{
    int moved = 0;
    for (uint32_t p = 0; p < comm->size && may_move(comm); p++) {
        if (comm->mail->sends[p].first)
            moved |= move_sends(comm, p);
        moved |= move_arrivals(comm, p);
    }
    return moved;
}

void phx_mail_receive(phx_comm *comm, phx_message *receive)
{
    pthread_mutex_lock(&comm->mail->lock);
    phx_message *aside = comm->mail->aside.first;
    while (aside && (aside->claimed_by || !fits(receive, aside->peer, aside->tag)))
        aside = aside->next;
    if (!aside) {
        append(&comm->mail->posted, receive);
        move_all(comm);
    } else {
        receive->peer = aside->peer;
        if (!agree(receive, &aside->end))
            finish(comm, receive, phx_break_message(comm, aside->peer, &aside->end, &receive->end));
        else if (atomic_load_explicit(&aside->done, memory_order_relaxed))
            hand_over(comm, aside, receive);
        else
            aside->claimed_by = receive;
    }
    pthread_mutex_unlock(&comm->mail->lock);
}

/* -- both -------------------------------------------------------------------------------------------------------- */

struct phx_movement phx_mail_move(phx_comm *comm)
{
    pthread_mutex_lock(&comm->mail->lock);
    const int moved = move_all(comm);
    const struct phx_movement movement = {moved, comm->mail->ended, comm->mail->finished};
    pthread_mutex_unlock(&comm->mail->lock);
    return movement;
}

uint64_t phx_mail_progress(phx_comm *comm, const phx_message *message)
{
    const uint32_t peer = message->peer;
    uint64_t progress;
    pthread_mutex_lock(&comm->mail->lock);
    /* For a send: the ring's head, since everything ahead of it in the ring must go first. For a receive: the ring's
     * tail, but only while a message is being read from the ring. Traffic with other tags must not count, or a message
     * that never comes would never time out. */
    if (!message->receiving)
        progress = atomic_load_explicit(&phx_ring_of(comm, comm->rank, peer)->head, memory_order_relaxed);
    else if (peer == PHX_ANY_SOURCE || !comm->mail->arriving[peer])
        progress = message->progress;
    else
        progress = atomic_load_explicit(&phx_ring_of(comm, peer, comm->rank)->tail, memory_order_relaxed);
    pthread_mutex_unlock(&comm->mail->lock);
    return progress;
}

void phx_mail_fail(phx_comm *comm, phx_message *message, int status)
{
    struct phx_mail *mail = comm->mail;
    pthread_mutex_lock(&mail->lock);
    const uint32_t peer = message->peer; /* PHX_ANY_SOURCE only while the receive is posted */
    if (!atomic_load_explicit(&message->done, memory_order_relaxed)) {
        if (!message->receiving)
            take_out(&mail->sends[peer], message);
        else if (contains(&mail->posted, message))
            take_out(&mail->posted, message);
        else if (mail->arriving[peer] == message)
            mail->arriving[peer] = NULL; /* its rest will not come, and nothing after it */
        for (phx_message *m = mail->aside.first; m; m = m->next)
            if (m->claimed_by == message)
                m->claimed_by = NULL;
        finish(comm, message, status);
    }
    pthread_mutex_unlock(&mail->lock);
}

int phx_mail_withdraw(phx_comm *comm, phx_message *receive)
{
    struct phx_mail *mail = comm->mail;
    pthread_mutex_lock(&mail->lock);
    if (contains(&mail->posted, receive)) {
        take_out(&mail->posted, receive);
        finish(comm, receive, PHX_PEER_LEFT);
    }
    const int done = atomic_load_explicit(&receive->done, memory_order_relaxed);
    const int without_message = done && receive->status == PHX_PEER_LEFT; /* also if it had failed so before */
    pthread_mutex_unlock(&mail->lock);
    return without_message;
}

void phx_mail_end(phx_comm *comm)
{
    struct phx_place *place = &comm->places[comm->rank];
    pthread_mutex_lock(&comm->mail->lock);
    comm->mail->ended = 1;
    pthread_mutex_unlock(&comm->mail->lock);
    atomic_fetch_add_explicit(&place->bell, 1, memory_order_seq_cst);
    phx_wake(&place->bell);
}

void phx_mail_release(phx_comm *comm, phx_message *message)
{
    pthread_mutex_lock(&comm->mail->lock);
    if (atomic_load_explicit(&message->done, memory_order_relaxed))
        free(message);
    else
        message->abandoned = 1;
    pthread_mutex_unlock(&comm->mail->lock);
}
