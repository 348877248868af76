/* Mapping other processes' recorders. */
#define _GNU_SOURCE
#include "recorder/recordings.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "phalanx.h"

struct held {
    struct held *next;
    char *memory;
    uint64_t start_time; /* with the pid it distinguishes processes */
    uint32_t pid, holders;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the list */
static struct held *all;

/* The maps are the child's too, and its groups; a thread of the parent's may have had the lock. */
static void unlock_in_child(void)
{
    pthread_mutex_init(&lock, NULL);
}

static void prepare(void)
{
    pthread_atfork(NULL, NULL, unlock_in_child);
}

static int is_recorder(const struct stat *found, const struct phx_recorder_file *place)
{
    return S_ISREG(found->st_mode) && found->st_dev == place->device && found->st_ino == place->inode &&
           (uint64_t)found->st_size >= place->at + PHX_RECORDER_BYTES;
}

static char *map(uint32_t pid, const struct phx_recorder_file *place)
{
    char path[64];
    struct stat found;
    snprintf(path, sizeof path, "/proc/%u/fd/%d", pid, place->fd);
    const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (file < 0)
        return NULL;
    void *mapped = MAP_FAILED;
    if (!fstat(file, &found) && is_recorder(&found, place))
        mapped = mmap(NULL, PHX_RECORDER_BYTES, PROT_READ, MAP_SHARED, file, (off_t)place->at);
    close(file);
    return mapped == MAP_FAILED ? NULL : mapped;
}

static struct held *hold(uint32_t pid, uint64_t start_time, const struct phx_recorder_file *place)
{
    for (struct held *one = all; one; one = one->next)
        if (one->pid == pid && one->start_time == start_time)
            return one;
    struct held *made = calloc(1, sizeof *made);
    if (!made)
        return NULL;
    made->memory = map(pid, place);
    if (!made->memory) {
        free(made);
        return NULL;
    }
    made->pid = pid;
    made->start_time = start_time;
    made->next = all;
    all = made;
    return made;
}

const char *phx_recording_hold(uint32_t pid, uint64_t start_time, const struct phx_recorder_file *place)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, prepare);
    pthread_mutex_lock(&lock);
    struct held *found = hold(pid, start_time, place);
    if (found)
        found->holders++;
    pthread_mutex_unlock(&lock);
    return found ? found->memory : NULL;
}

void phx_recording_release(const char *memory)
{
    if (!memory)
        return;
    pthread_mutex_lock(&lock);
    for (struct held **link = &all; *link; link = &(*link)->next) {
        struct held *one = *link;
        if (one->memory != memory || --one->holders)
            continue;
        *link = one->next;
        munmap(one->memory, PHX_RECORDER_BYTES);
        free(one);
        break;
    }
    pthread_mutex_unlock(&lock);
}
