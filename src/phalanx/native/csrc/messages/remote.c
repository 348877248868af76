/* Messages with ranks of other hosts, through one TCP connection for each direction.
 *
 * The sender dials at its first message (transports/hierarchical/connections.py). Then the connection carries for each
 * message a header, the line of the program that sends, and the bytes: straight from the sender's memory and straight
 * into the receiver's. A message without a receive stays in the connection, whose buffers hold its sender up. Two
 * things tell that a rank has left in order: a last header, to those that receive from it, and the byte LEFT the other
 * way, to those that send to it. So no connection ever holds bytes that its closing could take back from the other
 * direction. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "messages/mail.h"
#include "recorder/record.h"

#define LEFT 'L'
#define AHEAD 16384u    /* bytes that are read ahead: headers, and small messages as a whole */
#define GOOD_PART 524288 /* bytes of a large message for which a thread is woken */
#define UNSENT 2097152   /* bytes that the kernel takes although it cannot send them yet */
#define TURN 1048576u   /* bytes that are moved before others get the lock */

struct header {
    struct phx_end sent;
    uint32_t tag;
    uint16_t left; /* no message: the rank has left */
    uint16_t line_bytes;
};

struct front {
    struct header header;
    char line[PHX_LINE_BYTES];
};

struct phx_remote {
    int in, out;         /* the sockets; -1 before they are connected, and when they have ended */
    int in_end, out_end; /* PHX_OK, or how they ended: PHX_PEER_LEFT or PHX_CUT */
    int met;             /* `in` has been connected */
    int blocked;         /* the message that comes next has no receive */
    int enough;          /* how many bytes of `in` make it ready */
    int in_watched, out_watched;  /* by ready.c: for bytes, and for room */
    struct front front;           /* of the message that is being sent */
    uint32_t front_sent;
    uint32_t from, to;            /* ahead[from, to) has been read and belongs to no message yet */
    char ahead[AHEAD];
};

static struct phx_remote *reach(struct phx_mail *mail, uint32_t rank)
{
    struct phx_remote *remote = mail->streams[rank].remote;
    if (remote || !(remote = calloc(1, sizeof *remote)))
        return remote;
    remote->in = remote->out = -1;
    remote->enough = 1;
    mail->streams[rank].remote = remote;
    mail->reached[mail->nreached++] = rank;
    return remote;
}

static void close_one(int *socket)
{
    if (*socket >= 0) {
        phx_ready_forget(*socket);
        close(*socket);
    }
    *socket = -1;
}

static void end_in(struct phx_remote *remote, int status)
{
    close_one(&remote->in);
    remote->in_end = status;
}

/* The other rank receives nothing any more; it has said so if it left in order. */
static void end_out(struct phx_remote *remote)
{
    char said = 0;
    recv(remote->out, &said, 1, MSG_DONTWAIT);
    close_one(&remote->out);
    remote->out_end = said == LEFT ? PHX_PEER_LEFT : PHX_CUT;
}

/* -- sending ----------------------------------------------------------------------------------------------------- */

static void begin_front(struct phx_remote *remote, const struct phx_end *sent, uint32_t tag)
{
    struct front *front = &remote->front;
    front->header = (struct header){.sent = *sent, .tag = tag};
    front->header.line_bytes = (uint16_t)phx_record_text(sent->site, front->line, sizeof front->line);
    remote->front_sent = 0;
}

/* Send the front and then these bytes, as far as there is room; returns how many of the latter went. */
static uint64_t push(struct phx_stream *stream, const char *data, uint64_t nbytes)
{
    struct phx_remote *remote = stream->remote;
    const uint32_t front = (uint32_t)sizeof(struct header) + remote->front.header.line_bytes - remote->front_sent;
    struct iovec parts[] = {{(char *)&remote->front + remote->front_sent, front},
                            {(char *)(uintptr_t)data, nbytes < TURN ? nbytes : TURN}};
    const struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    const ssize_t sent = sendmsg(remote->out, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
        if (errno != EAGAIN && errno != EINTR && errno != ENOBUFS && errno != ENOMEM)
            end_out(remote);
        return 0;
    }
    stream->sent += (uint64_t)sent;
    const uint32_t of_front = (uint64_t)sent < front ? (uint32_t)sent : front;
    remote->front_sent += of_front;
    return (uint64_t)sent - of_front;
}

/* Return whether the rest of a message is for the thread of ready.c: one that waits would move it packet by packet, and
 * slowly. */
static int is_bulk(const phx_message *message)
{
    return message->end.nbytes - message->moved > PHX_PIECE;
}

