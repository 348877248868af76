/* Deciding which thread gets the next message of a lane, since any thread that looks may find any message.
 *
 * A thread that serves (in phx_rpc_next) takes requests, notices, and answers that no thread in the core waits for. A
 * thread that waits for an answer (in phx_rpc_await) takes that answer. Either hands an answer that another thread waits
 * for to that thread. A thread that waits sets all other messages aside, in order, for the threads that serve. No answer
 * is taken before a notice that was sent before it. A large call is not taken while another thread is about to begin with
 * a small message (phx_rpc_held): that may be the call's cancellation, and the thread with the call might be quicker. */
#define _GNU_SOURCE
#include "rpc/inbox.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ASIDE_BYTES 67108864u /* when so much has been set aside in one lane, a thread that waits sets no more aside */
#define LARGEST (1ull << 44)
/* For how many small messages, and for how long, a large call or notice waits that another thread has taken and not begun
 * with: a stream of them, or one whose handler stands still, does not keep large ones back. */
#define BEHIND 64u
#define BEHIND_NS 1000000000ull

static int is_answer(uint32_t kind)
{
    return kind == PHX_RPC_ANSWER || kind == PHX_RPC_FAILURE;
}

struct phx_rpc_waiter *phx_rpc_unhook(phx_rpc_hub *hub, const phx_rpc_link *link, uint64_t call)
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
    const int is_lent = record->type == PHX_RPC_LENT;
    struct phx_rpc_lent lent;
    if ((record->type != PHX_RPC_BLOCK && !is_lent) || lane != PHX_RPC_BULK_LANE ||
        record->nbytes != (is_lent ? sizeof lent : sizeof lent.block) || (is_lent && !link->borrowed))
        return 0;
    memcpy(&lent, bytes, record->nbytes);
    const struct phx_rpc_block *block = &lent.block;
    const char *slab = is_lent ? link->borrowed : link->their_slab;
    const uint64_t slab_bytes = is_lent ? link->borrowed_bytes : link->slab_bytes;
    if (block->block >= (is_lent ? PHX_RPC_LOANS : PHX_RPC_BLOCKS) || block->at > slab_bytes ||
        block->at % (is_lent ? phx_rpc_page_bytes() : 64) || block->nbytes > slab_bytes - block->at ||
        block->nbytes < sizeof *image)
        return 0;
    memcpy(image, slab + block->at, sizeof *image);
    if (is_lent)
        image->call = lent.call;
    box->where = (uintptr_t)(slab + block->at);
    box->nbytes = image->nbytes;
    box->block = is_lent ? block->block | PHX_RPC_LOAN : block->block;
    box->sequence = block->sequence;
    return image->nbytes >= sizeof *image && image->nbytes <= block->nbytes;
}

/* How much private memory a message takes while it is set aside. */
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

void phx_rpc_settle(phx_rpc_hub *hub, phx_rpc_link *link, struct phx_rpc_inbox *inbox)
{
    if (inbox->begins == PHX_RPC_NOTICE || !hub->waiters)
        return;
    for (struct phx_rpc_item **at = &inbox->first; *at && (*at)->image.kind != PHX_RPC_NOTICE;) {
        const uint64_t call = (*at)->image.call;
        struct phx_rpc_waiter *waiter = is_answer((*at)->image.kind) ? phx_rpc_unhook(hub, link, call) : NULL;
        if (!waiter) {
            at = &(*at)->next;
            continue;
        }
        fill(waiter->box, &(*at)->box, &(*at)->image);
        take_out(inbox, at);
        hand(hub, waiter, call);
    }
}

/* Forget a message whose sender was interrupted after some of its pieces. */
static void give_up(struct phx_rpc_inbox *inbox)
{
    munmap(inbox->assembly, inbox->whole);
    inbox->assembly = NULL;
}

