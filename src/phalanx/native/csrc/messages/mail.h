/* A rank's messages. mail.c matches them with receives, and has the calls; rings.c moves them inside the host; remote.c
 * through connections to ranks of other hosts, and ready.c is the thread that does so while others sleep.
 *
 * A mail numbers ranks as the group does. A *place* is a rank's number in the segment of its host, PHX_NOBODY on another
 * host. All is private to the rank and under the mail's lock, but for these:
 *
 * field             writer                            readers
 * message->done     who finishes it, release; once    the thread that waits, acquire, then `status`, which stays
 * message->peer     the match, relaxed; once, from    the thread that waits, relaxed
 *                   PHX_ANY_SOURCE to a rank
 * message->expected, the thread that waits            the same; `expected` also who asks (phx_messages_waiting())
 * asked .. progress
 * mail->size, place phx_messages_join()               all, later
 * mail->nreached    remote.c, under the lock          a thread before it sleeps
 * mail->number,     ready.c, under its own lock       the same
 * next */
#ifndef PHALANX_MAIL_H
#define PHALANX_MAIL_H

#include <pthread.h>

#include "segment/comm.h"
#include "system/futex.h"

/* Bytes copied before the other side is notified, so that both copy at the same time. A message of at most so many may
 * be sent at once inside a host, without one to wait for. */
#define PHX_PIECE 65536u

struct phx_message {
    char *data;
    struct phx_end end; /* this rank's; of a message that was set aside, its sender's */
    uint64_t moved;
    _Atomic uint32_t peer;
    uint32_t tag;
    int receiving, started, status;
    int aside;     /* it has no receive yet, and its data are in memory of their own */
    int abandoned; /* nobody has its handle any more; it is freed when it is done */
    _Atomic int done;
    _Atomic int expected; /* the group's timeout counts */
    int asked;            /* it has been said once that no connection brings it (PHX_UNMET) */
    uint64_t checked;     /* when the peer was last checked on */
    uint64_t waited;      /* since bytes moved */
    uint64_t progress;    /* what progress_of() said then */
    struct phx_end sent;            /* with PHX_DIFFERS: the end of the rank that sent */
    char *line;                     /* and its line; also of a message set aside that came from another host; or NULL */
    struct phx_message *next;
};

struct phx_list {
    phx_message *first, *last;
};

/* The messages of one rank to this one and back. */
struct phx_stream {
    uint32_t place;
    uint64_t sent, received;   /* bytes in all */
    struct phx_list sends;     /* what waits to be sent there, in the order of the calls */
    phx_message *arriving;     /* where the bytes that come next belong */
    struct phx_remote *remote; /* the connections with a rank of another host; NULL until there is one */
};

struct phx_mail {
    pthread_mutex_t lock;
    phx_comm *comm;
    uint32_t size;          /* of the group */
    uint32_t *ranks;        /* by place: the group's rank */
    int ended;              /* nothing moves any more: the owners of the data may free it */
    uint64_t finished;      /* how many messages have been done */
    struct phx_list posted; /* receives without a message yet, in the order of the calls */
    struct phx_list aside;  /* messages without a receive, in the order of their arrival */
    struct phx_stream *streams;
    uint32_t *reached;          /* the ranks of other hosts that have a `remote` */
    _Atomic uint32_t nreached;  /* how many */
    uint32_t number;            /* among the mails that ready.c knows; 0: it knows it not */
    struct phx_mail *next;      /* in its list */
};

/* -- mail.c -------------------------------------------------------------------------------------------------------- */

struct phx_mail *phx_mail_open(phx_comm *comm);
/* Free the mail and every message that is not done. */
void phx_mail_close(struct phx_mail *mail);

/* The following expect the lock to be held. */

void phx_list_append(struct phx_list *list, phx_message *message);
void phx_list_take_out(struct phx_list *list, phx_message *message);

