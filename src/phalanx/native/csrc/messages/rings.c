/* Messages between ranks of one host, through one ring for each direction.
 *
 * A message is a header and its bytes in the ring from its sender to its receiver. One whose receive has not been
 * posted stays there, so a sender that is ahead is held up and no rank's memory fills. */
#include <string.h>

#include "messages/mail.h"
#include "segment/copy.h"

/* Messages and their pieces begin at cache lines, since a copy to an address that is not a multiple of 32 takes twice
 * as long. */
#define ALIGN 64u

_Static_assert(sizeof(struct phx_message_header) <= ALIGN, "a header never wraps around the end of a ring");

/* The ring through which `src` sends to `dst`. */
static struct phx_ring *ring_of(const phx_comm *comm, uint32_t src, uint32_t dst)
{
    return &comm->rings[(uint64_t)src * comm->size + dst];
}

static char *ring_data(const phx_comm *comm, uint32_t src, uint32_t dst)
{
    return comm->ring_data + ((uint64_t)src * comm->size + dst) * phx_ring_bytes(comm->size);
}

/* Write into the ring to `dst` at the count `at`, around its end where necessary. */
static void write_ring(const phx_comm *comm, uint32_t dst, uint64_t at, const void *from, uint64_t nbytes)
{
    char *data = ring_data(comm, comm->rank, dst);
    const uint64_t size = phx_ring_bytes(comm->size), offset = at % size;
    const uint64_t straight = nbytes < size - offset ? nbytes : size - offset;
    memcpy(data + offset, from, straight);
    memcpy(data, (const char *)from + straight, nbytes - straight);
}

/* Read from the ring from `src` at the count `at`; `total` is the length of the whole message. */
static void read_ring(const phx_comm *comm, uint32_t src, uint64_t at, void *to, uint64_t nbytes,
                                 uint64_t total)
{
    const char *data = ring_data(comm, src, comm->rank);
    const uint64_t size = phx_ring_bytes(comm->size), offset = at % size;
    const uint64_t straight = nbytes < size - offset ? nbytes : size - offset;
    phx_copy_out(comm, to, data + offset, straight, total);
    phx_copy_out(comm, (char *)to + straight, data, nbytes - straight, total);
}

static uint64_t padded(uint64_t nbytes)
{
    return (nbytes + ALIGN - 1) / ALIGN * ALIGN;
}

/* Wake the threads of `peer`, to or from which bytes have moved. */
static void ring_bell_of(phx_comm *comm, uint32_t peer)
{
    phx_note_cpu(comm);
    phx_ring_bell(&comm->places[peer]);
}

/* -- sending ----------------------------------------------------------------------------------------------------- */

/* How many bytes of a message are put in before its receiver is notified. A receiver that streams reads faster from the
 * cache that all cores share than from the sender's own, so it is kept as far behind as the ring allows: 64 MiB took
 * 4.0 ms instead of 6.5. */
static uint64_t piece_bytes(const phx_comm *comm, const phx_message *message)
{
    const uint64_t quarter = phx_ring_bytes(comm->size) / 4;
    return message->end.nbytes >= comm->stream_bytes && quarter > PHX_PIECE ? quarter : PHX_PIECE;
}

/* Whether nobody will read what is sent to this rank. One that leaves a broken group has broken it, or seen it broken,
 * before it told that it leaves. */
static int has_left(const phx_comm *comm, uint32_t place)
{
    return atomic_load_explicit(&comm->places[place].going, memory_order_acquire) == PHX_LEFT && !phx_broken(comm);
}

int phx_rings_move_sends(phx_comm *comm, uint32_t place)
{
    struct phx_stream *stream = &comm->mail->streams[comm->mail->ranks[place]];
    struct phx_list *sends = &stream->sends;
    struct phx_ring *ring = ring_of(comm, comm->rank, place);
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
        if (begins && room < ALIGN)
            break;
        uint64_t at = head;
        if (begins) {
            const struct phx_message_header header = {message->end, message->tag};
            write_ring(comm, place, at, &header, sizeof header);
            at += ALIGN;
            room -= ALIGN;
            message->started = 1;
        }
        uint64_t length = message->end.nbytes - message->moved;
        const uint64_t most = piece_bytes(comm, message);
        if (length > most)
            length = most;
        if (padded(length) > room)
            length = room / ALIGN * ALIGN;
        write_ring(comm, place, at, message->data + message->moved, length);
        at += padded(length);
        message->moved += length;
        if (at == head && message->moved < message->end.nbytes)
            break;
        stream->sent += at - head;
        head = at;
        atomic_store_explicit(&ring->head, head, memory_order_release);
        ring_bell_of(comm, place);
        moved = 1;
        if (message->moved == message->end.nbytes) {
            phx_list_take_out(sends, message);
            phx_mail_finish(comm, message, PHX_OK);
        }
    }
    return moved;
}

int phx_rings_have_room(const phx_comm *comm, uint32_t place, uint64_t nbytes)
{
    const struct phx_ring *ring = ring_of(comm, comm->rank, place);
    const uint64_t taken = atomic_load_explicit(&ring->head, memory_order_relaxed) -
                           atomic_load_explicit(&ring->tail, memory_order_acquire);
    return nbytes <= PHX_PIECE && ALIGN + padded(nbytes) <= phx_ring_bytes(comm->size) - taken;
}

/* -- receiving --------------------------------------------------------------------------------------------------- */

int phx_rings_move_arrivals(phx_comm *comm, uint32_t place)
{
    struct phx_ring *ring = ring_of(comm, place, comm->rank);
    const uint32_t src = comm->mail->ranks[place];
    struct phx_stream *stream = &comm->mail->streams[src];
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    int moved = 0;
    for (;;) {
        uint64_t there = atomic_load_explicit(&ring->head, memory_order_acquire) - tail;
        if (there == 0)
            return moved;
        uint64_t at = tail;
        if (!stream->arriving) {
            struct phx_message_header header;
            read_ring(comm, place, tail, &header, sizeof header, 0);
            phx_message *message = phx_mail_claim(comm->mail, src, &header.sent, header.tag, NULL);
            if (!message)
                return moved;
            if (!phx_mail_agrees(comm, message, src, &header.sent, NULL))
                return 1;
            stream->arriving = message;
            at += ALIGN;
            there -= ALIGN;
        }
        phx_message *message = stream->arriving;
        uint64_t length = message->end.nbytes - message->moved;
        if (length > PHX_PIECE)
            length = PHX_PIECE;
        if (padded(length) > there)
            length = there;
        read_ring(comm, place, at, message->data + message->moved, length, message->end.nbytes);
        at += padded(length);
        message->moved += length;
        if (message->moved == message->end.nbytes) {
            stream->arriving = NULL;
            phx_mail_arrived(comm, message);
        }
        if (at != tail) {
            stream->received += at - tail;
            tail = at;
            atomic_store_explicit(&ring->tail, tail, memory_order_release);
            ring_bell_of(comm, place);
            moved = 1;
        }
    }
}
