/* A process is known by its pid and its start time, both from /proc: a pid alone may have been given to another process
 * since. A pidfd would be as sure, but costs a descriptor for each peer and group. Neither tells of an exec, which
 * leaves both as they are; but it places code and stack anew, at random addresses. */
#define _GNU_SOURCE
#include "system/process.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

uint32_t phx_own_pid(void)
{
    char text[16];
    const ssize_t length = readlink("/proc/self", text, sizeof text - 1);
    if (length <= 0)
        return (uint32_t)getpid();
    text[length] = 0;
    return (uint32_t)strtoul(text, NULL, 10);
}

/* A rank that cannot read /proc (no descriptor left, no memory, not allowed, hidepid) must not take the others for
 * dead. kill() counts pids in this process's own namespace, so it is asked only where /proc counts in the same one. */
static enum phx_sight ask_kill(uint32_t pid, int hidden)
{
    if (hidden && phx_own_pid() != (uint32_t)getpid())
        return PHX_GONE;
    return kill((pid_t)pid, 0) == 0 || errno != ESRCH ? PHX_RUNNING : PHX_GONE;
}

static uint64_t mixed(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0xff51afd7ed558ccdull;
    return hash ^ hash >> 32;
}

enum phx_sight phx_process_read(uint32_t pid, struct phx_process *process)
{
    char path[32], text[1024];
    *process = (struct phx_process){0, 0};
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    const int reason = errno;
    if (fd >= 0)
        close(fd);
    if (length < 0 && reason == ESRCH)
        return PHX_GONE;
    if (length <= 0)
        return ask_kill(pid, length < 0 && reason == ENOENT);
    text[length] = 0;
    char state;
    unsigned long long start_time, code, code_end, stack;
    const char *after_name = strrchr(text, ')'); /* the name may hold anything, also ')' and spaces */
    if (!after_name || sscanf(after_name + 1,
                              " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu"
                              " %*u %*d %*u %llu %llu %llu",
                              &state, &start_time, &code, &code_end, &stack) != 5)
        return ask_kill(pid, 0);
    if (state == 'Z' || state == 'X' || state == 'x')
        return PHX_GONE;
    process->start_time = start_time;
    /* The kernel writes 0 for the stack if the reader may not know the addresses, or the process has none any more. */
    process->image = stack ? mixed(mixed(mixed(1, code), code_end), stack) : 0;
    return PHX_RUNNING;
}

enum phx_sight phx_process_again(uint32_t pid, const struct phx_process *known)
{
    struct phx_process now;
    const enum phx_sight sight = phx_process_read(pid, &now);
    if (sight != PHX_RUNNING)
        return sight;
    if (known->start_time && now.start_time && known->start_time != now.start_time)
        return PHX_GONE;
    return known->image && now.image && known->image != now.image ? PHX_EXECED : PHX_RUNNING;
}

uint32_t phx_usable_cores(void)
{
    cpu_set_t sets[8]; /* 8192 cores: the kernel refuses a set with fewer bits than the machine may have cores */
    return sched_getaffinity(0, sizeof sets, sets) ? 1 : (uint32_t)CPU_COUNT_S(sizeof sets, sets);
}

int phx_start_thread(pthread_t *thread, void *(*body)(void *), void *argument)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(thread, NULL, body, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed;
}
