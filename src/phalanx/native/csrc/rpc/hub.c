/* A process's hub: its place, its bell, and the thread that notices deaths and shows that the process runs. */
#define _GNU_SOURCE
#include "rpc/hub.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define TICK_MS 40
#define MANY_LINKS 16u
#define MANY_TICK_MS 100
/* A place that has shown no life for longer is looked after in /proc, and again after as long. With a pidfd that is only
 * to notice an exec; on a machine that is too busy for the ticks it must not make it busier. */
#define STALE_NS 90000000ull
#define STALE_WITH_PIDFD_NS 500000000ull

_Atomic uint32_t phx_rpc_forks;

static void in_child(void)
{
    atomic_fetch_add_explicit(&phx_rpc_forks, 1, memory_order_relaxed);
}

static void note_forks(void)
{
    pthread_atfork(NULL, NULL, in_child);
}

static long wake(struct phx_rpc_place *place, int count, uint32_t bits)
{
    return syscall(SYS_futex, (uint32_t *)&place->bell, FUTEX_WAKE_BITSET, count, NULL, NULL, bits);
}

void phx_rpc_ring(struct phx_rpc_place *place, uint32_t bits, uint32_t otherwise)
{
    atomic_fetch_add_explicit(&place->bell, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&place->spinners, memory_order_seq_cst) ||
        !atomic_load_explicit(&place->sleepers, memory_order_seq_cst))
        return;
    if (wake(place, 1, bits) == 0 && otherwise)
        wake(place, 1, otherwise);
}

void phx_rpc_call_up(phx_rpc_hub *hub, uint32_t bits)
{
    const int one = bits == PHX_RPC_SERVERS;
    atomic_fetch_add_explicit(&hub->place->bell, 1, memory_order_seq_cst);
    if (atomic_load_explicit(one ? &hub->sleeping : &hub->place->sleepers, memory_order_seq_cst))
        wake(hub->place, one ? 1 : INT_MAX, bits);
}

void phx_rpc_ends(phx_rpc_link *link, uint32_t why)
{
    uint32_t not_yet = 0;
    if (!atomic_compare_exchange_strong(&link->ended, &not_yet, why))
        return;
    atomic_store_explicit(&link->own->closed, why, memory_order_release);
    if (link->peer)
        phx_rpc_ring(link->peer, PHX_RPC_SERVERS, 0);
    phx_rpc_call_up(link->hub, PHX_RPC_SERVERS);
    phx_rpc_call_up(link->hub, PHX_RPC_WAITERS);
    phx_wake(phx_low_half(&link->own->rings[0].tail));
    phx_wake(phx_low_half(&link->own->rings[1].tail));
}

/* A pidfd tells of the end of a process at once. Where there is none, and of an exec, the place's standstill tells. */
static void look_after(phx_rpc_link *link, uint64_t now)
{
    const uint64_t alive = atomic_load_explicit(&link->peer->alive_ns, memory_order_relaxed);
    const uint64_t stale_ns = link->pidfd >= 0 ? STALE_WITH_PIDFD_NS : STALE_NS;
    if (alive + stale_ns > now || link->looked_ns + stale_ns > now)
        return;
    link->looked_ns = now;
    struct phx_process seen;
    const enum phx_sight sight = phx_process_read(link->pid, &seen);
    if (sight == PHX_GONE || (sight == PHX_RUNNING && seen.start_time != link->process.start_time))
        phx_rpc_ends(link, PHX_RPC_GONE);
    else if (sight == PHX_RUNNING && seen.image && link->process.image && seen.image != link->process.image)
        phx_rpc_ends(link, PHX_RPC_REPLACED);
}

static void *watch(void *argument)
{
    phx_rpc_hub *hub = argument;
    struct pollfd *polled = NULL;
    phx_rpc_link **links = NULL;
    uint32_t room = 0;
    while (!atomic_load(&hub->shut)) {
        const uint64_t now = phx_now_ns();
        atomic_store_explicit(&hub->place->alive_ns, now, memory_order_relaxed);
        pthread_mutex_lock(&hub->lock);
        uint32_t count = hub->count;
        if (count > room) {
            struct pollfd *more = realloc(polled, 2 * count * sizeof *polled);
            polled = more ? more : polled;
            phx_rpc_link **others = realloc(links, 2 * count * sizeof(phx_rpc_link *));
            links = others ? others : links;
            room = more && others ? 2 * count : room;
        }
        count = count < room ? count : room;
        /* Those with a pidfd come first: poll() refuses more entries than the process may have descriptors. */
        uint32_t watched = 0;
        for (uint32_t i = 0, last = count; i < count; i++) {
            phx_rpc_link *link = hub->links[i];
            phx_rpc_hold(link);
            if (link->pidfd < 0 || atomic_load(&link->ended)) {
                links[--last] = link;
                continue;
            }
            polled[watched] = (struct pollfd){.fd = link->pidfd, .events = POLLIN};
            links[watched++] = link;
        }
        pthread_mutex_unlock(&hub->lock);
        const long tick_ms = count > MANY_LINKS ? MANY_TICK_MS : TICK_MS;
        const int ready = poll(polled, watched, (int)tick_ms);
        if (ready < 0) /* the limit on descriptors was lowered since, or the kernel has no memory */
            nanosleep(&(struct timespec){.tv_nsec = tick_ms * 1000000}, NULL);
        for (uint32_t i = 0; i < count; i++) {
            if (ready > 0 && i < watched && polled[i].revents)
                phx_rpc_ends(links[i], PHX_RPC_GONE);
            else if (!atomic_load(&links[i]->ended))
                look_after(links[i], now);
            phx_rpc_trim(&links[i]->slab, now);
            phx_rpc_drop(links[i]);
        }
        phx_rpc_collect(&hub->loans, 0);
        phx_rpc_trim(&hub->loans.slab, now);
    }
    free(polled);
    free(links);
    return NULL;
}

