/* Sending and receiving between two ranks, with tags and from any source.
 *
 * A message is a header and its bytes in the ring from its sender to its receiver. Whoever waits for a message of its
 * own moves along all messages of its rank, so two ranks that send each other more than a ring holds do not lock each
 * other out. A message whose receive has not been posted stays in its ring, so a sender that is ahead is held up and
 * nobody's memory fills; it is set aside only when a receive behind it with another tag waits for it to get out of
 * the way. Cost: n bytes in, n bytes out, one ring of the bell for every PIECE. */
#include "p2p.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "rings.h"
#include "wait.h"

#define PIECE 65536u /* how much is copied before the other side is told: both copy at the same time */
#define SPIN_YIELD_NS 200000ull

struct phx_message {
    char *data;
    uint64_t nbytes, moved;
    uint32_t peer, tag, dtype;
    int receiving, started, status, abandoned;
    _Atomic int done;
    /* Of whoever looks after the message, one thread at a time: when it last looked whether the peer lives; since when
     * the group's timeout counts (0: it does not), and how far the message had come then. */
    uint64_t looked, clock, progress;
    struct phx_message *claimed_by; /* of a message set aside: the receive that waits for its rest */
    struct phx_message *next;
};

struct list {
    phx_message *first, *last;
};

struct phx_mail {
    pthread_mutex_t lock;
    int ended;               /* nothing moves any more: the owners of the data may free it */
    uint64_t finished;       /* how many messages have been done */
    struct list posted;      /* receives without a message yet, in the order of the calls */
    struct list aside;       /* messages without a receive, in the order of their arrival */
    struct list *sends;      /* by destination */
    phx_message **arriving;  /* by source: where the bytes that come next belong */
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

static void free_list(struct list *list)
{
    for (phx_message *m = list->first, *next; m; m = next) {
        next = m->next;
        free(m);
    }
}

void phx_mail_close(struct phx_mail *mail, uint32_t size)
{
    /* What is set aside may be arriving too. A receive that waits for it is in no list. */
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

/* -- moving ---------------------------------------------------------------------------------------------------- */

static void finish(phx_comm *comm, phx_message *message, int status)
{
    struct phx_place *place = &comm->places[comm->rank];
    message->status = status;
    comm->mail->finished++;
    if (message->abandoned) {
        free(message);
        return;
    }
    atomic_store_explicit(&message->done, 1, memory_order_release);
    /* Another thread of this rank may be the one that waits for it. */
    atomic_fetch_add_explicit(&place->bell, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&place->listening, memory_order_seq_cst))
        phx_futex_wake(&place->bell);
}

/* How much of a message is put in before its receiver is told. A receiver that streams reads faster from the cache all
 * cores share than from the sender's own, so it is kept as far behind as the ring allows: 64 MiB in 4.0 ms, not 6.5. */
static uint64_t piece_bytes(const phx_comm *comm, const phx_message *message)
{
    const uint64_t quarter = phx_ring_bytes(comm->size) / 4;
    return message->nbytes >= comm->stream_bytes && quarter > PIECE ? quarter : PIECE;
}

static int move_sends(phx_comm *comm, uint32_t dst)
{
    struct list *sends = &comm->mail->sends[dst];
    struct phx_ring *ring = phx_ring_of(comm, comm->rank, dst);
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    int moved = 0;
    while (sends->first) {
        phx_message *message = sends->first;
        uint64_t room = phx_ring_bytes(comm->size) - (head - atomic_load_explicit(&ring->tail, memory_order_acquire));
        const int begins = !message->started;
        if (begins && room < PHX_ALIGN)
            break;
        uint64_t at = head;
        if (begins) {
            const struct phx_message_header header = {message->nbytes, message->tag, message->dtype};
            phx_ring_write(comm, dst, at, &header, sizeof header);
            at += PHX_ALIGN;
            room -= PHX_ALIGN;
            message->started = 1;
        }
        uint64_t length = message->nbytes - message->moved;
        const uint64_t most = piece_bytes(comm, message);
        if (length > most)
            length = most;
        if (phx_padded(length) > room)
            length = room / PHX_ALIGN * PHX_ALIGN;
        phx_ring_write(comm, dst, at, message->data + message->moved, length);
        at += phx_padded(length);
        message->moved += length;
        if (at == head && message->moved < message->nbytes)
            break;
        head = at;
        atomic_store_explicit(&ring->head, head, memory_order_release);
        phx_ring_bell(comm, dst);
        moved = 1;
        if (message->moved == message->nbytes) {
            take_out(sends, message);
            finish(comm, message, PHX_OK);
        }
    }
    return moved;
}

static int fits(const phx_message *receive, uint32_t src, uint32_t tag)
{
    return (receive->peer == src || receive->peer == PHX_ANY_SOURCE) && receive->tag == tag;
}

/* The receive this message is for; or a new one to set it aside in, when another receive waits behind it; or NULL. */
static phx_message *claim(phx_comm *comm, uint32_t src, const struct phx_message_header *header)
{
    struct phx_mail *mail = comm->mail;
    int waited_behind = 0;
    for (phx_message *m = mail->posted.first; m; m = m->next) {
        if (fits(m, src, header->tag)) {
            take_out(&mail->posted, m);
            m->peer = src;
            return m;
        }
        waited_behind |= m->peer == src || m->peer == PHX_ANY_SOURCE;
    }
    if (!waited_behind)
        return NULL;
    phx_message *aside = calloc(1, sizeof *aside);
    if (!aside)
        return NULL;
    aside->data = malloc(header->nbytes ? header->nbytes : 1);
    if (!aside->data) {
        free(aside);
        return NULL;
    }
    *aside = (phx_message){.data = aside->data, .nbytes = header->nbytes, .peer = src, .tag = header->tag,
                           .dtype = header->dtype, .receiving = 1};
    append(&mail->aside, aside);
    return aside;
}

static void hand_over(phx_comm *comm, phx_message *aside, phx_message *receive)
{
    take_out(&comm->mail->aside, aside);
    memcpy(receive->data, aside->data, aside->nbytes);
    free(aside->data);
    free(aside);
    finish(comm, receive, PHX_OK);
}

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

static int agree(const phx_message *receive, uint64_t nbytes, uint32_t dtype)
{
    return receive->nbytes == nbytes && receive->dtype == dtype;
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
            phx_message *message = claim(comm, src, &header);
            if (!message)
                return moved;
            if (!agree(message, header.nbytes, header.dtype)) {
                finish(comm, message, phx_break(comm, PHX_MISMATCH, src));
                return 1;
            }
            *arriving = message;
            at += PHX_ALIGN;
            there -= PHX_ALIGN;
        }
        phx_message *message = *arriving;
        uint64_t length = message->nbytes - message->moved;
        if (length > PIECE)
            length = PIECE;
        if (phx_padded(length) > there)
            length = there;
        phx_ring_read(comm, src, at, message->data + message->moved, length, message->nbytes);
        at += phx_padded(length);
        message->moved += length;
        if (message->moved == message->nbytes) {
            *arriving = NULL;
            arrived(comm, message);
        }
        if (at != tail) {
            tail = at;
            atomic_store_explicit(&ring->tail, tail, memory_order_release);
            phx_ring_bell(comm, src);
            moved = 1;
        }
    }
}

