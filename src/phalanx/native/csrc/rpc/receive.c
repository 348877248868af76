/* Receiving: any number of threads look at all rings, one at a time, and each leaves with a message that is for it.
 *
 * This decides which thread gets the next message of a link, since any thread that looks may find any message.
 *
 * A thread that serves (in phx_rpc_next) takes requests, notices, and answers that no thread in the core waits for. A
 * thread that waits for an answer (in phx_rpc_await) takes that answer. Either hands an answer that another thread
 * waits for to that thread. A thread that waits sets all other messages aside, in order, for the threads that serve.
 * No answer is taken before a notice that was sent before it. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "rpc/hub.h"

enum step {
    PHX_RPC_NOTHING, /* there is nothing for this thread */
    PHX_RPC_MINE,    /* the box is filled */
    PHX_RPC_MOVED    /* a message went to another thread: look again */
};

#define ASIDE_BYTES 67108864u /* when so much has been set aside of one link, a thread that waits sets no more aside */

static int is_answer(uint32_t kind)
{
    return kind == PHX_RPC_ANSWER || kind == PHX_RPC_FAILURE;
}

static struct phx_rpc_waiter *unhook(phx_rpc_hub *hub, const phx_rpc_link *link, uint64_t call)
{
    for (struct phx_rpc_waiter **at = &hub->waiters; *at; at = &(*at)->next)
        if ((*at)->call == call && (*at)->link == link) {
            struct phx_rpc_waiter *waiter = *at;
            *at = waiter->next;
            return waiter;
        }
    return NULL;
}

/* Fill a box. A large image holds its link until it is released. */
static void fill(struct phx_rpc_box *box, const struct phx_rpc_box *from, const void *image)
{
    *box = *from;
    memcpy(box + 1, image, from->block == PHX_RPC_INLINE ? from->nbytes : sizeof(struct phx_rpc_image));
    if (from->block != PHX_RPC_INLINE)
        phx_rpc_hold((phx_rpc_link *)(uintptr_t)from->link);
}

static void hand(phx_rpc_hub *hub, struct phx_rpc_waiter *waiter, uint64_t call)
{
    atomic_store_explicit(&waiter->filled, 1, memory_order_release); /* the waiter may be gone after this store */
    phx_rpc_call_up(hub, phx_rpc_bit(call));
}

/* Describe the message that a record announces. Returns 1, or 0 if the record is damaged. The image's header is copied,
 * because the other process can change it at any time. */
static int describe(phx_rpc_link *link, const struct phx_rpc_record *record, const char *bytes,
                    struct phx_rpc_box *box, struct phx_rpc_image *image)
{
    *box = (struct phx_rpc_box){.link = (uintptr_t)link, .nbytes = record->nbytes};
    if (record->type == PHX_RPC_IMAGE) {
        if (record->nbytes < sizeof *image || record->nbytes > PHX_RPC_SMALL)
            return 0;
        memcpy(image, bytes, sizeof *image);
        box->block = PHX_RPC_INLINE;
        return image->nbytes == record->nbytes;
    }
    struct phx_rpc_lent lent;
    if (record->type != PHX_RPC_LENT || record->nbytes != sizeof lent)
        return 0;
    memcpy(&lent, bytes, sizeof lent);
    const char *slab = lent.block & PHX_RPC_SEVERAL ? link->private_slab : link->their_slab;
    if (!slab || (lent.block & ~(PHX_RPC_COPY | PHX_RPC_SEVERAL)) >= PHX_RPC_BLOCKS || lent.at > link->slab_bytes ||
        lent.at % phx_rpc_page_bytes() || lent.nbytes > link->slab_bytes - lent.at || lent.nbytes < sizeof *image)
        return 0;
    memcpy(image, slab + lent.at, sizeof *image);
    image->call = lent.call;
    box->where = (uintptr_t)(slab + lent.at);
    box->nbytes = image->nbytes;
    box->block = lent.block;
    box->sequence = lent.sequence;
    return image->nbytes >= sizeof *image && image->nbytes <= lent.nbytes;
}

/* Return how much private memory a message takes while it is set aside. */
static uint64_t takes_aside(const struct phx_rpc_item *item)
{
    return sizeof *item + (item->box.block == PHX_RPC_INLINE ? item->box.nbytes : 0);
}

static void append(struct phx_rpc_inbox *inbox, struct phx_rpc_item *item)
{
    item->next = NULL;
    *inbox->last = item;
    inbox->last = &item->next;
    inbox->aside += takes_aside(item);
    inbox->notices += item->image.kind == PHX_RPC_NOTICE;
}

static void take_out(struct phx_rpc_inbox *inbox, struct phx_rpc_item **at)
{
    struct phx_rpc_item *item = *at;
    *at = item->next;
    if (inbox->last == &item->next)
        inbox->last = at;
    inbox->aside -= takes_aside(item);
    inbox->notices -= item->image.kind == PHX_RPC_NOTICE;
    free(item);
}

