/* The messages of a rank: which goes to which receive, and the calls that start one and wait for it. rings.c moves the
 * bytes inside this host, and remote.c those to and from other hosts.
 *
 * A thread that waits for one message moves all messages of its rank, so two ranks that send each other more than there
 * is room for do not block each other. Between its attempts it spins, yields and sleeps on the bell of its place, and
 * after each slice it checks whether the message can still come. A message that has no receive waits where its sender
 * has put it. It is set aside, in memory of its own, only when a receive with another tag waits for what comes after
 * it. */
#include "messages/mail.h"

#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "segment/call.h"

#define UNMET_NS 500000000ull /* how long a receive waits until its sender is dialled, to know whether it is there */

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

/* -- matching ---------------------------------------------------------------------------------------------------- */

static int fits(const phx_message *receive, uint32_t src, uint32_t tag)
{
    return (receive->peer == src || receive->peer == PHX_ANY_SOURCE) && receive->tag == tag;
}

/* Tell whether a receive takes what is sent. Raw bytes (dtype 0) may be fewer than the receive has room for. */
static int agree(phx_message *receive, const struct phx_end *sent)
{
    if (!receive->end.dtype && sent->nbytes < receive->end.nbytes)
        receive->end.nbytes = sent->nbytes;
    return receive->end.nbytes == sent->nbytes && receive->end.dtype == sent->dtype;
}

int phx_mail_agrees(phx_comm *comm, phx_message *receive, uint32_t src, const struct phx_end *sent, const char *line)
{
    const uint32_t place = comm->mail->streams[src].place;
    if (agree(receive, sent))
        return 1;
    if (place != PHX_NOBODY) {
        phx_mail_finish(comm, receive, phx_break_message(comm, place, sent, &receive->end));
        return 0;
    }
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

phx_message *phx_mail_claim(struct phx_mail *mail, uint32_t src, const struct phx_end *sent, uint32_t tag,
                            const char *line)
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

/* -- moving ------------------------------------------------------------------------------------------------------- */

static int move_sends(phx_comm *comm, uint32_t dst)
{
    const uint32_t place = comm->mail->streams[dst].place;
    return place == PHX_NOBODY ? phx_remote_move_sends(comm, dst, 0) : phx_rings_move_sends(comm, place);
}

static int move_all(phx_comm *comm)
{
    struct phx_mail *mail = comm->mail;
    int moved = 0;
    for (uint32_t place = 0; place < comm->size && phx_mail_may_move(comm); place++) {
        if (mail->streams[mail->ranks[place]].sends.first)
            moved |= phx_rings_move_sends(comm, place);
        moved |= phx_rings_move_arrivals(comm, place);
    }
    for (uint32_t i = 0; i < mail->nreached && phx_mail_may_move(comm); i++) {
        if (mail->streams[mail->reached[i]].sends.first)
            moved |= phx_remote_move_sends(comm, mail->reached[i], 0);
        moved |= phx_remote_move_arrivals(comm, mail->reached[i], 0);
    }
    return moved;
}

/* Move all messages of this rank as far as they can be moved now. */
struct movement {
    int moved;         /* whether any bytes have moved */
    int ended;         /* whether phx_messages_end() has been called */
    uint64_t finished; /* how many messages have been done so far */
};

static struct movement move(phx_comm *comm)
{
    pthread_mutex_lock(&comm->mail->lock);
    const int moved = move_all(comm);
    const struct movement movement = {moved, comm->mail->ended, comm->mail->finished};
    pthread_mutex_unlock(&comm->mail->lock);
    return movement;
}

/* A number that changes whenever the message makes progress. */
static uint64_t progress_of(phx_comm *comm, const phx_message *message)
{
    const uint32_t peer = message->peer;
    uint64_t progress = message->progress;
    pthread_mutex_lock(&comm->mail->lock);
    /* A send waits for all that is ahead of it. For a receive only bytes of a message that is being read count: traffic
     * with other tags must not, or a message that never comes would never time out. */
    if (!message->receiving)
        progress = comm->mail->streams[peer].sent;
    else if (peer != PHX_ANY_SOURCE && comm->mail->streams[peer].arriving)
        progress = comm->mail->streams[peer].received;
    pthread_mutex_unlock(&comm->mail->lock);
    return progress;
}

/* Finish a message with this status, unless it is done; `rank` is the one because of which it fails. */
static void fail(phx_comm *comm, phx_message *message, int status, uint32_t rank)
{
    struct phx_mail *mail = comm->mail;
    pthread_mutex_lock(&mail->lock);
    if (!atomic_load_explicit(&message->done, memory_order_relaxed)) {
        const uint32_t peer = message->peer; /* PHX_ANY_SOURCE only while the receive is posted */
        if (!message->receiving)
            phx_list_take_out(&mail->streams[peer].sends, message);
        else if (peer != PHX_ANY_SOURCE && mail->streams[peer].arriving == message)
            mail->streams[peer].arriving = NULL; /* its rest will not come, and nothing after it */
        else
            phx_list_take_out(&mail->posted, message);
        if (status == PHX_CUT)
            message->peer = rank;
        phx_mail_finish(comm, message, status);
    }
    pthread_mutex_unlock(&mail->lock);
}

/* Return whether this is a receive, and a rank of another host that could send it has not been connected. */
static int is_unmet(phx_comm *comm, const phx_message *message)
{
    const struct phx_mail *mail = comm->mail;
    return message->receiving && (message->peer == PHX_ANY_SOURCE ? mail->size > comm->size
                                                                  : !phx_messages_met(comm, message->peer, 1));
}

/* -- the calls: start a message, test it, wait for it, give it back ------------------------------------------------ */

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
    if (!message)
        return NULL;
    pthread_mutex_lock(&comm->mail->lock);
    phx_list_append(&comm->mail->streams[dst].sends, message);
    if (phx_mail_may_move(comm))
        move_sends(comm, dst);
    if (message->done && !message->status) {
        free_message(message);
        message = PHX_SENT;
    }
    pthread_mutex_unlock(&comm->mail->lock);
    return message;
}

