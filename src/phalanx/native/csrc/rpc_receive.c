/* Receiving: any number of threads look at all rings, one at a time, and each leaves with what it may have.
 *
 * A thread that serves (phx_rpc_next) takes what comes next in a lane: a request, a notice, or an answer that nobody waits
 * for in the core. A thread that waits for an answer (phx_rpc_await) may find anything. Its own answer it takes; another's
 * it hands to the thread that waits for that; and the rest it sets aside, in order, for the threads that serve. An answer
 * is not taken before a notice that was sent before it. */
#define _GNU_SOURCE
#include "rpc_hub.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NS 50000ull
#define ASIDE_BYTES 67108864u /* when so much has been set aside in one lane, a thread that waits sets no more aside */
#define LARGEST (1ull << 44)
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

enum step { NOTHING, MINE, MOVED };

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

/* Describe what a record brings: 1; 0: it is damaged. The image's header is copied, so that it is read once. */
static int describe(phx_rpc_link *link, uint32_t lane, const struct phx_rpc_record *record, const char *bytes,
                    struct phx_rpc_box *box, struct phx_rpc_image *image)
{
    *box = (struct phx_rpc_box){.link = (uintptr_t)link, .lane = lane, .nbytes = record->nbytes};
    if (record->type == PHX_RPC_IMAGE && lane == PHX_RPC_SMALL_LANE) {
        if (record->nbytes < sizeof *image || record->nbytes > PHX_RPC_SMALL)
            return 0;
        memcpy(image, bytes, sizeof *image);
        box->block = PHX_RPC_INLINE;
        return image->nbytes == record->nbytes;
    }
    struct phx_rpc_block block;
    if (record->type != PHX_RPC_BLOCK || lane != PHX_RPC_BULK_LANE || record->nbytes != sizeof block)
        return 0;
    memcpy(&block, bytes, sizeof block);
    if (block.block >= PHX_RPC_BLOCKS || block.at % 64 || block.at > link->slab_bytes ||
        block.nbytes > link->slab_bytes - block.at || block.nbytes < sizeof *image)
        return 0;
    memcpy(image, link->their_slab + block.at, sizeof *image);
    box->where = (uintptr_t)(link->their_slab + block.at);
    box->nbytes = image->nbytes;
    box->block = block.block;
    box->sequence = block.sequence;
    return image->nbytes >= sizeof *image && image->nbytes <= block.nbytes;
}

