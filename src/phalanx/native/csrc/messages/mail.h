/* A rank's messages: those that it sends, receives, or has set aside, and what moves them through the rings.
 *
 * All of it is private to the rank and under one lock, which these functions take. A thread in a call about a message
 * reads without it `done`, acquire, then `status`, which no longer changes; and `peer`, relaxed, which changes once, from
 * PHX_ANY_SOURCE to the sender's rank. */
#ifndef PHALANX_MAIL_H
#define PHALANX_MAIL_H

#include "segment/comm.h"

struct phx_message {
    char *data;
    struct phx_end end; /* this rank's; of a message that was set aside, its sender's */
    uint64_t moved;
    _Atomic uint32_t peer;
    uint32_t tag;
    int receiving, started, status, abandoned;
    _Atomic int done;
    /* Of the one thread that waits for the message: whether the group's timeout counts; when it last checked on the
     * peer; how long it has waited since bytes moved, and phx_mail_progress() at that time. */
    int expected;
    uint64_t checked, waited, progress;
    struct phx_message *claimed_by; /* of a message set aside: the receive that waits for its rest */
    struct phx_message *next;
};

struct phx_mail *phx_mail_open(uint32_t size);
/* Free the mail and every message that is not done. */
void phx_mail_close(struct phx_mail *mail, uint32_t size);

/* Queue a message to be sent and move what can be moved. */
void phx_mail_send(phx_comm *comm, phx_message *message);
/* The same for a receive; a message that was set aside for it is taken first. */
void phx_mail_receive(phx_comm *comm, phx_message *receive);
/* Put a whole message into the ring if nothing waits to be sent there and there is room: 1. Else do nothing: 0. */
int phx_mail_send_now(phx_comm *comm, const void *data, const struct phx_end *sent, uint32_t dst, uint32_t tag);

/* Move all messages of this rank as far as they can be moved now. */
struct phx_movement {
    int moved;         /* whether any bytes have moved */
    int ended;         /* whether phx_mail_end() has been called */
    uint64_t finished; /* how many messages have been done so far */
};
struct phx_movement phx_mail_move(phx_comm *comm);

/* A number that changes whenever the message makes progress. */
uint64_t phx_mail_progress(phx_comm *comm, const phx_message *message);

/* Finish a message with this status, unless it is done: its peer has left, and what it sent before was moved. */
void phx_mail_fail(phx_comm *comm, phx_message *message, int status);

/* Take back a receive that no message has come for: it is done, with PHX_PEER_LEFT, as it may have been before, and 1;
 * else 0, and it goes on. */
int phx_mail_withdraw(phx_comm *comm, phx_message *receive);

/* Let no message move any more, and wake the threads that wait for one. */
void phx_mail_end(phx_comm *comm);

/* Free the message as soon as it is done. */
void phx_mail_release(phx_comm *comm, phx_message *message);

#endif
