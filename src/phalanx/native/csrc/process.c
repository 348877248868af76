/* A process is known by its pid and its start time, both from /proc/<pid>/stat: a pid alone may have been given to
 * another process since. A pidfd would be as sure, but costs a descriptor for each peer and group. */
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* A start time that could not be read, of a process that exists. */
#define UNKNOWN UINT64_MAX

/* A rank that cannot read /proc (no descriptor left, no memory, not allowed) must not take the others for dead. */
static uint64_t unless_gone(uint32_t pid)
{
    return kill((pid_t)pid, 0) == 0 || errno != ESRCH ? UNKNOWN : 0;
}

uint64_t phx_process_start_time(uint32_t pid)
{
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    const int reason = errno;
    if (fd >= 0)
        close(fd);
    if (length < 0 && (reason == ENOENT || reason == ESRCH))
        return 0;
    if (length <= 0)
        return unless_gone(pid);
    text[length] = 0;
    char state;
    unsigned long long start_time;
    const char *after_name = strrchr(text, ')'); /* the name may hold anything, also ')' and spaces */
    if (!after_name || sscanf(after_name + 1,
                              " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                              &state, &start_time) != 2)
        return unless_gone(pid);
    return state == 'Z' || state == 'X' || state == 'x' ? 0 : start_time;
}

int phx_place_alive(const struct phx_place *place)
{
    const uint64_t start_time = phx_process_start_time(place->pid);
    return start_time && (start_time == place->start_time || start_time == UNKNOWN || place->start_time == UNKNOWN);
}
