/* Moving messages between this rank and the others: which goes to which receive, and the rings to ranks of this host, one
 * for each direction. remote.c has the connections to ranks of other hosts.
 *
 * A message is a header and its bytes in the ring from its sender to its receiver. A thread that waits for one message
 * moves all messages of its rank, so two ranks that send each other more than a ring holds do not block each other. A
 * message whose receive has not been posted stays in its ring, so a sender that is ahead is held up and no rank's
 * memory fills. It is set aside, in memory of its own, only when a receive with another tag waits for what comes after
 * it. */
#include "messages/mail.h"

#include <stdlib.h>
#include <string.h>

#include "messages/rings.h"

#define PIECE PHX_PIECE /* bytes copied before the other side is notified, so that both copy at the same time */

void phx_list_append(struct phx_list *list, phx_message *message)
{
    message->next = NULL;
    if (list->last)
        list->last->next = message;
    else
        list->first = message;
    list->last = message;
}

void phx_list_take_out(struct phx_list *list, phx_message *message)
{
    phx_message *before = NULL;
    for (phx_message *m = list->first; m != message; m = m->next)
        before = m;
    *(before ? &before->next : &list->first) = message->next;
    if (list->last == message)
        list->last = before;
    message->next = NULL;
}

static int contains(const struct phx_list *list, const phx_message *message)
{
    const phx_message *m = list->first;
    while (m && m != message)
        m = m->next;
    return m != NULL;
}

static void free_message(phx_message *message)
{
    if (message)
        free(message->line);
    free(message);
}

static void free_list(struct phx_list *list)
{
    for (phx_message *m = list->first, *next; m; m = next) {
        next = m->next;
        free_message(m);
    }
}

/* Have the mail number ranks as a group of so many does; `ranks` are those of this host. 0 if there is no memory. */
static int number(struct phx_mail *mail, uint32_t size, const int32_t *ranks)
{
    const uint32_t here = mail->comm->size;
    struct phx_stream *streams = calloc(size, sizeof *streams);
    uint32_t *own = calloc(here, sizeof *own), *reached = calloc(size, sizeof *reached);
    if (!streams || !own || !reached) {
        free(streams);
        free(own);
        free(reached);
        return 0;
    }
    for (uint32_t rank = 0; rank < size; rank++)
        streams[rank].place = PHX_NOBODY;
    for (uint32_t place = 0; place < here; place++)
        streams[own[place] = ranks ? (uint32_t)ranks[place] : place].place = place;
    free(mail->streams);
    free(mail->ranks);
    free(mail->reached);
    mail->streams = streams;
    mail->ranks = own;
    mail->reached = reached;
    mail->size = size;
    return 1;
}

struct phx_mail *phx_mail_open(phx_comm *comm)
{
    struct phx_mail *mail = calloc(1, sizeof *mail);
    if (!mail)
        return NULL;
    mail->comm = comm;
    if (!number(mail, comm->size, NULL)) {
        free(mail);
        return NULL;
    }
    pthread_mutex_init(&mail->lock, NULL);
    return mail;
}

int phx_messages_join(phx_comm *comm, uint32_t size, const int32_t *here)
{
    for (uint32_t place = 0; place < comm->size; place++)
        if ((uint32_t)here[place] >= size)
            return PHX_BAD_ARGUMENT;
    return number(comm->mail, size, here) ? PHX_OK : PHX_SYSTEM;
}

void phx_mail_close(struct phx_mail *mail)
{
    phx_ready_leave(mail);
    for (phx_message *m = mail->aside.first; m; m = m->next) {
        if (mail->streams[m->peer].arriving == m)
            mail->streams[m->peer].arriving = NULL;
        free(m->data);
    }
    for (uint32_t p = 0; p < mail->size; p++) {
        free_list(&mail->streams[p].sends);
        free_message(mail->streams[p].arriving);
    }
    free_list(&mail->posted);
    free_list(&mail->aside);
    phx_remote_free(mail);
    pthread_mutex_destroy(&mail->lock);
    free(mail->streams);
    free(mail->ranks);
    free(mail->reached);
    free(mail);
}

