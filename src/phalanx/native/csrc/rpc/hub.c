/* A process's hub and its links: made, found by the other process through /proc, ended, and given back when nobody
 * needs them; and the thread that notices deaths and shows that the process runs. */
#define _GNU_SOURCE
#include "rpc/hub.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

_Static_assert(sizeof(struct phx_rpc_place) <= PHX_RPC_PAGE, "a place is one page");
_Static_assert(sizeof(struct phx_rpc_image) == 32 && sizeof(struct phx_rpc_box) == 64, "as links/shared.py reads them");
_Static_assert(sizeof(struct phx_rpc_record) == 16, "records keep what follows them aligned");
_Static_assert(2 * (PHX_RPC_SMALL + sizeof(struct phx_rpc_record)) <= PHX_RPC_RING_BYTES,
               "every record finds room at any place of an empty ring");

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
    uint32_t before = 0;
    while (!atomic_compare_exchange_strong(&link->ended, &before, why))
        if (why < PHX_RPC_DAMAGED || before >= PHX_RPC_DAMAGED)
            return; /* else what has come cannot be taken, and the link's end would wait for it for ever */
    atomic_store_explicit(&link->own->closed, why, memory_order_release);
    if (link->peer)
        phx_rpc_ring(link->peer, PHX_RPC_SERVERS, 0);
    phx_rpc_call_up(link->hub, PHX_RPC_SERVERS);
    phx_rpc_call_up(link->hub, PHX_RPC_WAITERS);
    phx_wake(phx_low_half(&link->own->ring.tail));
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
    munmap(hub->place, PHX_RPC_SHARED_AT + hub->slab.bytes);
    pthread_mutex_destroy(&hub->lock);
    pthread_mutex_destroy(&hub->slab.lock);
    free(hub);
}

static void unref_hub(phx_rpc_hub *hub)
{
    if (atomic_fetch_sub(&hub->refs, 1) == 1)
        free_hub(hub);
}

/* -- links ------------------------------------------------------------------------------------------------------- */

static int is_slab(uint64_t bytes)
{
    return bytes && bytes % PHX_RPC_PAGE == 0 && bytes <= PHX_RPC_LARGEST_SLAB;
}

/* Open descriptor `number` of the process if it is the place of this cookie, or if `slab_bytes` is NULL the channel. */
static int reach(uint32_t pid, int number, const uint8_t *cookie, uint64_t *slab_bytes)
{
    struct phx_rpc_place head; /* the beginning of a channel is the same */
    struct stat file;
    const int fd = phx_rpc_open_file(pid, number);
    if (fd < 0)
        return -1;
    /* The descriptor's number may belong to another file by now, so nothing is mapped before this check. */
    const size_t start = offsetof(struct phx_rpc_place, bell);
    if (pread(fd, &head, start, 0) == (ssize_t)start && head.magic == PHX_RPC_MAGIC && head.abi == PHX_ABI &&
        memcmp(head.cookie, cookie, sizeof head.cookie) == 0 && fstat(fd, &file) == 0 &&
        (!slab_bytes || is_slab(head.slab_bytes)) &&
        (uint64_t)file.st_size == (slab_bytes ? PHX_RPC_SHARED_AT + head.slab_bytes : phx_rpc_channel_bytes())) {
        if (slab_bytes)
            *slab_bytes = head.slab_bytes;
        return fd;
    }
    close(fd);
    errno = EPROTO;
    return -1;
}

static struct phx_rpc_end_of_ring end_of(phx_rpc_link *link, struct phx_rpc_side *side)
{
    const uint64_t at = phx_rpc_rings_at() + (uint64_t)(side - link->channel->sides) * PHX_RPC_RING_BYTES;
    return (struct phx_rpc_end_of_ring){.ring = &side->ring, .data = (char *)link->channel + at, .bytes = PHX_RPC_RING_BYTES};
}