/* Whether messages may move. */
static int may_move(const phx_comm *comm)
{
    return !phx_broken(comm) && !comm->mail->ended;
}

static int move_all(phx_comm *comm)
{
    int moved = 0;
    /* In a broken group the owners of the data have been told that their messages failed, and may have freed it. */
    for (uint32_t p = 0; p < comm->size && may_move(comm); p++) {
        if (comm->mail->sends[p].first)
            moved |= move_sends(comm, p);
        moved |= move_arrivals(comm, p);
    }
    return moved;
}

/* -- calls ------------------------------------------------------------------------------------------------------ */

static phx_message *new_message(void *data, uint64_t nbytes, uint32_t dtype, uint32_t peer, uint32_t tag)
{
    phx_message *message = malloc(sizeof *message);
    if (message)
        *message = (phx_message){.data = data, .nbytes = nbytes, .peer = peer, .tag = tag, .dtype = dtype};
    return message;
}

phx_message *phx_send(phx_comm *comm, const void *data, uint64_t nbytes, uint32_t dtype, uint32_t dst, uint32_t tag)
{
    phx_message *message = dst < comm->size ? new_message((void *)data, nbytes, dtype, dst, tag) : NULL;
    if (!message)
        return NULL;
    pthread_mutex_lock(&comm->mail->lock);
    append(&comm->mail->sends[dst], message);
    if (may_move(comm))
        move_sends(comm, dst);
    pthread_mutex_unlock(&comm->mail->lock);
    return message;
}