/* How many cores this process may use. The kernel refuses a set that has fewer bits than the machine may have cores. */
static uint32_t cores_to_use(void)
{
    for (int bits = CPU_SETSIZE; bits <= 1 << 20; bits *= 2) {
        cpu_set_t *set = CPU_ALLOC((size_t)bits);
        const size_t bytes = CPU_ALLOC_SIZE((size_t)bits);
        const int found = set && sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
        CPU_FREE(set);
        if (found)
            return (uint32_t)found;
    }
    return 1;
}

static int start_watcher(phx_rpc_hub *hub)
{
    sigset_t all, before; /* signals are for Python's threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&hub->watcher, NULL, watch, hub);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed;
}

static uint64_t place_bytes(const phx_rpc_hub *hub)
{
    return PHX_RPC_SHARED_AT + hub->loans.slab.bytes;
}

/* Make the file of the hub's place and slab, and map it. Returns 0, or -1 with errno set. */
static int make_place(phx_rpc_hub *hub, const uint8_t *cookie)
{
    hub->fd = phx_rpc_make_file(place_bytes(hub));
    if (hub->fd < 0)
        return -1;
    char *map = mmap(NULL, place_bytes(hub), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, hub->fd, 0);
    if (map != MAP_FAILED && phx_rpc_back(map, PHX_RPC_PAGE)) {
        hub->place = (struct phx_rpc_place *)map;
        hub->loans.slab.data = map + PHX_RPC_SHARED_AT;
        hub->place->magic = PHX_RPC_MAGIC;
        hub->place->abi = PHX_ABI;
        hub->place->slab_bytes = hub->loans.slab.bytes;
        memcpy(hub->place->cookie, cookie, sizeof hub->place->cookie);
        return 0;
    }
    const int reason = map != MAP_FAILED ? ENOMEM : errno;
    if (map != MAP_FAILED)
        munmap(map, place_bytes(hub));
    close(hub->fd);
    errno = reason;
    return -1;
}

/* A thread that still reads it may find another file under its number, but nothing at such an offset. */
static void close_pagemap(phx_rpc_hub *hub)
{
    const int fd = atomic_exchange(&hub->pagemap, -1);
    if (fd >= 0)
        close(fd);
}

static void free_hub(phx_rpc_hub *hub)
{
    close_pagemap(hub);
    munmap(hub->place, place_bytes(hub));
    pthread_mutex_destroy(&hub->lock);
    pthread_mutex_destroy(&hub->loans.lock);
    pthread_mutex_destroy(&hub->loans.slab.lock);
    free(hub->links);
    free(hub);
}

phx_rpc_hub *phx_rpc_open(const uint8_t *cookie, uint64_t shared_bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, note_forks);
    phx_rpc_hub *hub = calloc(1, sizeof *hub);
    if (!hub || !(hub->links = calloc(PHX_RPC_LINKS, sizeof *hub->links))) {
        free(hub);
        errno = ENOMEM;
        return NULL;
    }
    hub->loans.slab.bytes = shared_bytes;
    hub->loans.slab.released = hub->loans.released;
    if (make_place(hub, cookie)) {
        const int reason = errno;
        free(hub->links);
        free(hub);
        errno = reason;
        return NULL;
    }
    atomic_store(&hub->place->alive_ns, phx_now_ns());
    phx_rpc_stamp(hub);
    hub->forks = atomic_load(&phx_rpc_forks);
    hub->cores = cores_to_use();
    atomic_store(&hub->refs, 1);
    pthread_mutex_init(&hub->lock, NULL);
    pthread_mutex_init(&hub->loans.lock, NULL);
    pthread_mutex_init(&hub->loans.slab.lock, NULL);
    atomic_store(&hub->pagemap, open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
    const int failed = start_watcher(hub);
    if (!failed)
        return hub;
    close(hub->fd);
    free_hub(hub);
    errno = failed;
    return NULL;
}

int phx_rpc_descriptor(phx_rpc_hub *hub)
{
    return hub->fd;
}

void phx_rpc_shut(phx_rpc_hub *hub)
{
    if (!phx_rpc_mine(hub) || atomic_exchange(&hub->shut, 1))
        return;
    for (;;) {
        pthread_mutex_lock(&hub->lock);
        phx_rpc_link *link = hub->count ? hub->links[hub->count - 1] : NULL;
        if (link)
            phx_rpc_hold(link);
        pthread_mutex_unlock(&hub->lock);
        if (!link)
            break;
        phx_rpc_end(link);
        phx_rpc_drop(link);
    }
    pthread_join(hub->watcher, NULL);
    phx_rpc_collect(&hub->loans, 1); /* nothing is shared any more, so no receiver can see the memory change */
    close(hub->fd);
    close_pagemap(hub);
    phx_rpc_call_up(hub, PHX_RPC_SERVERS | PHX_RPC_WAITERS);
}

void phx_rpc_unref(phx_rpc_hub *hub)
{
    if (atomic_fetch_sub(&hub->refs, 1) != 1)
        return;
    free_hub(hub);
}

void phx_rpc_close(phx_rpc_hub *hub)
{
    if (!phx_rpc_mine(hub))
        return;
    phx_rpc_shut(hub);
    phx_rpc_unref(hub);
}