/* How much private memory a message takes that was set aside. */
static uint64_t takes_aside(const struct phx_rpc_item *item)
{
    return sizeof *item + (item->box.block >= PHX_RPC_INLINE ? item->box.nbytes : 0);
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

/* Hand answers that were set aside to the threads that wait for them, up to the first notice. */
static void settle(phx_rpc_hub *hub, phx_rpc_link *link, struct phx_rpc_inbox *inbox)
{
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

/* Copy a piece of an image into memory of its own, without the lock, so that small messages pass meanwhile. */
static enum step piece(phx_rpc_hub *hub, phx_rpc_link *link, struct phx_rpc_inbox *inbox,
                       const struct phx_rpc_record *record, const char *bytes)
{
    if (record->type == PHX_RPC_FIRST) {
        if (inbox->assembly) /* the sender gave up */
            munmap(inbox->assembly, inbox->whole);
        inbox->assembly = NULL;
        inbox->whole = record->whole;
        inbox->assembled = 0;
        if (record->whole < sizeof(struct phx_rpc_image) || record->whole > LARGEST) {
            phx_rpc_ends(link, PHX_RPC_DAMAGED);
            return NOTHING;
        }
        void *memory = mmap(NULL, inbox->whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            phx_rpc_ends(link, PHX_RPC_NO_MEMORY);
            return NOTHING;
        }
        (void)!madvise(memory, inbox->whole, MADV_HUGEPAGE);
        inbox->assembly = memory;
    }
    if (!inbox->assembly || record->nbytes > inbox->whole - inbox->assembled) {
        phx_rpc_ends(link, PHX_RPC_DAMAGED);
        return NOTHING;
    }
    inbox->copying = 1;
    phx_rpc_hold(link);
    pthread_mutex_unlock(&hub->lock);
    memcpy(inbox->assembly + inbox->assembled, bytes, record->nbytes);
    pthread_mutex_lock(&hub->lock);
    inbox->copying = 0;
    inbox->assembled += record->nbytes;
    phx_rpc_advance(&inbox->in, phx_rpc_takes(record->nbytes));
    if (inbox->assembled == inbox->whole) {
        struct phx_rpc_item *item = malloc(sizeof *item);
        if (item) {
            item->box = (struct phx_rpc_box){.link = (uintptr_t)link, .where = (uintptr_t)inbox->assembly,
                                             .nbytes = inbox->whole, .block = PHX_RPC_OWN, .lane = PHX_RPC_BULK_LANE};
            memcpy(&item->image, inbox->assembly, sizeof item->image);
            inbox->assembly = NULL;
            append(inbox, item);
            settle(hub, link, inbox);
        }
        if (!item || item->image.nbytes != item->box.nbytes)
            phx_rpc_ends(link, item ? PHX_RPC_DAMAGED : PHX_RPC_NO_MEMORY);
    }
    phx_rpc_drop(link); /* the list has one: only a link that was told or ended here has left it */
    return MOVED;
}

/* Set a record's message aside, and have a thread that serves look after it. */
static enum step set_aside(phx_rpc_hub *hub, phx_rpc_link *link, struct phx_rpc_inbox *inbox,
                           const struct phx_rpc_box *box, const void *image, uint64_t takes)
{
    const uint64_t more = box->block == PHX_RPC_INLINE ? box->nbytes : 0;
    struct phx_rpc_item *item = inbox->aside > ASIDE_BYTES ? NULL : malloc(sizeof *item + more);
    if (!item)
        return NOTHING; /* it stays in its ring until a thread that serves takes it */
    item->box = *box;
    memcpy(&item->image, image, more ? more : sizeof item->image);
    append(inbox, item);
    phx_rpc_advance(&inbox->in, takes);
    settle(hub, link, inbox);
    phx_rpc_call_up(hub, PHX_RPC_SERVERS);
    return MOVED;
}

/* Look at one lane of one link: for a thread that serves, or for one that waits (`self`). */
static enum step look(phx_rpc_hub *hub, phx_rpc_link *link, uint32_t lane, struct phx_rpc_box *box,
                      struct phx_rpc_waiter *self)
{
    struct phx_rpc_inbox *inbox = &link->inboxes[lane];
    struct phx_rpc_item *item = self ? NULL : inbox->first;
    struct phx_rpc_record record;
    struct phx_rpc_box news;
    struct phx_rpc_image image;
    const char *bytes = NULL;
    if (item) {
        news = item->box;
        image = item->image;
    } else {
        if (inbox->copying || atomic_load(&link->ended) >= PHX_RPC_DAMAGED)
            return NOTHING;
        const int there = phx_rpc_peek(&inbox->in, &record, &bytes);
        if (there > 0 && lane == PHX_RPC_BULK_LANE && (record.type == PHX_RPC_FIRST || record.type == PHX_RPC_MORE))
            return inbox->aside > ASIDE_BYTES ? NOTHING : piece(hub, link, inbox, &record, bytes);
        if (there < 0 || (there && !describe(link, lane, &record, bytes, &news, &image)))
            phx_rpc_ends(link, PHX_RPC_DAMAGED);
        if (there <= 0 || atomic_load(&link->ended) >= PHX_RPC_DAMAGED)
            return NOTHING;
    }
    const void *whole = item ? (const void *)&item->image : news.block == PHX_RPC_INLINE ? (const void *)bytes : &image;
    const uint64_t takes = item ? 0 : phx_rpc_takes(record.nbytes);
    struct phx_rpc_waiter *waiter = NULL;
    if (is_answer(image.kind)) {
        if (inbox->begins == PHX_RPC_NOTICE || (self && inbox->notices))
            return self ? set_aside(hub, link, inbox, &news, whole, takes) : NOTHING;
        waiter = unhook(hub, link, image.call);
        if (!waiter && self)
            return set_aside(hub, link, inbox, &news, whole, takes);
    } else {
        if (self)
            return set_aside(hub, link, inbox, &news, whole, takes);
        if (inbox->begins)
            return NOTHING;
        inbox->begins = image.kind;
    }
    fill(waiter ? waiter->box : box, &news, whole);
    if (item)
        take_out(inbox, &inbox->first);
    else
        phx_rpc_advance(&inbox->in, takes);
    if (!waiter || waiter == self)
        return MINE;
    hand(hub, waiter, image.call);
    return MOVED;
}

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

/* Tell of the end of a link, once, after its last message. */
static int tell(phx_rpc_link *link, struct phx_rpc_box *box)
{
    if (!atomic_load(&link->ended) && atomic_load_explicit(&link->other->closed, memory_order_acquire))
        phx_rpc_ends(link, PHX_RPC_CLOSED);
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
            if (!inbox->begins && !inbox->copying && (inbox->first || phx_rpc_waiting(&inbox->in)))
                return 1;
        }
    }
    return 0;
}