int phx_send_now(phx_comm *comm, const void *data, uint64_t nbytes, uint32_t dtype, uint32_t dst, uint32_t tag)
{
    if (dst >= comm->size)
        return 0;
    struct phx_ring *ring = phx_ring_of(comm, comm->rank, dst);
    int sent = 0;
    pthread_mutex_lock(&comm->mail->lock);
    const uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    const uint64_t taken = head - atomic_load_explicit(&ring->tail, memory_order_acquire);
    if (!comm->mail->sends[dst].first && nbytes <= PIECE && may_move(comm) &&
        PHX_ALIGN + phx_padded(nbytes) <= phx_ring_bytes(comm->size) - taken) {
        const struct phx_message_header header = {nbytes, tag, dtype};
        phx_ring_write(comm, dst, head, &header, sizeof header);
        phx_ring_write(comm, dst, head + PHX_ALIGN, data, nbytes);
        atomic_store_explicit(&ring->head, head + PHX_ALIGN + phx_padded(nbytes), memory_order_release);
        phx_ring_bell(comm, dst);
        sent = 1;
    }
    pthread_mutex_unlock(&comm->mail->lock);
    return sent;
}

phx_message *phx_recv(phx_comm *comm, void *data, uint64_t nbytes, uint32_t dtype, uint32_t src, uint32_t tag)
{
    const int known = src < comm->size || src == PHX_ANY_SOURCE;
    phx_message *message = known ? new_message(data, nbytes, dtype, src, tag) : NULL;
    if (!message)
        return NULL;
    message->receiving = 1;
    pthread_mutex_lock(&comm->mail->lock);
    phx_message *aside = comm->mail->aside.first;
    while (aside && (aside->claimed_by || !fits(message, aside->peer, aside->tag)))
        aside = aside->next;
    if (!aside) {
        append(&comm->mail->posted, message);
        move_all(comm);
    } else {
        message->peer = aside->peer;
        if (!agree(message, aside->nbytes, aside->dtype))
            finish(comm, message, phx_break(comm, PHX_MISMATCH, aside->peer));
        else if (atomic_load_explicit(&aside->done, memory_order_relaxed))
            hand_over(comm, aside, message);
        else
            aside->claimed_by = message;
    }
    pthread_mutex_unlock(&comm->mail->lock);
    return message;
}

/* A peer whose end means that the message will not come: its one peer, or any rank if anyone may send it. */
static int lost_peer(phx_comm *comm, const phx_message *message, uint32_t *lost)
{
    for (uint32_t p = 0; p < comm->size; p++)
        if (p != comm->rank && (message->peer == p || message->peer == PHX_ANY_SOURCE) &&
            !phx_place_alive(&comm->places[p])) {
            *lost = p;
            return 1;
        }
    return 0;
}

static int is_done(const phx_message *message)
{
    return atomic_load_explicit(&message->done, memory_order_acquire);
}

static int moved_along(phx_comm *comm)
{
    pthread_mutex_lock(&comm->mail->lock);
    const int moved = move_all(comm);
    pthread_mutex_unlock(&comm->mail->lock);
    return moved;
}

