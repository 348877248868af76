/* Receiving: any number of threads look at all rings, one at a time, and each leaves with a message that is for it. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "rpc/inbox.h"
#include "rpc/patience.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

/* Whether nothing more of what was sent over a link is to be received. */
static int drained(const phx_rpc_link *link)
{
    for (uint32_t lane = 0; lane < PHX_RPC_LANES; lane++) {
        const struct phx_rpc_inbox *inbox = &link->inboxes[lane];
        if (inbox->begins || inbox->copying || inbox->first ||
            (atomic_load(&link->ended) < PHX_RPC_DAMAGED && phx_rpc_waiting(&inbox->in)))
            return 0;
    }
    return 1;
}

/* Put the news that a link has ended into the box, once, after its last message. Returns whether it did. */
static int tell(phx_rpc_link *link, struct phx_rpc_box *box)
{
    const uint32_t closed = atomic_load_explicit(&link->other->closed, memory_order_acquire);
    if (closed && !atomic_load(&link->ended))
        phx_rpc_ends(link, closed >= PHX_RPC_DAMAGED ? PHX_RPC_GAVE_UP : PHX_RPC_CLOSED);
    const uint32_t why = atomic_load(&link->ended);
    if (!why || link->told || !drained(link))
        return 0;
    *box = (struct phx_rpc_box){.link = (uintptr_t)link, .block = PHX_RPC_INLINE, .ended = why};
    link->told = 1;
    phx_rpc_unlist(link);
    phx_rpc_call_up(link->hub, PHX_RPC_WAITERS);
    return 1;
}

/* Whether there may be something for a thread that serves. */
static int more(phx_rpc_hub *hub)
{
    for (uint32_t i = 0; i < hub->count; i++) {
        phx_rpc_link *link = hub->links[i];
        if (atomic_load(&link->ended) || atomic_load_explicit(&link->other->closed, memory_order_relaxed))
            return 1;
        for (uint32_t lane = 0; lane < PHX_RPC_LANES; lane++) {
            const struct phx_rpc_inbox *inbox = &link->inboxes[lane];
            if (!inbox->begins && !inbox->copying && !phx_rpc_held(link, lane) &&
                (inbox->first || phx_rpc_waiting(&inbox->in)))
                return 1;
        }
    }
    return 0;
}

/* Whether a message waits in a lane before this one, if one waits in this lane; with the hub's lock. A thread may be
 * stopped after it has looked at the first lanes, and a cancellation that came meanwhile must not be found after the
 * call that it cancels. */
static int overtaken(const phx_rpc_link *link, uint32_t lane)
{
    if (!lane || atomic_load(&link->ended) || !phx_rpc_waiting(&link->inboxes[lane].in))
        return 0;
    for (uint32_t before = 0; before < lane; before++) {
        const struct phx_rpc_inbox *inbox = &link->inboxes[before];
        if (!inbox->begins && !inbox->copying && phx_rpc_waiting(&inbox->in))
            return 1;
    }
    return 0;
}

static int look_everywhere(phx_rpc_hub *hub, struct phx_rpc_box *box, struct phx_rpc_waiter *self)
{
    int may_look_again = 1; /* once, so that a stream of small messages does not keep large ones from being looked at */
again:
    for (uint32_t lane = 0; lane < PHX_RPC_LANES; lane++)
        for (uint32_t i = 0, count = hub->count; i < count; i++) {
            phx_rpc_link *link = hub->links[(hub->turn + i) % count];
            if (may_look_again && overtaken(link, lane)) {
                may_look_again = 0;
                goto again;
            }
            const enum phx_rpc_step step = phx_rpc_look(hub, link, lane, box, self);
            if (step == PHX_RPC_MINE) {
                hub->turn = (hub->turn + i + 1) % count;
                return 1;
            }
            if (step == PHX_RPC_MOVED) {
                if (self && atomic_load(&self->filled))
                    return 1;
                goto again; /* small messages before the next piece; a piece is copied without the lock, too */
            }
        }
    for (uint32_t i = 0; i < hub->count; i++)
        if (tell(hub->links[i], box))
            return 1;
    return 0;
}