/* This process's view of a channel, as its side 0 or 1. */
static phx_rpc_link *view(phx_rpc_hub *hub, int fd, uint32_t side)
{
    phx_rpc_link *link = calloc(1, sizeof *link);
    if (!link)
        return NULL;
    void *map = mmap(NULL, phx_rpc_channel_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (map == MAP_FAILED || !phx_rpc_back(map, sizeof(struct phx_rpc_channel))) {
        if (map != MAP_FAILED) {
            munmap(map, phx_rpc_channel_bytes());
            errno = ENOMEM;
        }
        free(link);
        return NULL;
    }
    link->hub = hub;
    link->channel = map;
    link->own = &link->channel->sides[side];
    link->other = &link->channel->sides[!side];
    link->pidfd = -1;
    link->out = end_of(link, link->own);
    link->inbox.in = end_of(link, link->other);
    link->inbox.last = &link->inbox.first;
    pthread_mutex_init(&link->sending, NULL);
    atomic_store(&link->refs, 1);
    atomic_fetch_add(&hub->refs, 1);
    return link;
}

static void say_who(phx_rpc_link *link)
{
    struct phx_process self = {0};
    link->own->pid = phx_own_pid();
    phx_process_read(link->own->pid, &self);
    link->own->start_time = self.start_time;
    link->own->image = self.image;
    link->own->fd = link->hub->fd;
    memcpy(link->own->place_cookie, link->hub->place->cookie, sizeof link->own->place_cookie);
}

/* Map the other process's place and slab, and look at the process. */
static int meet(phx_rpc_link *link, uint32_t pid, int place_fd, const uint8_t *place_cookie)
{
    const int fd = reach(pid, place_fd, place_cookie, &link->slab_bytes);
    if (fd < 0)
        return -1;
    void *place = mmap(NULL, PHX_RPC_SHARED_AT + link->slab_bytes, PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_NORESERVE, fd, 0);
    void *slab = mmap(NULL, link->slab_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd,
                      PHX_RPC_SHARED_AT);
    close(fd);
    if (slab != MAP_FAILED)
        link->private_slab = slab;
    if (place == MAP_FAILED)
        return -1;
    link->peer = place;
    link->their_slab = (char *)place + PHX_RPC_SHARED_AT;
    if (link->private_slab)
        atomic_store_explicit(&link->own->borrows, 1, memory_order_release);
    link->pid = pid;
    if (phx_own_pid() == (uint32_t)getpid()) /* else pids mean others here than in this process's /proc */
        link->pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (phx_process_read(pid, &link->process) == PHX_RUNNING && link->process.start_time == link->other->start_time)
        return 0;
    errno = ESRCH;
    return -1;
}

void phx_rpc_unlist(phx_rpc_link *link)
{
    phx_rpc_hub *hub = link->hub;
    for (uint32_t i = 0; i < hub->count; i++)
        if (hub->links[i] == link) {
            hub->links[i] = hub->links[--hub->count];
            link->listed = 0;
            phx_rpc_drop(link); /* never the last one: who calls has one */
            return;
        }
}

int phx_rpc_begin(phx_rpc_link *link)
{
    phx_rpc_hub *hub = link->hub;
    if (!phx_rpc_mine(hub))
        return PHX_PEER_LOST;
    pthread_mutex_lock(&hub->lock);
    const int room =
        link->peer && hub->count < PHX_RPC_LINKS && !atomic_load(&hub->shut) && !link->listed && !link->told;
    if (room) {
        hub->links[hub->count++] = link;
        link->listed = 1;
        phx_rpc_hold(link);
    }
    pthread_mutex_unlock(&hub->lock);
    phx_rpc_call_up(hub, PHX_RPC_SERVERS);
    errno = EMFILE;
    return room ? PHX_OK : PHX_SYSTEM;
}

phx_rpc_link *phx_rpc_offer(phx_rpc_hub *hub, const uint8_t *cookie, int *fd)
{
    if (!phx_rpc_mine(hub) || atomic_load(&hub->shut)) {
        errno = EINVAL;
        return NULL;
    }
    *fd = phx_rpc_make_file(phx_rpc_channel_bytes());
    phx_rpc_link *link = *fd >= 0 ? view(hub, *fd, 0) : NULL;
    if (link) {
        link->channel->magic = PHX_RPC_MAGIC;
        link->channel->abi = PHX_ABI;
        memcpy(link->channel->cookie, cookie, sizeof link->channel->cookie);
        say_who(link);
        return link;
    }
    if (*fd >= 0)
        close(*fd);
    return NULL;
}

phx_rpc_link *phx_rpc_accept(phx_rpc_hub *hub, uint32_t pid, int number, const uint8_t *cookie, int place_fd,
                             const uint8_t *place_cookie)
{
    const int fd = phx_rpc_mine(hub) ? reach(pid, number, cookie, NULL) : -1;
    if (fd < 0)
        return NULL;
    phx_rpc_link *link = view(hub, fd, 1);
    close(fd);
    if (!link)
        return NULL;
    say_who(link);
    if (meet(link, pid, place_fd, place_cookie) == 0)
        return link;
    const int reason = errno;
    phx_rpc_drop(link);
    errno = reason;
    return NULL;
}

int phx_rpc_confirm(phx_rpc_link *link)
{
    uint8_t cookie[sizeof link->other->place_cookie];
    if (!phx_rpc_mine(link->hub) || link->peer) {
        errno = EINVAL;
        return PHX_SYSTEM;
    }
    memcpy(cookie, link->other->place_cookie, sizeof cookie);
    return meet(link, link->other->pid, link->other->fd, cookie) == 0 ? PHX_OK : PHX_SYSTEM;
}

static void empty(struct phx_rpc_inbox *inbox)
{
    while (inbox->first) {
        struct phx_rpc_item *item = inbox->first;
        inbox->first = item->next;
        free(item);
    }
}

void phx_rpc_drop(phx_rpc_link *link)
{
    phx_rpc_hub *hub = link->hub;
    if (!phx_rpc_mine(hub) || atomic_fetch_sub_explicit(&link->refs, 1, memory_order_acq_rel) != 1)
        return;
    empty(&link->inbox);
    if (link->pidfd >= 0)
        close(link->pidfd);
    if (link->peer)
        munmap(link->peer, PHX_RPC_SHARED_AT + link->slab_bytes);
    if (link->private_slab)
        munmap(link->private_slab, link->slab_bytes);
    munmap(link->channel, phx_rpc_channel_bytes());
    pthread_mutex_destroy(&link->sending);
    free(link);
    unref_hub(hub);
}

void phx_rpc_end(phx_rpc_link *link)
{
    phx_rpc_hub *hub = link->hub;
    if (!phx_rpc_mine(hub))
        return;
    phx_rpc_ends(link, PHX_RPC_HERE);
    phx_rpc_hold(link);
    pthread_mutex_lock(&hub->lock);
    link->told = 1;
    phx_rpc_unlist(link);
    pthread_mutex_unlock(&hub->lock);
    phx_rpc_drop(link);
}

void phx_rpc_release(phx_rpc_link *link, uint32_t block, uint32_t sequence, uint64_t where, uint64_t nbytes)
{
    if (!phx_rpc_mine(link->hub))
        return; /* a forked child; its parent still has the image */
    const uint32_t number = block & ~(PHX_RPC_COPY | PHX_RPC_SEVERAL);
    /* The pages that were changed here are copies. They must go before the memory gets another content. */
    if (!(block & PHX_RPC_SEVERAL) || !phx_rpc_changed(link->hub->pagemap, where, nbytes) ||
        madvise((void *)(uintptr_t)where, nbytes, MADV_DONTNEED) == 0)
        if (number < PHX_RPC_BLOCKS)
            atomic_store_explicit(&link->other->released[number], sequence, memory_order_release);
    phx_rpc_drop(link);
}

uint32_t phx_rpc_why(phx_rpc_link *link)
{
    return atomic_load(&link->ended);
}

uint32_t phx_rpc_pid(void)
{
    return phx_own_pid();
}

/* -- loans --------------------------------------------------------------------------------------------------------- */

#define STALE_NS 500000000ull /* a process that has shown no life for longer is looked after in /proc, and so often */

/* Return whether nobody at the other end of a link can read any more. */
static int is_dead(phx_rpc_link *link, uint64_t now)
{
    const uint32_t why = atomic_load(&link->ended);
    if (!why || why == PHX_RPC_GONE || why == PHX_RPC_REPLACED)
        return why != 0;
    if (atomic_load_explicit(&link->looked_ns, memory_order_relaxed) + STALE_NS > now)
        return 0;
    atomic_store_explicit(&link->looked_ns, now, memory_order_relaxed);
    return phx_process_again(link->pid, &link->process) == PHX_GONE; /* no longer watched, since the link has ended */
}

void phx_rpc_collect(phx_rpc_hub *hub, int all)
{
    const uint64_t now = phx_now_ns();
    pthread_mutex_lock(&hub->slab.lock);
    for (uint32_t i = hub->lent; i--;) {
        struct phx_rpc_loan loan = hub->loans[i];
        _Atomic uint32_t *released = &loan.link->own->released[loan.block];
        if (all || atomic_load_explicit(released, memory_order_acquire) == loan.sequence || is_dead(loan.link, now)) {
            phx_rpc_let_go(&hub->slab.blocks[loan.block]);
            hub->loans[i] = hub->loans[--hub->lent];
            phx_rpc_drop(loan.link); /* which does not free the hub: who calls this has it */
        }
    }
    pthread_mutex_unlock(&hub->slab.lock);
}

/* -- the thread that watches --------------------------------------------------------------------------------------- */

#define TICK_MS 100

/* A pidfd tells of the end of a process at once. Where there is none, and of an exec, the place's standstill tells. */
static void look_after(phx_rpc_link *link, uint64_t now)
{
    const uint64_t alive = atomic_load_explicit(&link->peer->alive_ns, memory_order_relaxed);
    if (alive + STALE_NS > now || atomic_load_explicit(&link->looked_ns, memory_order_relaxed) + STALE_NS > now)
        return;
    atomic_store_explicit(&link->looked_ns, now, memory_order_relaxed);
    const enum phx_sight sight = phx_process_again(link->pid, &link->process);
    if (sight == PHX_GONE || sight == PHX_EXECED)
        phx_rpc_ends(link, sight == PHX_GONE ? PHX_RPC_GONE : PHX_RPC_REPLACED);
}

static void *watch(void *argument)
{
    phx_rpc_hub *hub = argument;
    while (!atomic_load(&hub->shut)) {
        const uint64_t now = phx_now_ns();
        atomic_store_explicit(&hub->place->alive_ns, now, memory_order_relaxed);
        pthread_mutex_lock(&hub->lock);
        const uint32_t count = hub->count;
        for (uint32_t i = 0; i < count; i++) {
            phx_rpc_link *link = hub->watched[i] = hub->links[i];
            phx_rpc_hold(link);
            hub->polled[i] = (struct pollfd){.fd = atomic_load(&link->ended) ? -1 : link->pidfd, .events = POLLIN};
        }
        pthread_mutex_unlock(&hub->lock);
        const int ready = poll(hub->polled, count, TICK_MS);
        if (ready < 0) /* there are more links than the process may have descriptors, or the kernel has no memory */
            nanosleep(&(struct timespec){.tv_nsec = TICK_MS * 1000000}, NULL);
        for (uint32_t i = 0; i < count; i++) {
            phx_rpc_link *link = hub->watched[i];
            if (ready > 0 && hub->polled[i].revents)
                phx_rpc_ends(link, PHX_RPC_GONE);
            else if (!atomic_load(&link->ended))
                look_after(link, now);
            phx_rpc_drop(link);
        }
        phx_rpc_collect(hub, 0);
        phx_rpc_trim(&hub->slab, now);
    }
    return NULL;
}

/* Make the file of the hub's place and slab, and map it. Returns 0, or -1 with errno set. */
static int make_place(phx_rpc_hub *hub, const uint8_t *cookie)
{
    const uint64_t bytes = PHX_RPC_SHARED_AT + hub->slab.bytes;
    hub->fd = phx_rpc_make_file(bytes);
    if (hub->fd < 0)
        return -1;
    char *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, hub->fd, 0);
    if (map != MAP_FAILED && phx_rpc_back(map, PHX_RPC_PAGE)) {
        hub->place = (struct phx_rpc_place *)map;
        hub->slab.data = map + PHX_RPC_SHARED_AT;
        hub->place->magic = PHX_RPC_MAGIC;
        hub->place->abi = PHX_ABI;
        hub->place->slab_bytes = hub->slab.bytes;
        memcpy(hub->place->cookie, cookie, sizeof hub->place->cookie);
        return 0;
    }
    if (map != MAP_FAILED) {
        munmap(map, bytes);
        errno = ENOMEM;
    }
    close(hub->fd);
    return -1;
}