static int front_is_sent(const struct phx_remote *remote)
{
    return remote->front_sent == sizeof(struct header) + remote->front.header.line_bytes;
}

int phx_remote_move_sends(phx_comm *comm, uint32_t dst, int by_thread)
{
    struct phx_stream *stream = &comm->mail->streams[dst];
    struct phx_list *sends = &stream->sends;
    struct phx_remote *remote = stream->remote;
    const uint64_t before = stream->sent;
    while (sends->first && remote && remote->out >= 0 && stream->sent - before < TURN) {
        phx_message *message = sends->first;
        if (!message->started)
            begin_front(remote, &message->end, message->tag);
        else if (is_bulk(message) && !by_thread) {
            if (!remote->out_watched)
                phx_ready_watch(comm->mail, remote->out, dst, 0, remote->out_watched = 1);
            break;
        }
        message->started = 1;
        const uint64_t sent = stream->sent;
        message->moved += push(stream, message->data + message->moved, message->end.nbytes - message->moved);
        if (stream->sent == sent)
            break;
        if (front_is_sent(remote) && message->moved == message->end.nbytes) {
            phx_list_take_out(sends, message);
            phx_mail_finish(comm, message, PHX_OK);
        }
    }
    return stream->sent != before;
}

/* -- receiving --------------------------------------------------------------------------------------------------- */

/* Begin with the next message if its front is there: 1. 0 if it is not, if there is no receive for it, or at the
 * end. */
static int begin_arrival(phx_comm *comm, uint32_t src)
{
    struct phx_stream *stream = &comm->mail->streams[src];
    struct phx_remote *remote = stream->remote;
    const uint32_t there = remote->to - remote->from;
    struct front front;
    if (there < sizeof front.header)
        return 0;
    memcpy(&front.header, remote->ahead + remote->from, sizeof front.header);
    const struct header *header = &front.header;
    if (header->left || header->line_bytes >= sizeof front.line) {
        end_in(remote, header->left ? PHX_PEER_LEFT : PHX_CUT);
        return 0;
    }
    const uint32_t size = (uint32_t)sizeof *header + header->line_bytes;
    if (there < size)
        return 0;
    memcpy(front.line, remote->ahead + remote->from + sizeof *header, header->line_bytes);
    front.line[header->line_bytes] = 0;
    phx_message *message = phx_mail_claim(comm->mail, src, &header->sent, header->tag, front.line);
    remote->blocked = !message;
    if (!message)
        return 0;
    remote->from += size;
    if (!phx_mail_agrees(comm, message, src, &header->sent, front.line)) {
        end_in(remote, PHX_CUT); /* the group breaks */
        return 0;
    }
    stream->arriving = message;
    return 1;
}

/* Take from what was read ahead; whether the message is complete. */
static int take_ahead(struct phx_remote *remote, phx_message *message)
{
    const uint64_t rest = message->end.nbytes - message->moved;
    const uint32_t there = remote->to - remote->from, length = rest < there ? (uint32_t)rest : there;
    if (length)
        memcpy(message->data + message->moved, remote->ahead + remote->from, length);
    remote->from += length;
    message->moved += length;
    return message->moved == message->end.nbytes;
}

/* Read into the message, if one has begun, and what follows it ahead. 1 if bytes have come, else 0. */
static int pull(struct phx_stream *stream)
{
    struct phx_remote *remote = stream->remote;
    phx_message *message = stream->arriving;
    if (remote->in < 0)
        return 0;
    memmove(remote->ahead, remote->ahead + remote->from, remote->to - remote->from);
    remote->to -= remote->from;
    remote->from = 0;
    const uint64_t rest = message ? message->end.nbytes - message->moved : 0, straight = rest < TURN ? rest : TURN;
    struct iovec parts[] = {{message ? message->data + message->moved : NULL, straight},
                            {remote->ahead + remote->to, straight < rest ? 0 : AHEAD - remote->to}};
    struct msghdr into = {.msg_iov = parts, .msg_iovlen = 2};
    const ssize_t got = recvmsg(remote->in, &into, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR || errno == ENOBUFS || errno == ENOMEM))
        return 0;
    if (got <= 0) {
        end_in(remote, PHX_CUT);
        return 0;
    }
    stream->received += (uint64_t)got;
    const uint64_t own = (uint64_t)got < straight ? (uint64_t)got : straight;
    if (message)
        message->moved += own;
    remote->to += (uint32_t)((uint64_t)got - own);
    return 1;
}