static void settle(phx_rpc_hub *hub, phx_rpc_link *link)
{
    struct phx_rpc_inbox *inbox = &link->inbox;
    if (inbox->begins == PHX_RPC_NOTICE || !hub->waiters)
        return;
    for (struct phx_rpc_item **at = &inbox->first; *at && (*at)->image.kind != PHX_RPC_NOTICE;) {
        const uint64_t call = (*at)->image.call;
        struct phx_rpc_waiter *waiter = is_answer((*at)->image.kind) ? unhook(hub, link, call) : NULL;
        if (!waiter) {
            at = &(*at)->next;
            continue;
        }
        fill(waiter->box, &(*at)->box, &(*at)->image);
        take_out(inbox, at);
        hand(hub, waiter, call);
    }
}

/* Set a record's message aside, and have a thread that serves look after it. */
static enum step set_aside(phx_rpc_hub *hub, phx_rpc_link *link, const struct phx_rpc_box *box, const void *image,
                           uint64_t takes)
{
    struct phx_rpc_inbox *inbox = &link->inbox;
    const uint64_t more = box->block == PHX_RPC_INLINE ? box->nbytes : 0;
    struct phx_rpc_item *item = inbox->aside > ASIDE_BYTES ? NULL : malloc(sizeof *item + more);
    if (!item)
        return PHX_RPC_NOTHING; /* it stays in its ring until a thread that serves takes it */
    item->box = *box;
    memcpy(&item->image, image, more ? more : sizeof item->image);
    append(inbox, item);
    phx_rpc_advance(&inbox->in, takes);
    settle(hub, link);
    phx_rpc_call_up(hub, PHX_RPC_SERVERS);
    return PHX_RPC_MOVED;
}

/* Look at one link, for a thread that serves (`self` is NULL) or for one that waits, with the hub's lock. */
static enum step look(phx_rpc_hub *hub, phx_rpc_link *link, struct phx_rpc_box *box, struct phx_rpc_waiter *self)
{
    struct phx_rpc_inbox *inbox = &link->inbox;
    struct phx_rpc_item *item = self ? NULL : inbox->first;
    struct phx_rpc_record record;
    struct phx_rpc_box news;
    struct phx_rpc_image image;
    const char *bytes = NULL;
    if (item) {
        news = item->box;
        image = item->image;
    } else {
        if (atomic_load(&link->ended) >= PHX_RPC_DAMAGED)
            return PHX_RPC_NOTHING;
        const int there = phx_rpc_peek(&inbox->in, &record, &bytes);
        if (there < 0 || (there && !describe(link, &record, bytes, &news, &image)))
            phx_rpc_ends(link, PHX_RPC_DAMAGED);
        if (there <= 0 || atomic_load(&link->ended) >= PHX_RPC_DAMAGED)
            return PHX_RPC_NOTHING;
    }
    const void *whole = item ? (const void *)&item->image : news.block == PHX_RPC_INLINE ? (const void *)bytes : &image;
    const uint64_t takes = item ? 0 : phx_rpc_takes(record.nbytes);
    struct phx_rpc_waiter *waiter = NULL;
    if (is_answer(image.kind)) {
        if (inbox->begins == PHX_RPC_NOTICE || (self && inbox->notices))
            return self ? set_aside(hub, link, &news, whole, takes) : PHX_RPC_NOTHING;
        waiter = unhook(hub, link, image.call);
        if (!waiter && self)
            return set_aside(hub, link, &news, whole, takes);
    } else {
        if (self)
            return set_aside(hub, link, &news, whole, takes);
        if (inbox->begins)
            return PHX_RPC_NOTHING;
        inbox->begins = image.kind;
    }
    fill(waiter ? waiter->box : box, &news, whole);
    if (item)
        take_out(inbox, &inbox->first);
    else
        phx_rpc_advance(&inbox->in, takes);
    if (!waiter || waiter == self)
        return PHX_RPC_MINE;
    hand(hub, waiter, image.call);
    return PHX_RPC_MOVED;
}

/* -- looking everywhere, and waiting ------------------------------------------------------------------------------- */