/* Tell whether messages may move. In a broken group their owners have an error for them, and may have freed the data. */
static inline int phx_mail_may_move(const phx_comm *comm)
{
    return !phx_broken(comm) && !comm->mail->ended;
}

/* The message is done. It may be freed by this. */
void phx_mail_finish(phx_comm *comm, phx_message *message, int status);

/* The receive that a message is for. If there is none, but another receive waits for a later message of this stream, a
 * new message in which this one is set aside; else NULL. `line` is the sender's, if it is not to be found by its
 * number. */
phx_message *phx_mail_claim(struct phx_mail *mail, uint32_t src, const struct phx_end *sent, uint32_t tag,
                            const char *line);

/* Tell whether a receive's end agrees with the sender's: 1; else 0, and the receive is finished: with PHX_DIFFERS if the
 * sender is on another host and at this line, and else the group is broken. */
int phx_mail_agrees(phx_comm *comm, phx_message *receive, uint32_t src, const struct phx_end *sent, const char *line);

/* All bytes of the message are there. */
void phx_mail_arrived(phx_comm *comm, phx_message *message);

/* Wake the threads that sleep on the bell of a place. */
static inline void phx_ring_bell(struct phx_place *place)
{
    atomic_fetch_add_explicit(&place->bell, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&place->listening, memory_order_seq_cst))
        phx_wake(&place->bell);
}

/* -- rings.c: these expect the lock, too --------------------------------------------------------------------------- */

/* Move what can be moved through the ring to a place, or from it; whether any bytes have. */
int phx_rings_move_sends(phx_comm *comm, uint32_t place);
int phx_rings_move_arrivals(phx_comm *comm, uint32_t place);

/* Return whether the ring to a place takes all of a message at once. */
int phx_rings_have_room(const phx_comm *comm, uint32_t place, uint64_t nbytes);

/* -- remote.c: these expect the lock, too, but for the last ones --------------------------------------------------- */

/* Move what can be moved to or from a rank of another host; whether any bytes have. The rest of a large message is
 * moved only by the thread of ready.c. */
int phx_remote_move_sends(phx_comm *comm, uint32_t dst, int by_thread);
int phx_remote_move_arrivals(phx_comm *comm, uint32_t src, int by_thread);

/* Have a large receive of a collective looked after, which has been posted. */
void phx_remote_posted(phx_comm *comm, uint32_t src);

/* End all connections; with `in_order` the other ranks are told that this one has left. */
void phx_remote_end(phx_comm *comm, int in_order);

void phx_remote_free(struct phx_mail *mail);

/* PHX_OK while messages from a rank of another host, or to it, may come or go; else PHX_PEER_LEFT or PHX_CUT. */
int phx_remote_state(struct phx_mail *mail, uint32_t rank, int receiving);

/* The connection on which alone a receive depends, which this thread may watch itself; -1 if there is none. */
int phx_remote_socket(phx_comm *comm, const phx_message *message);

/* Have the connections to other hosts looked after, as this thread is about to sleep on its bell. */
void phx_mail_watch(phx_comm *comm);

/* A connection with the rank is ready, says ready.c. */
void phx_remote_ready(phx_comm *comm, uint32_t rank, int incoming, int may_write);

/* -- ready.c ------------------------------------------------------------------------------------------------------ */

/* Have the thread know a mail; starts it with the first one. PHX_SYSTEM if the system refuses. Not under the mail's
 * lock. */
int phx_ready_enter(struct phx_mail *mail);
/* Have the thread do nothing for the mail any more, from when this has returned. Not under the mail's lock. */
void phx_ready_leave(struct phx_mail *mail);

/* Have phx_remote_ready() called once the connection can be read, or with `writes` written. */
void phx_ready_watch(const struct phx_mail *mail, int socket, uint32_t rank, int incoming, int writes);
/* End that, before the socket is closed. */
void phx_ready_forget(int socket);

#endif