static int look_everywhere(phx_rpc_hub *hub, struct phx_rpc_box *box, struct phx_rpc_waiter *self)
{
again:
    for (uint32_t lane = 0; lane < PHX_RPC_LANES; lane++)
        for (uint32_t i = 0, count = hub->count; i < count; i++) {
            phx_rpc_link *link = hub->links[(hub->turn + i) % count];
            const enum step step = look(hub, link, lane, box, self);
            if (step == MINE) {
                hub->turn = (hub->turn + i + 1) % count;
                return 1;
            }
            if (step == MOVED) {
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

/* Map a slab's new pages at once, which is quicker than one fault after the other. */
static void map_pages(const struct phx_rpc_box *box)
{
    if (box->block >= PHX_RPC_BLOCKS)
        return;
    phx_rpc_link *link = (phx_rpc_link *)(uintptr_t)box->link;
    const uint64_t at = box->where - (uintptr_t)link->their_slab, end = at + box->nbytes;
    if (end <= atomic_load_explicit(&link->their_touched, memory_order_relaxed))
        return;
    atomic_store_explicit(&link->their_touched, end, memory_order_relaxed);
    (void)!madvise((void *)(uintptr_t)(box->where / PHX_RPC_PAGE * PHX_RPC_PAGE),
                   box->nbytes + box->where % PHX_RPC_PAGE, MADV_POPULATE_READ);
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

/* Watch the bell for a short time: 1 if it rang. */
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
    atomic_store_explicit(&hub->place->python_ns, begun, memory_order_relaxed);
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
        if (leave && atomic_load(&hub->sleeping))
            phx_rpc_call_up(hub, PHX_RPC_SERVERS);
        if (found || filled)
            return PHX_OK;
        if (atomic_load(&hub->shut))
            return PHX_PEER_LOST;
        if (over || last)
            return PHX_UNDER_WAY;
        const uint64_t until = begun + SPIN_NS;
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
    atomic_fetch_add(&hub->serving, 1);
    const int status = receive(hub, box, NULL, 0);
    box->idle = atomic_fetch_sub(&hub->serving, 1) - 1;
    if (status == PHX_OK)
        map_pages(box);
    return status;
}

int phx_rpc_await(phx_rpc_hub *hub, phx_rpc_link *link, uint64_t call, uint32_t answers, struct phx_rpc_box *box)
{
    if (!phx_rpc_mine(hub))
        return PHX_PEER_LOST;
    struct phx_rpc_waiter self = {.link = link, .call = call, .box = box};
    pthread_mutex_lock(&hub->lock);
    self.next = hub->waiters;
    hub->waiters = &self;
    for (uint32_t lane = 0; lane < PHX_RPC_LANES && !link->told; lane++)
        settle(hub, link, &link->inboxes[lane]);
    pthread_mutex_unlock(&hub->lock);
    const int status = receive(hub, box, &self, answers);
    if (status == PHX_PEER_LOST) {
        pthread_mutex_lock(&hub->lock);
        unhook(hub, link, call);
        pthread_mutex_unlock(&hub->lock);
    }
    if (status == PHX_OK)
        map_pages(box);
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
    settle(hub, link, inbox);
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