/* Map a slab's new pages at once, which is quicker than a page fault for each. */
static void map_pages(const struct phx_rpc_box *box)
{
    if (box->block >= PHX_RPC_INLINE)
        return;
    phx_rpc_link *link = (phx_rpc_link *)(uintptr_t)box->link;
    const int is_lent = box->block >= PHX_RPC_BLOCKS;
    _Atomic uint64_t *touched = is_lent ? &link->borrowed_touched : &link->their_touched;
    const uint64_t end = box->where - (uintptr_t)(is_lent ? link->borrowed : link->their_slab) + box->nbytes;
    if (end <= atomic_load_explicit(touched, memory_order_relaxed))
        return;
    atomic_store_explicit(touched, end, memory_order_relaxed);
    const uint64_t before = box->where % phx_rpc_page_bytes();
    (void)!madvise((void *)(uintptr_t)(box->where - before), box->nbytes + before, MADV_POPULATE_READ);
}

static void took(struct phx_rpc_box *box, uint32_t taken)
{
    box->taken = taken + 1;
    map_pages(box);
}

static int sleep_on(phx_rpc_hub *hub, uint32_t bell, uint32_t bits, uint64_t nap_ns, int serves)
{
    const uint64_t until = phx_now_ns() + nap_ns;
    const struct timespec end = {.tv_sec = (time_t)(until / 1000000000ull), .tv_nsec = (long)(until % 1000000000ull)};
    atomic_fetch_add(&hub->sleeping, serves);
    atomic_fetch_add_explicit(&hub->place->sleepers, 1, memory_order_seq_cst);
    const long failed =
        syscall(SYS_futex, (uint32_t *)&hub->place->bell, FUTEX_WAIT_BITSET, bell, &end, NULL, bits);
    const int reason = failed ? errno : 0;
    atomic_fetch_sub_explicit(&hub->place->sleepers, 1, memory_order_seq_cst);
    atomic_fetch_sub(&hub->sleeping, serves);
    return reason == ETIMEDOUT || reason == EINTR;
}

/* Watch the bell for a short time. Returns whether it rang. */
static int spin(phx_rpc_hub *hub, uint32_t bell, uint64_t until)
{
    _Atomic uint32_t *word = &hub->place->bell;
    int rang = 0;
    atomic_fetch_add_explicit(&hub->place->spinners, 1, memory_order_seq_cst);
    do {
        for (int i = 0; i < 50 && !rang; i++) {
            phx_relax();
            rang = atomic_load_explicit(word, memory_order_acquire) != bell;
        }
        if (!rang)
            sched_yield();
    } while (!rang && phx_now_ns() < until);
    atomic_fetch_sub_explicit(&hub->place->spinners, 1, memory_order_seq_cst);
    return rang || atomic_load_explicit(word, memory_order_seq_cst) != bell;
}

static int receive(phx_rpc_hub *hub, struct phx_rpc_box *box, struct phx_rpc_waiter *self, uint32_t answers)
{
    const uint64_t begun = phx_now_ns(), nap_ns = self ? PHX_SLICE_NS : PHX_RPC_NAP_NS;
    const uint32_t bits = self ? phx_rpc_bit(self->call) : PHX_RPC_SERVERS;
    _Atomic uint32_t *usual = self ? &hub->answer_ns : &hub->request_ns;
    atomic_store_explicit(&hub->place->python_ns, begun, memory_order_relaxed);
    for (int last = 0;;) {
        const uint32_t bell = atomic_load_explicit(&hub->place->bell, memory_order_seq_cst);
        pthread_mutex_lock(&hub->lock);
        const int found = (self && atomic_load(&self->filled)) || look_everywhere(hub, box, self);
        const int leave = found && more(hub);
        const int over = self && (self->link->told || atomic_load(&hub->answers) != answers);
        if (self && (found || over || last))
            phx_rpc_unhook(hub, self->link, self->call);
        const int filled = self && atomic_load(&self->filled);
        pthread_mutex_unlock(&hub->lock);
        if (leave) /* also if none sleeps: one may have looked before, and be about to sleep */
            phx_rpc_call_up(hub, PHX_RPC_SERVERS);
        if (found || filled) {
            phx_rpc_note(usual, phx_now_ns() - begun);
            return PHX_OK;
        }
        if (atomic_load(&hub->shut))
            return PHX_PEER_LOST;
        if (over || last) {
            phx_rpc_note(usual, phx_now_ns() - begun);
            return PHX_UNDER_WAY;
        }
        const uint64_t until = begun + phx_rpc_watch_ns(usual);
        if (hub->count && hub->count < hub->cores && (self || !atomic_load(&hub->place->spinners)) &&
            phx_now_ns() < until && spin(hub, bell, until))
            continue;
        last = sleep_on(hub, bell, bits, nap_ns, !self);
    }
}