int phx_send_now(phx_comm *comm, const void *data, const struct phx_end *sent, uint32_t dst, uint32_t tag)
{
    if (dst >= comm->mail->size || phx_lacks_memory(data, sent->nbytes))
        return 0;
    struct phx_stream *stream = &comm->mail->streams[dst];
    phx_message message = {.data = (char *)(uintptr_t)data, .end = *sent, .peer = dst, .tag = tag};
    pthread_mutex_lock(&comm->mail->lock);
    if (!stream->sends.first && stream->place != PHX_NOBODY && phx_mail_may_move(comm) &&
        phx_rings_have_room(comm, stream->place, sent->nbytes)) {
        phx_list_append(&stream->sends, &message);
        phx_rings_move_sends(comm, stream->place);
    }
    pthread_mutex_unlock(&comm->mail->lock);
    return message.done && !message.status;
}

phx_message *phx_recv(phx_comm *comm, void *data, const struct phx_end *expected, uint32_t src, uint32_t tag)
{
    const int known = src < comm->mail->size || src == PHX_ANY_SOURCE;
    if (!known || phx_lacks_memory(data, expected->nbytes))
        return NULL;
    phx_message *message = new_message(data, expected, src, tag);
    if (!message)
        return NULL;
    message->receiving = 1;
    pthread_mutex_lock(&comm->mail->lock);
    phx_message *aside = comm->mail->aside.first;
    while (aside && !fits(message, aside->peer, aside->tag))
        aside = aside->next;
    if (!aside) {
        phx_list_append(&comm->mail->posted, message);
        move_all(comm);
        if (message->peer != PHX_ANY_SOURCE)
            phx_remote_posted(comm, message->peer);
    } else {
        message->peer = aside->peer;
        if (phx_mail_agrees(comm, message, aside->peer, &aside->end, aside->line))
            hand_over(comm, aside, message);
    }
    pthread_mutex_unlock(&comm->mail->lock);
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

/* PHX_OK while messages with a rank may come or go; else PHX_PEER_LEFT, PHX_PEER_LOST, or PHX_CUT of another host. */
static int state_of(phx_comm *comm, uint32_t rank, int receiving, enum phx_going *how)
{
    const uint32_t place = comm->mail->streams[rank].place;
    if (place == PHX_NOBODY)
        return phx_remote_state(comm->mail, rank, receiving);
    *how = place == comm->rank ? PHX_HERE : phx_peer_life(comm, place);
    return *how == PHX_HERE ? PHX_OK : *how == PHX_LEFT ? PHX_PEER_LEFT : PHX_PEER_LOST;
}

/* The same of the message's peer; from any rank, that of the first other one which has not left in order, or
 * PHX_PEER_LEFT if all have. */
static int find_gone_peer(phx_comm *comm, const phx_message *message, uint32_t *rank, enum phx_going *how)
{
    int all = PHX_PEER_LEFT;
    *rank = peer_of(message);
    if (*rank != PHX_ANY_SOURCE)
        return state_of(comm, *rank, message->receiving, how);
    for (*rank = 0; *rank < comm->mail->size; ++*rank) {
        if (comm->mail->streams[*rank].place == comm->rank)
            continue;
        const int state = state_of(comm, *rank, 1, how);
        if (state == PHX_PEER_LOST || state == PHX_CUT)
            return state;
        all = state ? all : PHX_OK;
    }
    return all;
}

/* Return whether the messages' timeout counts for this one and has passed since bytes of it moved. */
static int overdue(phx_comm *comm, phx_message *message, uint64_t elapsed_ns)
{
    if (!message->expected)
        return 0;
    const uint64_t progress = progress_of(comm, message);
    message->waited = progress == message->progress ? message->waited + phx_waited_ns(elapsed_ns) : 0;
    message->progress = progress;
    return message->waited > comm->message_timeout_ns;
}

/* Once a slice, by the clock: if the message will not come, fail it if its peer has left in order, or is on another
 * host, else break the group. A peer may send and then go, so messages are moved once more after it was found gone. */
static int check(phx_comm *comm, phx_message *message, uint64_t now)
{
    uint32_t rank;
    enum phx_going how;
    if (!message->checked)
        message->checked = now;
    const uint64_t elapsed_ns = now - message->checked;
    if (elapsed_ns < PHX_SLICE_NS)
        return PHX_OK;
    message->checked = now;
    const int state = find_gone_peer(comm, message, &rank, &how);
    if (state)
        move(comm);
    else if (!overdue(comm, message, elapsed_ns))
        return PHX_OK;
    if (is_done(message) || phx_broken(comm)) /* in a broken group every rank leaves sooner or later */
        return PHX_OK;
    const uint32_t place = place_of(comm, message);
    if (state == PHX_PEER_LOST)
        return phx_break_gone(comm, comm->mail->streams[rank].place, how);
    if (!state && (place != PHX_NOBODY || comm->mail->size == comm->size))
        return phx_break(comm, PHX_TIMEOUT, place == PHX_NOBODY ? comm->rank : place);
    fail(comm, message, state ? state : PHX_OVERDUE, rank);
    return PHX_OK;
}

int phx_message_test(phx_comm *comm, phx_message *message, int watch)
{
    if (is_done(message))
        return 1;
    move(comm);
    const uint64_t checked = message->checked;
    if (!is_done(message) && !phx_broken(comm) && watch)
        check(comm, message, phx_now_ns());
    if (is_done(message) || phx_broken(comm))
        return 1;
    return message->checked != checked && is_unmet(comm, message) ? PHX_UNMET : 0;
}

void phx_message_expect(phx_comm *comm, phx_message *message)
{
    (void)comm;
    message->expected = 1;
}

/* Sleep on the connection itself where only what comes from there can end the wait: so one thread is woken, and not
 * two. */
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
        const struct movement movement = move(comm);
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
        if (!timeout_ns && waited > UNMET_NS && !message->asked && is_unmet(comm, message)) {
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
        const struct movement movement = move(comm);
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