/* Have so many bytes make the connection ready. */
static void expect_bytes(struct phx_remote *remote, int enough)
{
    if (enough != remote->enough && !setsockopt(remote->in, SOL_SOCKET, SO_RCVLOWAT, &enough, sizeof enough))
        remote->enough = enough;
}

/* Have ready.c look after what comes. Its thread is woken for a good part of a large message, and not for each
 * packet. */
static void watch_in(struct phx_mail *mail, uint32_t rank)
{
    struct phx_remote *remote = mail->streams[rank].remote;
    const phx_message *message = mail->streams[rank].arriving;
    const uint64_t rest = message ? message->end.nbytes - message->moved : 1;
    expect_bytes(remote, rest <= PHX_PIECE ? 1 : rest < GOOD_PART ? (int)rest : GOOD_PART);
    remote->in_watched = 1;
    phx_ready_watch(mail, remote->in, rank, 1, 0);
}

/* Tell whether a large receive of a collective is posted: it comes while the thread that waits later computes. */
static int awaits_bulk(const phx_comm *comm, uint32_t src)
{
    const phx_message *receive = comm->spin ? NULL : comm->mail->posted.first;
    while (receive && !(receive->peer == src && is_bulk(receive)))
        receive = receive->next;
    return receive != NULL;
}

void phx_remote_posted(phx_comm *comm, uint32_t src)
{
    const struct phx_remote *remote = comm->mail->streams[src].remote;
    if (remote && remote->in >= 0 && !remote->in_watched && !remote->blocked && awaits_bulk(comm, src))
        watch_in(comm->mail, src);
}

int phx_remote_move_arrivals(phx_comm *comm, uint32_t src, int by_thread)
{
    struct phx_stream *stream = &comm->mail->streams[src];
    struct phx_remote *remote = stream->remote;
    const uint64_t before = stream->received;
    int moved = 0;
    while (remote) {
        if (stream->arriving || begin_arrival(comm, src)) {
            phx_message *message = stream->arriving;
            if (take_ahead(remote, message)) {
                stream->arriving = NULL;
                phx_mail_arrived(comm, message);
                moved = 1;
                continue;
            }
        } else if (remote->blocked) {
            break;
        }
        if (stream->arriving && is_bulk(stream->arriving) && !by_thread && remote->in >= 0) {
            if (!remote->in_watched)
                watch_in(comm->mail, src);
            break;
        }
        if (stream->received - before >= TURN || !pull(stream))
            break;
        moved = 1;
    }
    return moved;
}

/* -- both -------------------------------------------------------------------------------------------------------- */

int phx_remote_state(struct phx_mail *mail, uint32_t rank, int receiving)
{
    int state = PHX_OK;
    pthread_mutex_lock(&mail->lock);
    const struct phx_remote *remote = mail->streams[rank].remote;
    if (remote)
        state = receiving && remote->met ? remote->in_end : remote->out_end;
    pthread_mutex_unlock(&mail->lock);
    return state;
}

int phx_remote_socket(phx_comm *comm, const phx_message *message)
{
    struct phx_mail *mail = comm->mail;
    pthread_mutex_lock(&mail->lock);
    const uint32_t peer = message->peer;
    struct phx_remote *remote = message->receiving && peer != PHX_ANY_SOURCE ? mail->streams[peer].remote : NULL;
    int socket = remote && !remote->in_watched && !remote->blocked && !message->done ? remote->in : -1;
    for (uint32_t i = 0; i < mail->nreached; i++) {
        const struct phx_stream *stream = &mail->streams[mail->reached[i]];
        if (stream->sends.first && !stream->remote->out_watched)
            socket = -1;
    }
    if (socket >= 0)
        expect_bytes(remote, 1);
    pthread_mutex_unlock(&mail->lock);
    return socket;
}

void phx_remote_ready(phx_comm *comm, uint32_t rank, int incoming, int may_write)
{
    struct phx_mail *mail = comm->mail;
    pthread_mutex_lock(&mail->lock);
    struct phx_remote *remote = mail->streams[rank].remote;
    const uint64_t finished = mail->finished;
    if (incoming) {
        remote->in_watched = 0;
        if (remote->in >= 0 && phx_mail_may_move(comm)) {
            phx_remote_move_arrivals(comm, rank, 1);
            /* After a message the threads that have slept look themselves, and sleep again if they have to. */
            if (remote->in >= 0 && !remote->blocked && (mail->finished == finished || awaits_bulk(comm, rank)))
                watch_in(mail, rank);
        }
    } else if (remote->out >= 0) {
        if (!may_write)
            end_out(remote);
        else if (phx_mail_may_move(comm))
            phx_remote_move_sends(comm, rank, 1);
        remote->out_watched = mail->streams[rank].sends.first && phx_mail_may_move(comm);
        if (remote->out >= 0)
            phx_ready_watch(mail, remote->out, rank, 0, remote->out_watched);
    }
    pthread_mutex_unlock(&mail->lock);
}