int phx_rpc_next(phx_rpc_hub *hub, struct phx_rpc_box *box)
{
    if (!phx_rpc_mine(hub))
        return PHX_PEER_LOST;
    const uint32_t taken = box->taken;
    atomic_fetch_add(&hub->serving, 1);
    const int status = receive(hub, box, NULL, 0);
    box->idle = atomic_fetch_sub(&hub->serving, 1) - 1;
    if (status == PHX_OK)
        took(box, taken);
    return status;
}

int phx_rpc_await(phx_rpc_hub *hub, phx_rpc_link *link, uint64_t call, uint32_t answers, struct phx_rpc_box *box)
{
    if (!phx_rpc_mine(hub))
        return PHX_PEER_LOST;
    const uint32_t taken = box->taken;
    struct phx_rpc_waiter self = {.link = link, .call = call, .box = box};
    pthread_mutex_lock(&hub->lock);
    self.next = hub->waiters;
    hub->waiters = &self;
    for (uint32_t lane = 0; lane < PHX_RPC_LANES && !link->told; lane++)
        phx_rpc_settle(hub, link, &link->inboxes[lane]);
    pthread_mutex_unlock(&hub->lock);
    int status = receive(hub, box, &self, answers);
    if (status == PHX_PEER_LOST) {
        pthread_mutex_lock(&hub->lock);
        phx_rpc_unhook(hub, link, call);
        if (atomic_load(&self.filled)) /* by another thread, since this one last looked */
            status = PHX_OK;
        pthread_mutex_unlock(&hub->lock);
    }
    if (status == PHX_OK)
        took(box, taken);
    return status;
}

void phx_rpc_begun(phx_rpc_link *link, uint32_t lane)
{
    phx_rpc_hub *hub = link->hub;
    if (!phx_rpc_mine(hub))
        return;
    struct phx_rpc_inbox *inbox = &link->inboxes[lane];
    pthread_mutex_lock(&hub->lock);
    inbox->begins = 0;
    inbox->begun++;
    phx_rpc_settle(hub, link, inbox);
    const struct phx_rpc_inbox *held = &link->inboxes[PHX_RPC_BULK_LANE]; /* more() has left out what it holds */
    const int rest = inbox->first || phx_rpc_waiting(&inbox->in) || held->first || phx_rpc_waiting(&held->in) ||
                     atomic_load(&link->ended) || atomic_load_explicit(&link->other->closed, memory_order_relaxed);
    pthread_mutex_unlock(&hub->lock);
    if (rest)
        phx_rpc_call_up(hub, PHX_RPC_SERVERS);
}

void phx_rpc_answered(phx_rpc_hub *hub)
{
    if (!phx_rpc_mine(hub))
        return;
    atomic_fetch_add(&hub->answers, 1);
    pthread_mutex_lock(&hub->lock);
    const int somebody = hub->waiters != NULL;
    pthread_mutex_unlock(&hub->lock);
    if (somebody)
        phx_rpc_call_up(hub, PHX_RPC_WAITERS);
}

const void *phx_rpc_answers(phx_rpc_hub *hub)
{
    return &hub->answers;
}
