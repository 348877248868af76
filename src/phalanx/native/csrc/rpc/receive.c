/* Receiving: any number of threads look at all rings, one at a time, and each leaves with the next message of a lane.
 *
 * A thread that serves (in phx_rpc_next) takes any message. One that waits for an answer (in phx_rpc_await) takes answers
 * only, also those that others wait for, and gives them to who does (phx_rpc_answered). After a request or a notice
 * nobody takes the next message of its link until phx_rpc_begun(): so requests begin in order, and no answer passes a
 * notice. Small messages are taken before large ones, whose cancellation one may be. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "rpc/hub.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

enum step {
    PHX_RPC_NOTHING, /* there is nothing for this thread */
    PHX_RPC_MINE,    /* the box is filled */
    PHX_RPC_MOVED    /* a piece was copied: look again */
};

#define LARGEST (1ull << 44)
#define MOST_PASSED 64u /* so many small messages are taken before a large one that is there */

static int is_answer(uint32_t kind)
{
    return kind == PHX_RPC_ANSWER || kind == PHX_RPC_FAILURE;
}

/* Fill a box. A large image holds its link until it is released. */
static void fill(struct phx_rpc_box *box, const struct phx_rpc_box *from, const void *image)
{
    *box = *from;
    memcpy(box + 1, image, from->block == PHX_RPC_INLINE ? from->nbytes : sizeof(struct phx_rpc_image));
    if (from->block != PHX_RPC_INLINE)
        phx_rpc_hold((phx_rpc_link *)(uintptr_t)from->link);
}

/* Return whether an image that came in pieces is complete and was not taken. */
static int is_assembled(const struct phx_rpc_inbox *inbox)
{
    return inbox->assembly && inbox->assembled == inbox->whole;
}

/* Describe the message that a record announces. Returns 1, or 0 if the record is damaged. The image's header is copied,
 * because the other process can change it at any time. */