void phx_mail_watch(phx_comm *comm)
{
    struct phx_mail *mail = comm->mail;
    if (!atomic_load_explicit(&mail->nreached, memory_order_relaxed))
        return;
    pthread_mutex_lock(&mail->lock);
    for (uint32_t i = 0; i < mail->nreached && phx_mail_may_move(comm); i++) {
        const uint32_t rank = mail->reached[i];
        struct phx_remote *remote = mail->streams[rank].remote;
        if (remote->in >= 0 && !remote->in_watched && !remote->blocked)
            watch_in(mail, rank);
        if (remote->out >= 0 && !remote->out_watched && mail->streams[rank].sends.first)
            phx_ready_watch(mail, remote->out, rank, 0, remote->out_watched = 1);
    }
    pthread_mutex_unlock(&mail->lock);
}

int phx_messages_connect(phx_comm *comm, uint32_t rank, int socket, int incoming)
{
    struct phx_mail *mail = comm->mail;
    if (phx_ready_enter(mail))
        return PHX_SYSTEM;
    pthread_mutex_lock(&mail->lock);
    struct phx_remote *remote = rank < mail->size && phx_mail_may_move(comm) ? reach(mail, rank) : NULL;
    const int taken = remote && (incoming ? !remote->met : remote->out < 0 && !remote->out_end);
    if (taken && incoming) {
        remote->met = 1;
        remote->in = socket;
    } else if (taken) {
        remote->out = socket;
        setsockopt(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &(int){UNSENT}, sizeof(int));
        phx_ready_watch(mail, socket, rank, 0, 0); /* for its end */
        phx_remote_move_sends(comm, rank, 0);
    }
    pthread_mutex_unlock(&mail->lock);
    phx_ring_bell(&comm->places[comm->rank]); /* a thread that sleeps has it watched */
    return taken ? PHX_OK : PHX_BAD_ARGUMENT;
}

void phx_messages_refused(phx_comm *comm, uint32_t rank, int left)
{
    pthread_mutex_lock(&comm->mail->lock);
    struct phx_remote *remote = rank < comm->mail->size ? reach(comm->mail, rank) : NULL;
    if (remote && remote->out < 0)
        remote->out_end = left ? PHX_PEER_LEFT : PHX_CUT;
    pthread_mutex_unlock(&comm->mail->lock);
    phx_ring_bell(&comm->places[comm->rank]);
}

int phx_messages_met(phx_comm *comm, uint32_t rank, int receiving)
{
    struct phx_mail *mail = comm->mail;
    if (rank >= mail->size || mail->streams[rank].place != PHX_NOBODY)
        return rank < mail->size;
    pthread_mutex_lock(&mail->lock);
    const struct phx_remote *remote = mail->streams[rank].remote;
    const int met = remote && (receiving ? remote->met : remote->out >= 0);
    pthread_mutex_unlock(&mail->lock);
    return met;
}

void phx_remote_end(phx_comm *comm, int in_order)
{
    struct phx_mail *mail = comm->mail;
    const struct header left = {.left = 1};
    for (uint32_t i = 0; i < mail->nreached; i++) {
        struct phx_stream *stream = &mail->streams[mail->reached[i]];
        struct phx_remote *remote = stream->remote;
        /* Without the words, as in the middle of a message, the other rank goes by what the registrar told it. */
        if (in_order && remote->out >= 0 && !(stream->sends.first && stream->sends.first->started))
            send(remote->out, &left, sizeof left, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (in_order && remote->in >= 0)
            send(remote->in, &(char){LEFT}, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
        close_one(&remote->in);
        close_one(&remote->out);
    }
}

void phx_messages_cut(phx_comm *comm)
{
    pthread_mutex_lock(&comm->mail->lock);
    phx_remote_end(comm, 0);
    pthread_mutex_unlock(&comm->mail->lock);
}

void phx_remote_free(struct phx_mail *mail)
{
    phx_remote_end(mail->comm, 0);
    for (uint32_t i = 0; i < mail->nreached; i++)
        free(mail->streams[mail->reached[i]].remote);
}