/* A number that changes when bytes of the message move, or bytes that it waits behind. Without its own part in what
 * arrives a receive has not come further: other messages, of other tags, may come all the time. */
static uint64_t progress_of(const phx_comm *comm, const phx_message *message)
{
    const uint32_t peer = message->peer;
    if (!message->receiving)
        return atomic_load_explicit(&phx_ring_of(comm, comm->rank, peer)->head, memory_order_relaxed);
    if (peer == PHX_ANY_SOURCE || !comm->mail->arriving[peer])
        return message->progress;
    return atomic_load_explicit(&phx_ring_of(comm, peer, comm->rank)->tail, memory_order_relaxed);
}

/* Whether the group's timeout counts for the message and has passed since bytes of it moved. */
static int overdue(phx_comm *comm, phx_message *message, uint64_t now)
{
    if (!message->clock)
        return 0;
    pthread_mutex_lock(&comm->mail->lock);
    const uint64_t progress = progress_of(comm, message);
    pthread_mutex_unlock(&comm->mail->lock);
    if (progress != message->progress) {
        message->progress = progress;
        message->clock = now;
    }
    return now - message->clock > comm->timeout_ns;
}

/* Once a slice, by the clock: break the group if a message that somebody waits for will not come. The order matters: a
 * peer may send and end right after, so look at the message last. */
static int look(phx_comm *comm, phx_message *message, uint64_t now)
{
    uint32_t lost;
    if (!message->looked)
        message->looked = now;
    if (now - message->looked < PHX_SLICE_NS)
        return PHX_OK;
    message->looked = now;
    if (lost_peer(comm, message, &lost)) {
        moved_along(comm);
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
    moved_along(comm);
    if (!is_done(message) && !phx_broken(comm) && watch)
        look(comm, message, phx_now_ns());
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
        pthread_mutex_lock(&comm->mail->lock);
        const int moved = move_all(comm), ended = comm->mail->ended;
        pthread_mutex_unlock(&comm->mail->lock);
        if (is_done(message))
            return message->status;
        if (moved)
            idle = 0;
        if (ended)
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
        if (phx_now_ns() - start < SPIN_YIELD_NS) {
            sched_yield();
            continue;
        }
        const int slept = phx_sleep(&place->bell, bell, &place->listening);
        if (slept != PHX_WOKEN && comm->poll && comm->poll())
            return phx_break(comm, PHX_INTERRUPTED, comm->rank);
        const uint64_t now = phx_now_ns();
        const int status = look(comm, message, now);
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
        pthread_mutex_lock(&comm->mail->lock);
        const int moved = move_all(comm), stop = !may_move(comm);
        const uint64_t now_finished = comm->mail->finished, now = phx_now_ns();
        pthread_mutex_unlock(&comm->mail->lock);
        if (stop || now_finished != finished || now - start > PHX_SLICE_NS)
            return now_finished;
        if (moved)
            moved_at = now;
        if (now - moved_at < SPIN_YIELD_NS)
            sched_yield();
        else
            phx_sleep(&place->bell, bell, &place->listening);
    }
}

void phx_messages_end(phx_comm *comm)
{
    struct phx_place *place = &comm->places[comm->rank];
    pthread_mutex_lock(&comm->mail->lock);
    comm->mail->ended = 1;
    pthread_mutex_unlock(&comm->mail->lock);
    atomic_fetch_add_explicit(&place->bell, 1, memory_order_seq_cst);
    phx_futex_wake(&place->bell);
}

uint32_t phx_message_source(const phx_message *message)
{
    return message->peer;
}

void phx_message_free(phx_comm *comm, phx_message *message)
{
    pthread_mutex_lock(&comm->mail->lock);
    if (atomic_load_explicit(&message->done, memory_order_relaxed))
        free(message);
    else
        message->abandoned = 1;
    pthread_mutex_unlock(&comm->mail->lock);
}