/* Return whether nothing more of what was sent over a link is to be received. */
static int drained(const phx_rpc_link *link)
{
    const struct phx_rpc_inbox *inbox = &link->inbox;
    return !inbox->begins && !inbox->first &&
           (atomic_load(&link->ended) >= PHX_RPC_DAMAGED || !phx_rpc_waiting(&inbox->in));
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

/* Return whether there may be something for a thread that serves. */
static int more(phx_rpc_hub *hub)
{
    for (uint32_t i = 0; i < hub->count; i++) {
        phx_rpc_link *link = hub->links[i];
        if (atomic_load(&link->ended) || atomic_load_explicit(&link->other->closed, memory_order_relaxed))
            return 1;
        if (!link->inbox.begins && (link->inbox.first || phx_rpc_waiting(&link->inbox.in)))
            return 1;
    }
    return 0;
}

static int look_everywhere(phx_rpc_hub *hub, struct phx_rpc_box *box, struct phx_rpc_waiter *self)
{
again:
    for (uint32_t i = 0, count = hub->count; i < count; i++) {
        phx_rpc_link *link = hub->links[(hub->turn + i) % count];
        const enum step step = look(hub, link, box, self);
        if (step == PHX_RPC_MINE) {
            hub->turn = (hub->turn + i + 1) % count;
            return 1;
        }
        if (step == PHX_RPC_MOVED) {
            if (self && atomic_load(&self->filled))
                return 1;
            goto again;
        }
    }
    for (uint32_t i = 0; i < hub->count; i++)
        if (tell(hub->links[i], box))
            return 1;
    return 0;
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

/* For twice as long as waits have taken lately, because to sleep and to be woken takes longer than a quick call; and
 * not for long if waits are long anyway. */
#define LEAST_SPIN_NS 20000u
#define MOST_SPIN_NS 200000u
#define LONG_WAIT_NS 1000000u

static uint64_t watch_ns(const _Atomic uint32_t *usual)
{
    const uint32_t twice = 2 * atomic_load_explicit(usual, memory_order_relaxed);
    return twice < LEAST_SPIN_NS || twice > MOST_SPIN_NS ? LEAST_SPIN_NS : twice;
}

/* Count a wait in the running mean of how long waits take. Several threads may do so at once: then one of the waits is
 * not counted, which only makes the mean a little older. */
static void note(_Atomic uint32_t *usual, uint64_t took_ns)
{
    const uint32_t before = atomic_load_explicit(usual, memory_order_relaxed);
    const uint32_t took = took_ns < LONG_WAIT_NS ? (uint32_t)took_ns : LONG_WAIT_NS;
    atomic_store_explicit(usual, before - before / 8 + took / 8, memory_order_relaxed);
}

static int receive(phx_rpc_hub *hub, struct phx_rpc_box *box, struct phx_rpc_waiter *self, uint32_t answers)
{
    const uint64_t begun = phx_now_ns(), nap_ns = self ? PHX_SLICE_NS : PHX_RPC_NAP_NS;
    const uint32_t bits = self ? phx_rpc_bit(self->call) : PHX_RPC_SERVERS;
    _Atomic uint32_t *usual = self ? &hub->answer_ns : &hub->request_ns;
    for (int last = 0;;) {
        const uint32_t bell = atomic_load_explicit(&hub->place->bell, memory_order_seq_cst);
        pthread_mutex_lock(&hub->lock);
        const int found = (self && atomic_load(&self->filled)) || look_everywhere(hub, box, self);
        const int leave = found && more(hub);
        const int over = self && (self->link->told || atomic_load(&hub->answers) != answers);
        if (self && (found || over || last))
            unhook(hub, self->link, self->call);
        const int filled = self && atomic_load(&self->filled);
        pthread_mutex_unlock(&hub->lock);
        if (leave) /* also if none sleeps: one may have looked before, and be about to sleep */
            phx_rpc_call_up(hub, PHX_RPC_SERVERS);
        if (found || filled) {
            note(usual, phx_now_ns() - begun);
            return PHX_OK;
        }
        if (atomic_load(&hub->shut))
            return PHX_PEER_LOST;
        if (over || last) {
            note(usual, phx_now_ns() - begun);
            return PHX_UNDER_WAY;
        }
        const uint64_t until = begun + watch_ns(usual);
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
        box->taken = taken + 1;
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
    if (!link->told)
        settle(hub, link);
    pthread_mutex_unlock(&hub->lock);
    int status = receive(hub, box, &self, answers);
    if (status == PHX_PEER_LOST) {
        pthread_mutex_lock(&hub->lock);
        unhook(hub, link, call);
        if (atomic_load(&self.filled)) /* by another thread, since this one last looked */
            status = PHX_OK;
        pthread_mutex_unlock(&hub->lock);
    }
    if (status == PHX_OK)
        box->taken = taken + 1;
    return status;
}

void phx_rpc_begun(phx_rpc_link *link)
{
    phx_rpc_hub *hub = link->hub;
    if (!phx_rpc_mine(hub))
        return;
    struct phx_rpc_inbox *inbox = &link->inbox;
    pthread_mutex_lock(&hub->lock);
    inbox->begins = 0;
    settle(hub, link);
    const int rest = inbox->first || phx_rpc_waiting(&inbox->in) || atomic_load(&link->ended) ||
                     atomic_load_explicit(&link->other->closed, memory_order_relaxed);
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
