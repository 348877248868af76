/* Processes of this machine, as another process sees them in /proc; and what this one may use. */
#ifndef PHALANX_PROCESS_H
#define PHALANX_PROCESS_H

#include <pthread.h>
#include <stdint.h>

/* What distinguishes a process from a later one of the same pid, and a program from one that replaces it by exec.
 *   start_time  in clock ticks since boot, as the reader's time namespace counts them
 *   image       a hash of where the program's code and stack lie; 0 if the reader may not know */
struct phx_process {
    uint64_t start_time, image;
};

enum phx_sight {
    PHX_RUNNING,      /* or it exists, and nothing more can be found out: then it is read as zeros */
    PHX_GONE,         /* it has ended (a zombie has), or there is none of this pid */
    PHX_EXECED,       /* it runs another program than before (exec) */
};

/* This process's id, as the pid namespace of this process's /proc counts. With a /proc of another namespace it differs
 * from getpid(). */
uint32_t phx_own_pid(void);

/* Look at a process. A reader that cannot find out takes the process to be alive. */
enum phx_sight phx_process_read(uint32_t pid, struct phx_process *process);

/* Look once more at a process that was read as `known`, or not at all if that is zero: another process of its pid
 * counts as PHX_GONE. */
enum phx_sight phx_process_again(uint32_t pid, const struct phx_process *known);

/* Return how many cores this process may use. */
uint32_t phx_usable_cores(void);

/* Start a thread that gets no signals: they are for Python's threads. Returns what pthread_create() does. */
int phx_start_thread(pthread_t *thread, void *(*body)(void *), void *argument);

#endif
