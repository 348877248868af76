/* A process of this machine, as another process sees it in /proc. */
#ifndef PHALANX_PROCESS_H
#define PHALANX_PROCESS_H

#include <stdint.h>

/* What distinguishes a process from a later one of the same pid, and a program from one that replaces it by exec.
 *   start_time  in clock ticks since boot, as the reader's time namespace counts them
 *   image       a hash of where the program's code and stack lie; 0 if the reader may not know */
struct phx_process {
    uint64_t start_time, image;
};

enum phx_sight {
    PHX_RUNNING,
    PHX_GONE,        /* it has ended (a zombie has), or there is none of this pid */
    PHX_OUT_OF_SIGHT /* it exists, and nothing more can be found out */
};

/* This process's id, as the pid namespace of this process's /proc counts. With a /proc of another namespace it differs
 * from getpid(). */
uint32_t phx_own_pid(void);

/* Look at a process. A reader that cannot find out takes the process to be alive. */
enum phx_sight phx_process_read(uint32_t pid, struct phx_process *process);

/* Whether descriptor `theirs` of the process is the same file as `fd` of this one: 1, or 0 with errno set. */
int phx_process_holds(uint32_t pid, int theirs, int fd);

#endif
