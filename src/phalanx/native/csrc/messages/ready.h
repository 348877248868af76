/* The one thread of the process that moves messages of other hosts while the threads that wait for them sleep.
 *
 * It sleeps in epoll_wait() on the connections of all mails. A connection is watched until it is ready once. Two locks, of
 * which the first is taken first: that of the list of mails, which the thread holds while it serves one, so that none is
 * freed meanwhile; and the mail's own. */
#ifndef PHALANX_READY_H
#define PHALANX_READY_H

#include "messages/mail_parts.h"

/* Have the thread know a mail; starts it with the first one. PHX_SYSTEM if the system refuses. Not under the mail's lock. */
int phx_ready_enter(struct phx_mail *mail);
/* When this has returned, the thread does nothing for the mail any more. Not under the mail's lock. */
void phx_ready_leave(struct phx_mail *mail);

/* Have phx_remote_ready() called once the connection can be read, or with `writes` written. */
void phx_ready_watch(const struct phx_mail *mail, int socket, uint32_t rank, int incoming, int writes);
/* End that, before the socket is closed. */
void phx_ready_forget(int socket);

#endif
