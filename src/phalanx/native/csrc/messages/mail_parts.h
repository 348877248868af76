/* What the files of a rank's mail share: mail.c (matching, and rings inside the host) and remote.c (connections to ranks
 * of other hosts). All of it is under the mail's lock, which the functions here expect to be held.
 *
 * A *stream* carries the messages of one rank to this one and back. The mail of a group numbers ranks as the group does;
 * a *place* is a rank's number in the segment of its host. */
#ifndef PHALANX_MAIL_PARTS_H
#define PHALANX_MAIL_PARTS_H

#include <pthread.h>

#include "segment/comm.h"
#include "messages/mail.h"

#define PHX_PIECE 65536u /* a message of at most so many bytes may be sent at once, without one to wait for */

struct phx_list {
    phx_message *first, *last;
};

struct phx_stream {
    uint32_t place;            /* PHX_NOBODY of a rank of another host */
    struct phx_list sends;     /* what waits to be sent there, in the order of the calls */
    phx_message *arriving;     /* where the bytes that come next belong */
    struct phx_remote *remote; /* the connections with a rank of another host; NULL until there is one */
};

struct phx_mail {
    pthread_mutex_t lock;
    phx_comm *comm;
    uint32_t size;         /* of the group */
    uint32_t *ranks;       /* by place: the group's rank */
    int ended;             /* nothing moves any more: the owners of the data may free it */
    uint64_t finished;     /* how many messages have been done */
    struct phx_list posted; /* receives without a message yet, in the order of the calls */
    struct phx_list aside;  /* messages without a receive, in the order of their arrival */
    struct phx_stream *streams;
    uint32_t *reached;          /* the ranks of other hosts that have a `remote` */
    _Atomic uint32_t nreached;  /* how many; also read without the lock */
    uint32_t number;            /* among the mails that ready.c knows; 0: it knows it not */
    struct phx_mail *next;      /* in its list, under its lock */
};

void phx_list_append(struct phx_list *list, phx_message *message);
void phx_list_take_out(struct phx_list *list, phx_message *message);

/* Whether messages may move. In a broken group their owners have an error for them, and may have freed the data. */
static inline int phx_mail_may_move(const phx_comm *comm)
{
    return !phx_broken(comm) && !comm->mail->ended;
}

/* The message is done. It may be freed by this. */
void phx_mail_finish(phx_comm *comm, phx_message *message, int status);

/* The receive that a message is for. If there is none, but another receive waits for a later message of this stream, a new
 * message in which this one is set aside; else NULL. `line` is the sender's, if it is not to be found by its number. */
phx_message *phx_mail_claim(struct phx_mail *mail, uint32_t src, const struct phx_end *sent, uint32_t tag, const char *line);

/* Finish a receive with PHX_DIFFERS unless its end agrees with the sender's, which is then returned as 0. */
int phx_mail_agrees(phx_comm *comm, phx_message *receive, const struct phx_end *sent, const char *line);

/* All bytes of the message are there. */
void phx_mail_arrived(phx_comm *comm, phx_message *message);

/* -- remote.c ---------------------------------------------------------------------------------------------------- */

/* Move what can be moved to or from a rank of another host; whether any bytes have. */
int phx_remote_move_sends(phx_comm *comm, uint32_t dst);
int phx_remote_move_arrivals(phx_comm *comm, uint32_t src);

/* Send a small message at once, or the beginning and keep a copy of the rest: 1. Else do nothing: 0. */
int phx_remote_send_now(phx_comm *comm, const void *data, const struct phx_end *sent, uint32_t dst, uint32_t tag);

/* PHX_OK while messages from a rank of another host, or to it, may come or go; else PHX_PEER_LEFT or PHX_CUT. */
int phx_remote_state(const struct phx_mail *mail, uint32_t rank, int receiving);

/* How many bytes have been moved to or from the rank. */
uint64_t phx_remote_progress(const struct phx_mail *mail, uint32_t rank, int receiving);

/* End all connections; with `in_order` the other ranks are told that this one has left. */
void phx_remote_end(phx_comm *comm, int in_order);

/* A connection with the rank is ready, says ready.c. Takes the mail's lock. */
void phx_remote_ready(phx_comm *comm, uint32_t rank, int incoming, int may_write);

/* In a forked child: close what belongs to the parent. */
void phx_remote_let_go(struct phx_mail *mail);
void phx_remote_free(struct phx_mail *mail);

#endif