void phx_mail_finish(phx_comm *comm, phx_message *message, int status)
{
    message->status = status;
    comm->mail->finished++;
    if (message->abandoned) {
        free_message(message);
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
static int has_left(const phx_comm *comm, uint32_t place)
{
    return atomic_load_explicit(&comm->places[place].going, memory_order_acquire) == PHX_LEFT && !phx_broken(comm);
}

/* Through the ring to a place. */
static int move_sends_here(phx_comm *comm, uint32_t place)
{
    struct phx_list *sends = &comm->mail->streams[comm->mail->ranks[place]].sends;
    struct phx_ring *ring = phx_ring_of(comm, comm->rank, place);
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    int moved = 0;
    while (sends->first && has_left(comm, place)) {
        phx_message *message = sends->first;
        phx_list_take_out(sends, message);
        phx_mail_finish(comm, message, PHX_PEER_LEFT);
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
            phx_ring_write(comm, place, at, &header, sizeof header);
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
        phx_ring_write(comm, place, at, message->data + message->moved, length);
        at += phx_padded(length);
        message->moved += length;
        if (at == head && message->moved < message->end.nbytes)
            break;
        head = at;
        atomic_store_explicit(&ring->head, head, memory_order_release);
        phx_ring_bell_of(comm, place);
        moved = 1;
        if (message->moved == message->end.nbytes) {
            phx_list_take_out(sends, message);
            phx_mail_finish(comm, message, PHX_OK);
        }
    }
    return moved;
}

static int move_sends(phx_comm *comm, uint32_t dst)
{
    const uint32_t place = comm->mail->streams[dst].place;
    return place == PHX_NOBODY ? phx_remote_move_sends(comm, dst) : move_sends_here(comm, place);
}

void phx_mail_send(phx_comm *comm, phx_message *message)
{
    const uint32_t dst = message->peer;
    pthread_mutex_lock(&comm->mail->lock);
    phx_list_append(&comm->mail->streams[dst].sends, message);
    if (phx_mail_may_move(comm))
        move_sends(comm, dst);
    pthread_mutex_unlock(&comm->mail->lock);
}

static int send_now_here(phx_comm *comm, const void *data, const struct phx_end *sent, uint32_t place, uint32_t tag)
{
    const uint64_t nbytes = sent->nbytes;
    struct phx_ring *ring = phx_ring_of(comm, comm->rank, place);
    const uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    const uint64_t taken = head - atomic_load_explicit(&ring->tail, memory_order_acquire);
    if (nbytes > PIECE || has_left(comm, place) ||
        PHX_ALIGN + phx_padded(nbytes) > phx_ring_bytes(comm->size) - taken)
        return 0;
    const struct phx_message_header header = {*sent, tag};
    phx_ring_write(comm, place, head, &header, sizeof header);
    phx_ring_write(comm, place, head + PHX_ALIGN, data, nbytes);
    atomic_store_explicit(&ring->head, head + PHX_ALIGN + phx_padded(nbytes), memory_order_release);
    phx_ring_bell_of(comm, place);
    return 1;
}

int phx_mail_send_now(phx_comm *comm, const void *data, const struct phx_end *sent, uint32_t dst, uint32_t tag)
{
    const struct phx_stream *stream = &comm->mail->streams[dst];
    int is_sent = 0;
    pthread_mutex_lock(&comm->mail->lock);
    if (!stream->sends.first && phx_mail_may_move(comm))
        is_sent = stream->place == PHX_NOBODY ? phx_remote_send_now(comm, data, sent, dst, tag)
                                              : send_now_here(comm, data, sent, stream->place, tag);
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

int phx_mail_agrees(phx_comm *comm, phx_message *receive, const struct phx_end *sent, const char *line)
{
    if (agree(receive, sent))
        return 1;
    receive->sent = *sent;
    free(receive->line);
    receive->line = strdup(line);
    phx_mail_finish(comm, receive, PHX_DIFFERS);
    return 0;
}

static phx_message *set_aside(struct phx_mail *mail, uint32_t src, const struct phx_end *sent, uint32_t tag,
                              const char *line)
{
    phx_message *aside = malloc(sizeof *aside);
    char *data = malloc(sent->nbytes ? sent->nbytes : 1);
    if (!aside || !data) {
        free(aside);
        free(data);
        return NULL;
    }
    *aside = (phx_message){.data = data, .end = *sent, .peer = src, .tag = tag, .receiving = 1, .aside = 1,
                           .line = line ? strdup(line) : NULL};
    phx_list_append(&mail->aside, aside);
    return aside;
}

phx_message *phx_mail_claim(struct phx_mail *mail, uint32_t src, const struct phx_end *sent, uint32_t tag, const char *line)
{
    int in_the_way = 0;
    for (phx_message *m = mail->posted.first; m; m = m->next) {
        if (fits(m, src, tag)) {
            phx_list_take_out(&mail->posted, m);
            m->peer = src;
            return m;
        }
        in_the_way |= m->peer == src || m->peer == PHX_ANY_SOURCE;
    }
    return in_the_way ? set_aside(mail, src, sent, tag, line) : NULL;
}

/* Give what has come of a message that was set aside to its receive, into which the rest goes then. */
static void hand_over(phx_comm *comm, phx_message *aside, phx_message *receive)
{
    phx_message **arriving = &comm->mail->streams[aside->peer].arriving;
    phx_list_take_out(&comm->mail->aside, aside);
    memcpy(receive->data, aside->data, aside->moved);
    receive->moved = aside->moved;
    if (*arriving == aside)
        *arriving = receive;
    else
        phx_mail_finish(comm, receive, PHX_OK);
    free(aside->data);
    free_message(aside);
}

void phx_mail_arrived(phx_comm *comm, phx_message *message)
{
    if (!message->aside)
        phx_mail_finish(comm, message, PHX_OK);
}

/* Through the ring from a place. */
static int move_arrivals_here(phx_comm *comm, uint32_t place)
{
    struct phx_ring *ring = phx_ring_of(comm, place, comm->rank);
    const uint32_t src = comm->mail->ranks[place];
    phx_message **arriving = &comm->mail->streams[src].arriving;
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    int moved = 0;
    for (;;) {
        uint64_t there = atomic_load_explicit(&ring->head, memory_order_acquire) - tail;
        if (there == 0)
            return moved;
        uint64_t at = tail;
        if (!*arriving) {
            struct phx_message_header header;
            phx_ring_read(comm, place, tail, &header, sizeof header, 0);
            phx_message *message = phx_mail_claim(comm->mail, src, &header.sent, header.tag, NULL);
            if (!message)
                return moved;
            if (!agree(message, &header.sent)) {
                phx_mail_finish(comm, message, phx_break_message(comm, place, &header.sent, &message->end));
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
        phx_ring_read(comm, place, at, message->data + message->moved, length, message->end.nbytes);
        at += phx_padded(length);
        message->moved += length;
        if (message->moved == message->end.nbytes) {
            *arriving = NULL;
            phx_mail_arrived(comm, message);
        }
        if (at != tail) {
            tail = at;
            atomic_store_explicit(&ring->tail, tail, memory_order_release);
            phx_ring_bell_of(comm, place);
            moved = 1;
        }
    }
}

static int move_all(phx_comm *comm)
{
    struct phx_mail *mail = comm->mail;
    int moved = 0;
    for (uint32_t place = 0; place < comm->size && phx_mail_may_move(comm); place++) {
        if (mail->streams[mail->ranks[place]].sends.first)
            moved |= move_sends_here(comm, place);
        moved |= move_arrivals_here(comm, place);
    }
    for (uint32_t i = 0; i < mail->nreached && phx_mail_may_move(comm); i++) {
        if (mail->streams[mail->reached[i]].sends.first)
            moved |= phx_remote_move_sends(comm, mail->reached[i]);
        moved |= phx_remote_move_arrivals(comm, mail->reached[i]);
    }
    return moved;
}

void phx_mail_receive(phx_comm *comm, phx_message *receive)
{
    pthread_mutex_lock(&comm->mail->lock);
    phx_message *aside = comm->mail->aside.first;
    while (aside && !fits(receive, aside->peer, aside->tag))
        aside = aside->next;
    if (!aside) {
        phx_list_append(&comm->mail->posted, receive);
        move_all(comm);
    } else {
        const uint32_t src = receive->peer = aside->peer, place = comm->mail->streams[src].place;
        const int agrees = agree(receive, &aside->end);
        if (!agrees && place == PHX_NOBODY)
            phx_mail_agrees(comm, receive, &aside->end, aside->line);
        else if (!agrees)
            phx_mail_finish(comm, receive, phx_break_message(comm, place, &aside->end, &receive->end));
        else
            hand_over(comm, aside, receive);
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
    struct phx_mail *mail = comm->mail;
    const uint32_t peer = message->peer;
    uint64_t progress;
    pthread_mutex_lock(&mail->lock);
    /* For a send: the ring's head, since everything ahead of it in the ring must go first. For a receive: the ring's
     * tail, but only while a message is being read from the ring. Traffic with other tags must not count, or a message
     * that never comes would never time out. */
    if (message->receiving && (peer == PHX_ANY_SOURCE || !mail->streams[peer].arriving))
        progress = message->progress;
    else if (mail->streams[peer].place == PHX_NOBODY)
        progress = phx_remote_progress(mail, peer, message->receiving);
    else if (message->receiving)
        progress = atomic_load_explicit(&phx_ring_of(comm, mail->streams[peer].place, comm->rank)->tail, memory_order_relaxed);
    else
        progress = atomic_load_explicit(&phx_ring_of(comm, comm->rank, mail->streams[peer].place)->head, memory_order_relaxed);
    pthread_mutex_unlock(&mail->lock);
    return progress;
}

static void fail(phx_comm *comm, phx_message *message, int status)
{
    struct phx_mail *mail = comm->mail;
    const uint32_t peer = message->peer; /* PHX_ANY_SOURCE only while the receive is posted */
    if (!message->receiving)
        phx_list_take_out(&mail->streams[peer].sends, message);
    else if (contains(&mail->posted, message))
        phx_list_take_out(&mail->posted, message);
    else if (mail->streams[peer].arriving == message)
        mail->streams[peer].arriving = NULL; /* its rest will not come, and nothing after it */
    phx_mail_finish(comm, message, status);
}

void phx_mail_fail(phx_comm *comm, phx_message *message, int status)
{
    pthread_mutex_lock(&comm->mail->lock);
    if (!atomic_load_explicit(&message->done, memory_order_relaxed))
        fail(comm, message, status);
    pthread_mutex_unlock(&comm->mail->lock);
}

uint32_t phx_mail_check_elsewhere(phx_comm *comm, phx_message *message)
{
    struct phx_mail *mail = comm->mail;
    uint32_t here = 0;
    pthread_mutex_lock(&mail->lock);
    if (!atomic_load_explicit(&message->done, memory_order_relaxed)) {
        const uint32_t peer = message->peer;
        if (peer != PHX_ANY_SOURCE) {
            const int state = phx_remote_state(mail, peer, message->receiving);
            if (state)
                fail(comm, message, state);
            here = !state;
        }
        for (uint32_t rank = 0; peer == PHX_ANY_SOURCE && rank < mail->size; rank++) {
            const int state = phx_remote_state(mail, rank, 1);
            here += mail->streams[rank].place == PHX_NOBODY && state != PHX_PEER_LEFT;
            if (state == PHX_CUT) {
                fail(comm, message, state);
                message->peer = rank;
                break;
            }
        }
    }
    pthread_mutex_unlock(&mail->lock);
    return here;
}

int phx_mail_is_unmet(phx_comm *comm, const phx_message *message)
{
    const struct phx_mail *mail = comm->mail;
    return message->receiving && (message->peer == PHX_ANY_SOURCE ? mail->size > comm->size
                                                                  : !phx_messages_met(comm, message->peer));
}

void phx_messages_end(phx_comm *comm, int in_order)
{
    struct phx_place *place = &comm->places[comm->rank];
    pthread_mutex_lock(&comm->mail->lock);
    if (!comm->mail->ended)
        phx_remote_end(comm, in_order && !phx_broken(comm));
    comm->mail->ended = 1;
    pthread_mutex_unlock(&comm->mail->lock);
    atomic_fetch_add_explicit(&place->bell, 1, memory_order_seq_cst);
    phx_wake(&place->bell);
}

void phx_message_free(phx_comm *comm, phx_message *message)
{
    pthread_mutex_lock(&comm->mail->lock);
    if (atomic_load_explicit(&message->done, memory_order_relaxed))
        free_message(message);
    else
        message->abandoned = 1;
    pthread_mutex_unlock(&comm->mail->lock);
}

/* -- for other threads that ask ------------------------------------------------------------------------------------ */

struct question {
    const struct phx_mail *mail;
    uint8_t *ranks; /* those of other hosts that are awaited get the bit 1; the bit 2 marks those asked about */
    struct phx_message_seen *out;
    int fits; /* how well `out` does */
};

static void consider(struct question *question, const phx_message *message)
{
    const struct phx_mail *mail = question->mail;
    const uint32_t peer = message->peer, any = peer == PHX_ANY_SOURCE;
    const int fits = 1 + message->expected + (message->expected && !any && question->ranks[peer] >= 2);
    for (uint32_t rank = any ? 0 : peer; message->expected && rank < (any ? mail->size : peer + 1); rank++)
        question->ranks[rank] |= mail->streams[rank].place == PHX_NOBODY;
    if (message->abandoned || fits <= question->fits)
        return;
    question->fits = fits;
    *question->out = (struct phx_message_seen){message->end, peer, message->receiving};
}

int phx_messages_waiting(phx_comm *comm, uint8_t *ranks, struct phx_message_seen *out)
{
    struct phx_mail *mail = comm->mail;
    struct question question = {mail, ranks, out, 0};
    pthread_mutex_lock(&mail->lock);
    for (const phx_message *m = mail->posted.first; m; m = m->next)
        consider(&question, m);
    for (uint32_t rank = 0; rank < mail->size; rank++) {
        const phx_message *arriving = mail->streams[rank].arriving;
        if (arriving && !arriving->aside)
            consider(&question, arriving);
        for (const phx_message *m = mail->streams[rank].sends.first; m; m = m->next)
            consider(&question, m);
    }
    pthread_mutex_unlock(&mail->lock);
    return question.fits > 0;
}