phx_rpc_hub *phx_rpc_open(const uint8_t *cookie, uint64_t slab_bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, note_forks);
    phx_rpc_hub *hub = calloc(1, sizeof *hub);
    if (!hub)
        return NULL;
    hub->slab.bytes = slab_bytes;
    errno = EINVAL;
    if (!is_slab(slab_bytes) || make_place(hub, cookie)) {
        const int reason = errno;
        free(hub);
        errno = reason;
        return NULL;
    }
    atomic_store(&hub->place->alive_ns, phx_now_ns());
    hub->forks = atomic_load(&phx_rpc_forks);
    hub->cores = phx_usable_cores();
    atomic_store(&hub->refs, 1);
    pthread_mutex_init(&hub->lock, NULL);
    pthread_mutex_init(&hub->slab.lock, NULL);
    atomic_store(&hub->pagemap, open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
    const int failed = phx_start_thread(&hub->watcher, watch, hub);
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
    phx_rpc_collect(hub, 1); /* nothing is shared any more, so no receiver can see the memory change */
    close(hub->fd);
    close_pagemap(hub);
    phx_rpc_call_up(hub, PHX_RPC_SERVERS | PHX_RPC_WAITERS);
}

void phx_rpc_close(phx_rpc_hub *hub)
{
    if (!phx_rpc_mine(hub))
        return;
    phx_rpc_shut(hub);
    unref_hub(hub);
}
