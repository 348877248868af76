/* States of a segment that occur only if a rank loses its core at one certain instruction, set by hand; a /proc that
 * cannot be read; and a clock that jumps. Prints the line that failed.
 *
 * Ranks 0 and 1 of each segment are this process; rank 2, if there is one, is another. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "segment/comm.h"

#define REQUIRE(condition)                                                                                       \
    do {                                                                                                         \
        if (!(condition)) {                                                                                      \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                                              \
            _exit(1);                                                                                            \
        }                                                                                                        \
    } while (0)

static const uint8_t cookie[16] = "breaks";
static int open_fails; /* with this errno */

/* Replaces the C library's, for the core as well. */
int open(const char *path, int flags, ...)
{
    if (open_fails) {
        errno = open_fails;
        return -1;
    }
    return (int)syscall(SYS_openat, -100, path, flags, 0);
}

static _Atomic long clock_ahead_s;

int clock_gettime(clockid_t clock, struct timespec *time)
{
    const long failed = syscall(SYS_clock_gettime, clock, time);
    time->tv_sec += clock_ahead_s;
    return (int)failed;
}

static phx_comm *beside; /* rank 1 of the segment that was made last */

static phx_comm *segment(int size)
{
    const int fd = memfd_create("breaks", MFD_CLOEXEC);
    REQUIRE(phx_segment_format(fd, (uint32_t)size, 4096, 128, 256, cookie) == PHX_OK);
    if (size > 2) {
        const pid_t child = fork();
        if (child == 0)
            _exit(phx_open(fd, 2, cookie, 50, NULL) ? 0 : 1);
        int status;
        REQUIRE(waitpid(child, &status, 0) == child && status == 0);
    }
    phx_comm *comm = phx_open(fd, 0, cookie, 50, NULL);
    beside = phx_open(fd, 1, cookie, 50, NULL);
    REQUIRE(comm && beside);
    close(fd);
    return comm;
}

static void the_first_of_two_reasons_counts(void)
{
    phx_comm *comm = segment(2);
    struct phx_breakage why;
    REQUIRE(phx_breakage(comm, &why) == PHX_OK && why.status == PHX_OK);
    REQUIRE(phx_break(beside, PHX_TIMEOUT, 0) == PHX_TIMEOUT);
    REQUIRE(phx_break(comm, PHX_PEER_LOST, 1) == PHX_TIMEOUT);
    REQUIRE(phx_breakage(comm, &why) == PHX_TIMEOUT && why.rank == 1 && why.peer == 0);
    phx_close(beside);
    phx_close(comm);
}

static void one_thread_of_a_rank_is_describing(void)
{
    phx_comm *comm = segment(2);
    char text[PHX_TEXT];
    comm->places[0].described = 1; /* as while another thread of this rank writes the text */
    phx_describe(comm, "the second thread");
    REQUIRE(comm->places[0].text[0] == 0);
    REQUIRE(!phx_description(comm, 0, text));
    comm->places[0].described = 0;
    phx_describe(comm, "the first thread");
    phx_describe(comm, "the second thread");
    REQUIRE(phx_description(comm, 0, text) && strcmp(text, "the first thread") == 0);
    REQUIRE(!phx_description(comm, 2, text));
    phx_close(comm);
}

static void a_rank_that_cannot_read_proc_takes_no_other_for_dead(void)
{
    phx_comm *comm = segment(3);
    const int blind[] = {EMFILE, ENFILE, ENOMEM, EACCES, EPERM, EINTR, ENOENT};
    for (size_t i = 0; i < sizeof blind / sizeof *blind; i++) {
        open_fails = blind[i];
        REQUIRE(phx_peer_life(comm, 1) == PHX_HERE);
        REQUIRE(phx_peer_life(comm, 2) == PHX_ENDED);
    }
    open_fails = 0;
    REQUIRE(phx_peer_life(comm, 1) == PHX_HERE);
    REQUIRE(phx_peer_life(comm, 2) == PHX_ENDED);
    phx_close(comm);
}

static void *come_after_a_long_stop(void *argument)
{
    char byte = 0;
    usleep(300000);
    clock_ahead_s += 3600; /* as when the whole job was stopped for an hour */
    usleep(300000);
    REQUIRE(phx_send(beside, &byte, &(struct phx_end){1, PHX_U8, 0}, 0, 0) == PHX_SENT);
    usleep(300000);
    clock_ahead_s += 3600;
    usleep(300000);
    REQUIRE(phx_barrier(beside) == PHX_OK);
    return argument;
}

static void time_in_which_the_waiter_did_not_run_does_not_count(void)
{
    phx_comm *comm = segment(2);
    pthread_t late;
    char byte;
    phx_set_timeout(comm, 60000000000ull, 60000000000ull);
    REQUIRE(pthread_create(&late, NULL, come_after_a_long_stop, NULL) == 0);
    phx_message *received = phx_recv(comm, &byte, &(struct phx_end){1, PHX_U8, 0}, 1, 0);
    REQUIRE(phx_message_wait(comm, received, 0) == PHX_OK);
    REQUIRE(phx_barrier(comm) == PHX_OK);
    phx_message_free(comm, received);
    pthread_join(late, NULL);
    phx_close(beside);
    phx_close(comm);
}

int main(void)
{
    time_in_which_the_waiter_did_not_run_does_not_count();
    one_thread_of_a_rank_is_describing();
    a_rank_that_cannot_read_proc_takes_no_other_for_dead();
    the_first_of_two_reasons_counts();
    return 0;
}
