/* The heartbeat of this process: a byte every half second on each of some connections, by a thread that needs no
 * interpreter. So a peer can tell a process that is stopped from one that computes for a long time.
 *
 * All state is the process's own. `beats` is read and written under `lock`, which the thread holds while it sends: after
 * phx_beat_end() has returned, nothing is written to that descriptor. The thread is started with the first connection
 * and lives as long as the process. */
#define _GNU_SOURCE
#include "phalanx.h"

#include <linux/sockios.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>

#define BEAT_NS 500000000l

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    int *sockets;
    size_t count, room;
    int runs; /* the thread has been started */
} beats;

static void in_child(void)
{
    /* The thread does not exist there, and the connections are the parent's. */
    pthread_mutex_init(&lock, NULL);
    beats.count = 0;
    beats.runs = 0;
}

static void note_forks(void)
{
    pthread_atfork(NULL, NULL, in_child);
}

static void *beat(void *nothing)
{
    (void)nothing;
    for (;;) {
        nanosleep(&(struct timespec){.tv_nsec = BEAT_NS}, NULL);
        pthread_mutex_lock(&lock);
        for (size_t i = 0; i < beats.count; i++) {
            /* What has not been acknowledged is a heartbeat too: the kernel repeats it. More of them would fill the
             * buffers of a peer that does not read for hours. */
            int waiting = 0;
            if (ioctl(beats.sockets[i], SIOCOUTQ, &waiting) == 0 && waiting == 0)
                send(beats.sockets[i], "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
        }
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

static int start(void)
{
    sigset_t all, before; /* signals are for Python's threads */
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&thread, NULL, beat, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed)
        pthread_detach(thread);
    return !failed;
}

int phx_beat(int socket)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, note_forks);
    int status = PHX_SYSTEM;
    pthread_mutex_lock(&lock);
    if (beats.count == beats.room) {
        const size_t room = beats.room ? 2 * beats.room : 16;
        int *more = realloc(beats.sockets, room * sizeof *more);
        if (more) {
            beats.sockets = more;
            beats.room = room;
        }
    }
    if (beats.count < beats.room && (beats.runs || (beats.runs = start()))) {
        beats.sockets[beats.count++] = socket;
        status = PHX_OK;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

void phx_beat_end(int socket)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < beats.count; i++)
        if (beats.sockets[i] == socket) {
            beats.sockets[i] = beats.sockets[--beats.count];
            break;
        }
    pthread_mutex_unlock(&lock);
}