static int describe(phx_rpc_link *link, uint32_t lane, const struct phx_rpc_record *record, const char *bytes,
                    struct phx_rpc_box *box, struct phx_rpc_image *image)
{
    *box = (struct phx_rpc_box){.link = (uintptr_t)link, .nbytes = record->nbytes};
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

/* Forget a message whose sender was interrupted after some of its pieces. */
static void give_up(struct phx_rpc_inbox *inbox)
{
    munmap(inbox->assembly, inbox->whole);
    inbox->assembly = NULL;
}

/* Copy a piece of an image into memory of its own, without the lock, so that small messages pass meanwhile. */
static enum step piece(phx_rpc_hub *hub, phx_rpc_link *link, struct phx_rpc_inbox *inbox,
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
    link->passed = 0;
    phx_rpc_hold(link);
    pthread_mutex_unlock(&hub->lock);
    memcpy(inbox->assembly + inbox->assembled, bytes, record->nbytes);
    pthread_mutex_lock(&hub->lock);
    inbox->copying = 0;
    inbox->assembled += record->nbytes;
    phx_rpc_advance(&inbox->in, phx_rpc_takes(record->nbytes));
    if (inbox->assembled == inbox->whole && ((struct phx_rpc_image *)inbox->assembly)->nbytes != inbox->whole)
        phx_rpc_ends(link, PHX_RPC_DAMAGED);
    if (inbox->assembled == inbox->whole)
        phx_rpc_call_up(hub, PHX_RPC_SERVERS); /* they have looked while it was copied */
    phx_rpc_drop(link); /* if this frees the link, it was ended here meanwhile, and nobody uses it any more */
    return PHX_RPC_MOVED;
}

static int has_come(const phx_rpc_link *link, uint32_t lane)
{
    const struct phx_rpc_inbox *inbox = &link->inboxes[lane];
    return is_assembled(inbox) || phx_rpc_waiting(&inbox->in);
}

/* Look at one lane of one link with the hub's lock, which is released while a piece of a large message is copied. */
static enum step look(phx_rpc_hub *hub, phx_rpc_link *link, uint32_t lane, struct phx_rpc_box *box, int serves)
{
    struct phx_rpc_inbox *inbox = &link->inboxes[lane];
    struct phx_rpc_box news = {.link = (uintptr_t)link, .where = (uintptr_t)inbox->assembly, .nbytes = inbox->whole,
                               .block = PHX_RPC_OWN};
    struct phx_rpc_record record = {0};
    struct phx_rpc_image image;
    const char *bytes = NULL;
    if (link->begins || inbox->copying || atomic_load(&link->ended) >= PHX_RPC_DAMAGED)
        return PHX_RPC_NOTHING;
    if (lane == PHX_RPC_SMALL_LANE && link->passed >= MOST_PASSED && has_come(link, PHX_RPC_BULK_LANE))
        return PHX_RPC_NOTHING;
    const int is_whole = is_assembled(inbox);
    if (is_whole) {
        memcpy(&image, inbox->assembly, sizeof image);
    } else {
        const int there = phx_rpc_peek(&inbox->in, &record, &bytes);
        if (there > 0 && lane == PHX_RPC_BULK_LANE && (record.type == PHX_RPC_FIRST || record.type == PHX_RPC_MORE))
            return piece(hub, link, inbox, &record, bytes);
        if (there > 0 && inbox->assembly)
            give_up(inbox);
        if (there < 0 || (there && !describe(link, lane, &record, bytes, &news, &image)))
            phx_rpc_ends(link, PHX_RPC_DAMAGED);
        if (there <= 0 || atomic_load(&link->ended) >= PHX_RPC_DAMAGED)
            return PHX_RPC_NOTHING;
    }
    if (!serves && !is_answer(image.kind))
        return PHX_RPC_NOTHING;
    fill(box, &news, news.block == PHX_RPC_INLINE ? (const void *)bytes : &image);
    if (is_whole)
        inbox->assembly = NULL;
    else
        phx_rpc_advance(&inbox->in, phx_rpc_takes(record.nbytes));
    link->begins = !is_answer(image.kind);
    link->passed = lane == PHX_RPC_SMALL_LANE ? link->passed + 1 : 0;
    return PHX_RPC_MINE;
}

/* -- looking everywhere, and waiting ------------------------------------------------------------------------------- */

/* Return whether nothing more of what was sent over a link is to be received. */
static int drained(const phx_rpc_link *link)
{
    const int damaged = atomic_load(&link->ended) >= PHX_RPC_DAMAGED;
    for (uint32_t lane = 0; lane < PHX_RPC_LANES; lane++)
        if (link->begins || link->inboxes[lane].copying || (!damaged && has_come(link, lane)))
            return 0;
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

/* Return whether there may be something for a thread that serves. */
static int more(phx_rpc_hub *hub)
{
    for (uint32_t i = 0; i < hub->count; i++) {
        phx_rpc_link *link = hub->links[i];
        if (atomic_load(&link->ended) || atomic_load_explicit(&link->other->closed, memory_order_relaxed))
            return 1;
        for (uint32_t lane = 0; lane < PHX_RPC_LANES && !link->begins; lane++)
            if (!link->inboxes[lane].copying && has_come(link, lane))
                return 1;
    }
    return 0;
}

static int look_everywhere(phx_rpc_hub *hub, struct phx_rpc_box *box, int serves)
{
again:
    for (uint32_t lane = 0; lane < PHX_RPC_LANES; lane++)
        for (uint32_t i = 0, count = hub->count; i < count; i++) {
            const enum step step = look(hub, hub->links[(hub->turn + i) % count], lane, box, serves);
            if (step == PHX_RPC_MINE) {
                hub->turn = (hub->turn + i + 1) % count;
                return 1;
            }
            if (step == PHX_RPC_MOVED)
                goto again; /* small messages before the next piece */
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

/* `awaited` is NULL for a thread that serves. */
static int receive(phx_rpc_hub *hub, struct phx_rpc_box *box, phx_rpc_link *awaited, uint32_t bits, uint32_t answers)
{
    const uint64_t begun = phx_now_ns(), nap_ns = awaited ? PHX_SLICE_NS : PHX_RPC_NAP_NS;
    const uint32_t taken = box->taken;
    _Atomic uint32_t *usual = awaited ? &hub->answer_ns : &hub->request_ns;
    for (int last = 0;;) {
        const uint32_t bell = atomic_load_explicit(&hub->place->bell, memory_order_seq_cst);
        pthread_mutex_lock(&hub->lock);
        const int found = look_everywhere(hub, box, !awaited);
        const int leave = (found || awaited) && more(hub);
        const int over = awaited && (awaited->told || atomic_load(&hub->answers) != answers);
        pthread_mutex_unlock(&hub->lock);
        if (leave && found) /* also if none sleeps: one may have looked before, and be about to sleep */
            phx_rpc_call_up(hub, PHX_RPC_SERVERS);
        else if (leave) /* who sent it has woken nobody if this thread watched */
            phx_rpc_wake_server(hub);
        if (found || over || last)
            note(usual, phx_now_ns() - begun);
        if (found) {
            box->taken = taken + 1;
            map_pages(box);
            return PHX_OK;
        }
        if (atomic_load(&hub->shut))
            return PHX_PEER_LOST;
        if (over || last)
            return PHX_UNDER_WAY;
        const uint64_t until = begun + watch_ns(usual);
        if (hub->count && hub->count < hub->cores && (awaited || !atomic_load(&hub->place->spinners)) &&
            phx_now_ns() < until && spin(hub, bell, until))
            continue;
        last = sleep_on(hub, bell, bits, nap_ns, !awaited);
    }
}

int phx_rpc_next(phx_rpc_hub *hub, struct phx_rpc_box *box)
{
    if (!phx_rpc_mine(hub))
        return PHX_PEER_LOST;
    atomic_fetch_add(&hub->serving, 1);
    const int status = receive(hub, box, NULL, PHX_RPC_SERVERS, 0);
    box->idle = atomic_fetch_sub(&hub->serving, 1) - 1;
    return status;
}

int phx_rpc_await(phx_rpc_hub *hub, phx_rpc_link *link, uint64_t call, uint32_t answers, struct phx_rpc_box *box)
{
    if (!phx_rpc_mine(hub))
        return PHX_PEER_LOST;
    atomic_fetch_add(&hub->awaiting, 1);
    const int status = receive(hub, box, link, phx_rpc_bit(call), answers);
    atomic_fetch_sub(&hub->awaiting, 1);
    return status;
}

void phx_rpc_begun(phx_rpc_link *link)
{
    phx_rpc_hub *hub = link->hub;
    if (!phx_rpc_mine(hub))
        return;
    pthread_mutex_lock(&hub->lock);
    link->begins = 0;
    const int rest = more(hub);
    pthread_mutex_unlock(&hub->lock);
    if (rest)
        phx_rpc_call_up(hub, PHX_RPC_SERVERS);
}

void phx_rpc_answered(phx_rpc_hub *hub, uint64_t call)
{
    if (!phx_rpc_mine(hub))
        return;
    atomic_fetch_add(&hub->answers, 1);
    if (atomic_load(&hub->awaiting))
        phx_rpc_call_up(hub, phx_rpc_bit(call));
}

const void *phx_rpc_answers(phx_rpc_hub *hub)
{
    return &hub->answers;
}
