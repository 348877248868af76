/* The one thread of the process that moves messages of other hosts while the threads that wait for them sleep.
 *
 * It sleeps in epoll_wait() on the connections of all mails. A connection is watched until it is ready once. Two locks,
 * of which the first is taken first: that of the list of mails, which the thread holds while it serves one, so that
 * none is freed meanwhile; and the mail's own. */
#define _GNU_SOURCE
#include "messages/mail.h"

#include <errno.h>
#include <sys/epoll.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct phx_mail *mails;
static uint32_t last_number;
static int epoll = -1; /* written once, before any mail is in the list */

/* The thread does not exist in a child, and the connections are the parent's, whose end must show when it ends. */
static void in_child(void)
{
    if (epoll >= 0)
        close(epoll);
    epoll = -1; /* first: the parent goes on to watch its connections */
    for (; mails; mails = mails->next)
        phx_remote_end(mails->comm, 0);
    pthread_mutex_init(&lock, NULL);
}

static void note_forks(void)
{
    pthread_atfork(NULL, NULL, in_child);
}

static void serve(const struct epoll_event *event)
{
    const uint64_t id = event->data.u64;
    pthread_mutex_lock(&lock);
    struct phx_mail *mail = mails;
    while (mail && mail->number != id >> 32)
        mail = mail->next;
    if (mail)
        phx_remote_ready(mail->comm, (uint32_t)id >> 1, id & 1, event->events == EPOLLOUT);
    pthread_mutex_unlock(&lock);
}

static void *run(void *own)
{
    struct epoll_event events[16];
    for (;;) {
        const int count = epoll_wait((int)(intptr_t)own, events, 16, -1);
        if (count < 0 && errno != EINTR)
            return NULL;
        for (int i = 0; i < count; i++)
            serve(&events[i]);
    }
}

static int start(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_t thread;
    pthread_once(&once, note_forks);
    const int made = epoll_create1(EPOLL_CLOEXEC);
    if (made < 0)
        return PHX_SYSTEM;
    if (phx_start_thread(&thread, run, (void *)(intptr_t)made)) {
        close(made);
        return PHX_SYSTEM;
    }
    pthread_detach(thread);
    epoll = made;
    return PHX_OK;
}

int phx_ready_enter(struct phx_mail *mail)
{
    pthread_mutex_lock(&lock);
    const int status = epoll >= 0 ? PHX_OK : start();
    if (!status && !mail->number) {
        mail->number = ++last_number;
        mail->next = mails;
        mails = mail;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

void phx_ready_leave(struct phx_mail *mail)
{
    pthread_mutex_lock(&lock);
    for (struct phx_mail **link = &mails; *link; link = &(*link)->next)
        if (*link == mail) {
            *link = mail->next;
            break;
        }
    pthread_mutex_unlock(&lock);
}

void phx_ready_watch(const struct phx_mail *mail, int socket, uint32_t rank, int incoming, int writes)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLONESHOT | (writes ? EPOLLOUT : 0u),
                                .data.u64 = (uint64_t)mail->number << 32 | (uint64_t)rank << 1 | (incoming != 0)};
    if (epoll_ctl(epoll, EPOLL_CTL_MOD, socket, &event) && errno == ENOENT)
        epoll_ctl(epoll, EPOLL_CTL_ADD, socket, &event); /* if the kernel has no memory for it, waits look in slices */
}

void phx_ready_forget(int socket)
{
    struct epoll_event nothing = {0};
    epoll_ctl(epoll, EPOLL_CTL_DEL, socket, &nothing);
}