/* Copy a piece of an image into memory of its own, without the lock, so that small messages pass meanwhile. */
static enum phx_rpc_step piece(phx_rpc_hub *hub, phx_rpc_link *link, struct phx_rpc_inbox *inbox,
                       const struct phx_rpc_record *record, const char *bytes)
{
    if (record->type == PHX_RPC_FIRST) {
        if (inbox->assembly)
            give_up(inbox);
        inbox->whole = record->whole;
        inbox->assembled = 0;
        if (record->whole < sizeof(struct phx_rpc_image) || record->whole > LARGEST) {
            phx_rpc_ends(link, PHX_RPC_DAMAGED);
            return PHX_RPC_NOTHING;
        }
        void *memory = mmap(NULL, inbox->whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            phx_rpc_ends(link, PHX_RPC_NO_MEMORY);
            return PHX_RPC_NOTHING;
        }
        (void)!madvise(memory, inbox->whole, MADV_HUGEPAGE);
        inbox->assembly = memory;
    }
    if (!inbox->assembly || record->nbytes > inbox->whole - inbox->assembled) {
        phx_rpc_ends(link, PHX_RPC_DAMAGED);
        return PHX_RPC_NOTHING;
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
        struct phx_rpc_image image;
        memcpy(&image, inbox->assembly, sizeof image);
        if (!item || image.nbytes != inbox->whole) {
            phx_rpc_ends(link, item ? PHX_RPC_DAMAGED : PHX_RPC_NO_MEMORY);
            free(item);
        } else {
            item->box = (struct phx_rpc_box){.link = (uintptr_t)link, .where = (uintptr_t)inbox->assembly,
                                             .nbytes = inbox->whole, .block = PHX_RPC_OWN, .lane = PHX_RPC_BULK_LANE};
            item->image = image;
            inbox->assembly = NULL;
            append(inbox, item);
            phx_rpc_settle(hub, link, inbox);
        }
    }
    phx_rpc_drop(link); /* if this frees the link, it was ended here meanwhile, and nobody uses it any more */
    return PHX_RPC_MOVED;
}

/* Set a record's message aside, and have a thread that serves look after it. */
static enum phx_rpc_step set_aside(phx_rpc_hub *hub, phx_rpc_link *link, struct phx_rpc_inbox *inbox,
                           const struct phx_rpc_box *box, const void *image, uint64_t takes)
{
    const uint64_t more = box->block == PHX_RPC_INLINE ? box->nbytes : 0;
    struct phx_rpc_item *item = inbox->aside > ASIDE_BYTES ? NULL : malloc(sizeof *item + more);
    if (!item)
        return PHX_RPC_NOTHING; /* it stays in its ring until a thread that serves takes it */
    item->box = *box;
    memcpy(&item->image, image, more ? more : sizeof item->image);
    append(inbox, item);
    phx_rpc_advance(&inbox->in, takes);
    phx_rpc_settle(hub, link, inbox);
    phx_rpc_call_up(hub, PHX_RPC_SERVERS);
    return PHX_RPC_MOVED;
}

int phx_rpc_held(const phx_rpc_link *link, uint32_t lane)
{
    const struct phx_rpc_inbox *small = &link->inboxes[PHX_RPC_SMALL_LANE], *bulk = &link->inboxes[lane];
    if (lane != PHX_RPC_BULK_LANE || !small->begins)
        return 0;
    return !bulk->behind ||
           (small->begun - bulk->behind_begun < BEHIND && phx_now_ns() - bulk->behind_ns < BEHIND_NS);
}

enum phx_rpc_step phx_rpc_look(phx_rpc_hub *hub, phx_rpc_link *link, uint32_t lane, struct phx_rpc_box *box,
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
            return PHX_RPC_NOTHING;
        const int there = phx_rpc_peek(&inbox->in, &record, &bytes);
        if (there > 0 && inbox->assembly && (record.type == PHX_RPC_BLOCK || record.type == PHX_RPC_LENT))
            give_up(inbox);
        if (there > 0 && lane == PHX_RPC_BULK_LANE && (record.type == PHX_RPC_FIRST || record.type == PHX_RPC_MORE))
            return inbox->aside > ASIDE_BYTES ? PHX_RPC_NOTHING : piece(hub, link, inbox, &record, bytes);
        if (there < 0 || (there && !describe(link, lane, &record, bytes, &news, &image)))
            phx_rpc_ends(link, PHX_RPC_DAMAGED);
        if (there <= 0 || atomic_load(&link->ended) >= PHX_RPC_DAMAGED)
            return PHX_RPC_NOTHING;
    }
    const void *whole = item ? (const void *)&item->image : news.block == PHX_RPC_INLINE ? (const void *)bytes : &image;
    const uint64_t takes = item ? 0 : phx_rpc_takes(record.nbytes);
    struct phx_rpc_waiter *waiter = NULL;
    if (is_answer(image.kind)) {
        if (inbox->begins == PHX_RPC_NOTICE || (self && inbox->notices))
            return self ? set_aside(hub, link, inbox, &news, whole, takes) : PHX_RPC_NOTHING;
        waiter = phx_rpc_unhook(hub, link, image.call);
        if (!waiter && self)
            return set_aside(hub, link, inbox, &news, whole, takes);
    } else {
        if (self)
            return set_aside(hub, link, inbox, &news, whole, takes);
        if (inbox->begins)
            return PHX_RPC_NOTHING;
        if (phx_rpc_held(link, lane)) {
            if (!inbox->behind) {
                inbox->behind = 1;
                inbox->behind_begun = link->inboxes[PHX_RPC_SMALL_LANE].begun;
                inbox->behind_ns = phx_now_ns();
            }
            return PHX_RPC_NOTHING;
        }
        inbox->behind = 0;
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
