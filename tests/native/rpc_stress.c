/* Hubs of several workers in one process, so that sanitizers see both ends of every link: threads that serve, threads
 * that call and wait, messages of all sizes, calls within calls, links that end while they are used. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "rpc/rpc.h"

#define MOST 5
#define SERVERS 20 /* more than a worker is ever asked at once, so that one is always free to receive */
#define CALLERS 3
#define BODY (1u << 19)
#define SLAB (1u << 22)

struct box {
    struct phx_rpc_box box;
    char image[PHX_RPC_SMALL];
};

struct worker {
    phx_rpc_hub *hub;
    phx_rpc_link *links[MOST];
    uint8_t cookie[16];
    uint32_t number;
};

static struct worker workers[MOST];
static uint32_t count, turns;
static _Atomic uint64_t next_call = 1;
static _Atomic uint64_t delivered[65536]; /* the last call of each remainder whose answer another thread has taken */
static _Atomic uint32_t ends, begun, finished;

static uint64_t chance(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static uint64_t any_size(uint64_t *state)
{
    const uint64_t sizes[] = {0, 1, 100, 5000, 60000, PHX_RPC_SMALL - 32, PHX_RPC_SMALL - 31, 200000, BODY - 32, BODY};
    const uint64_t pick = chance(state) % 14;
    return pick < 10 ? sizes[pick] : chance(state) % (pick < 13 ? 3000 : 2 * BODY);
}

/* The bytes of an image's body follow from its call. */
static char *make(uint64_t call, uint32_t kind, uint64_t body)
{
    char *image = malloc(sizeof(struct phx_rpc_image) + body);
    *(struct phx_rpc_image *)image = (struct phx_rpc_image){
        .call = call, .kind = (uint8_t)kind, .head_bytes = (uint32_t)body, .nbytes = sizeof(struct phx_rpc_image) + body};
    memset(image + sizeof(struct phx_rpc_image), (int)(call % 251), body);
    return image;
}

static const char *opened(const struct box *box)
{
    const char *image = box->box.block == PHX_RPC_INLINE ? box->image : (const char *)(uintptr_t)box->box.where;
    struct phx_rpc_image head;
    memcpy(&head, image, sizeof head);
    CHECK(head.nbytes == box->box.nbytes && head.nbytes == sizeof head + head.head_bytes);
    for (uint64_t i = sizeof head; i < head.nbytes; i += i < 4096 || i + 4096 > head.nbytes ? 1 : 509)
        CHECK(image[i] == (char)(head.call % 251));
    return image;
}

static void give_back(const struct box *box)
{
#ifndef __SANITIZE_THREAD__ /* which does not see that the memory went back to its sender, whose mapping is another one */
    /* Each receiver may change what it has got. Another one of the same image would see that as wrong bytes. */
    if (box->box.block != PHX_RPC_INLINE && box->box.nbytes > 5000)
        ((char *)(uintptr_t)box->box.where)[4000] ^= 1;
#endif
    if (box->box.block != PHX_RPC_INLINE)
        phx_rpc_release((phx_rpc_link *)(uintptr_t)box->box.link, box->box.block, box->box.sequence, box->box.where,
                        box->box.nbytes);
}

static uint32_t other_end(struct worker *worker, phx_rpc_link *link)
{
    for (uint32_t i = 0; i < count; i++)
        if (worker->links[i] == link)
            return i;
    CHECK(!"a link that nobody has");
    return 0;
}

static void wait_room(phx_rpc_link *link)
{
    phx_rpc_wait_room(link, phx_rpc_taken(link));
}

static int lend(phx_rpc_link *link, uint64_t shared, uint64_t call, int several)
{
    int status;
    while ((status = phx_rpc_lend(link, shared, call, several)) == PHX_UNDER_WAY)
        wait_room(link);
    return status;
}

/* The same notice to all others, which read it in one place. */
static void send_to_all(struct worker *worker, uint64_t call, uint64_t body)
{
    char *image = make(call, PHX_RPC_NOTICE, body);
    const void *data[1] = {image};
    const uint64_t sizes[1] = {sizeof(struct phx_rpc_image) + body};
    uint64_t shared;
    const int there = phx_rpc_share(worker->hub, 1, data, sizes, &shared) == PHX_OK;
    for (uint32_t to = 0; there && to < count; to++)
        if (to != worker->number)
            lend(worker->links[to], shared, call, 1);
    phx_rpc_unshare(worker->hub, &shared);
    free(image);
}

static int send_image(struct worker *worker, uint32_t to, char *image)
{
    phx_rpc_link *link = worker->links[to];
    const struct phx_rpc_image *head = (const struct phx_rpc_image *)image;
    const uint64_t nbytes = head->nbytes, cut = nbytes / 3 + 32;
    int status;
    if (nbytes <= PHX_RPC_SMALL) {
        while ((status = phx_rpc_send(link, image, nbytes)) == PHX_UNDER_WAY)
            wait_room(link);
    } else {
        const void *data[3] = {image, image + cut, NULL};
        const uint64_t sizes[3] = {cut, nbytes - cut, 0};
        uint64_t shared;
        while ((status = phx_rpc_share(worker->hub, 3, data, sizes, &shared)) == PHX_UNDER_WAY)
            wait_room(link);
        if (!status)
            status = lend(link, shared, head->call, 0);
        phx_rpc_unshare(worker->hub, &shared);
    }
    free(image);
    return status;
}

static int call(struct worker *worker, uint32_t to, uint64_t body, struct box *box)
{
    const uint64_t number = atomic_fetch_add(&next_call, 1);
    if (send_image(worker, to, make(number, PHX_RPC_REQUEST, body)))
        return 0;
    for (;;) {
        const uint32_t answers = atomic_load((const _Atomic uint32_t *)phx_rpc_answers(worker->hub));
        if (atomic_load(&delivered[number % 65536]) == number)
            return 1;
        const int status = phx_rpc_await(worker->hub, worker->links[to], number, answers, &box->box);
        if (status == PHX_UNDER_WAY && !phx_rpc_why(worker->links[to]))
            continue;
        if (status != PHX_OK)
            return 0;
        if (box->box.ended) {
            atomic_fetch_add(&ends, 1);
            if ((uintptr_t)worker->links[to] == box->box.link)
                return 0;
            continue;
        }
        CHECK(((const struct phx_rpc_image *)opened(box))->call == number && box->box.nbytes == 32 + body);
        give_back(box);
        return 1;
    }
}

static void *serve(void *argument)
{
    struct worker *worker = argument;
    struct box *box = calloc(1, sizeof *box), *inner = calloc(1, sizeof *box);
    int status;
    while ((status = phx_rpc_next(worker->hub, &box->box)) != PHX_PEER_LOST) {
        if (status == PHX_UNDER_WAY)
            continue;
        if (box->box.ended) {
            atomic_fetch_add(&ends, 1);
            continue;
        }
        phx_rpc_link *link = (phx_rpc_link *)(uintptr_t)box->box.link;
        const uint32_t from = other_end(worker, link);
        struct phx_rpc_image head;
        memcpy(&head, opened(box), sizeof head);
        if (head.kind == PHX_RPC_ANSWER) {
            give_back(box);
            atomic_store(&delivered[head.call % 65536], head.call);
            phx_rpc_answered(worker->hub);
            continue;
        }
        phx_rpc_begun(link);
        give_back(box);
        if (head.kind == PHX_RPC_NOTICE)
            continue;
        if (head.call % 17 == 0 && box->box.idle > 5)
            call(worker, from, head.call % 1000, inner);
        send_image(worker, from, make(head.call, PHX_RPC_ANSWER, head.head_bytes));
    }
    free(box);
    free(inner);
    return NULL;
}

static void *work(void *argument)
{
    struct worker *worker = argument;
    uint64_t state = 88172645463325252ull + worker->number + atomic_fetch_add(&begun, 1) * 7919;
    struct box *box = calloc(1, sizeof *box);
    for (uint32_t i = 0; i < turns; i++) {
        const uint32_t to = (worker->number + 1 + (uint32_t)(chance(&state) % (count - 1))) % count;
        if (chance(&state) % 5 == 0)
            send_image(worker, to, make(chance(&state), PHX_RPC_NOTICE, any_size(&state)));
        if (chance(&state) % 20 == 0)
            send_to_all(worker, chance(&state), PHX_RPC_SMALL + chance(&state) % (BODY / 2));
        const int answered = call(worker, to, any_size(&state), box);
        CHECK(answered);
    }
    atomic_fetch_add(&finished, 1);
    while (atomic_load(&ends) == 0 && call(worker, (worker->number + 1) % count, any_size(&state), box))
        ;
    free(box);
    return NULL;
}

static void join_all(void)
{
    for (uint32_t a = 0; a < count; a++)
        for (uint32_t b = a + 1; b < count; b++) {
            const uint8_t cookie[16] = {(uint8_t)a, (uint8_t)b, 1};
            int fd;
            workers[a].links[b] = phx_rpc_offer(workers[a].hub, cookie, &fd);
            CHECK(workers[a].links[b]);
            workers[b].links[a] = phx_rpc_accept(workers[b].hub, phx_rpc_pid(), fd, cookie,
                                                 phx_rpc_descriptor(workers[a].hub), workers[a].cookie);
            CHECK(workers[b].links[a]);
            close(fd);
            CHECK(phx_rpc_confirm(workers[a].links[b]) == PHX_OK);
        }
    for (uint32_t a = 0; a < count; a++)
        for (uint32_t b = 0; b < count; b++)
            CHECK(a == b || phx_rpc_begin(workers[a].links[b]) == PHX_OK);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    count = (uint32_t)atoi(argv[1]);
    turns = (uint32_t)atoi(argv[2]);
    CHECK(count >= 2 && count <= MOST);
    pthread_t servers[MOST][SERVERS], callers[MOST][CALLERS];
    for (uint32_t w = 0; w < count; w++) {
        workers[w].number = w;
        memset(workers[w].cookie, (int)w + 1, sizeof workers[w].cookie);
        workers[w].hub = phx_rpc_open(workers[w].cookie, SLAB);
        CHECK(workers[w].hub);
    }
    join_all();
    for (uint32_t w = 0; w < count; w++) {
        for (uint32_t i = 0; i < SERVERS; i++)
            CHECK(pthread_create(&servers[w][i], NULL, serve, &workers[w]) == 0);
        for (uint32_t i = 0; i < CALLERS; i++)
            CHECK(pthread_create(&callers[w][i], NULL, work, &workers[w]) == 0);
    }
    while (atomic_load(&finished) < count * CALLERS)
        usleep(1000);
    phx_rpc_end(workers[0].links[1]); /* while calls are under way */
    for (uint32_t w = 0; w < count; w++)
        for (uint32_t i = 0; i < CALLERS; i++)
            pthread_join(callers[w][i], NULL);
    for (uint32_t w = 0; w < count; w++)
        phx_rpc_shut(workers[w].hub);
    for (uint32_t w = 0; w < count; w++)
        for (uint32_t i = 0; i < SERVERS; i++)
            pthread_join(servers[w][i], NULL);
    for (uint32_t w = 0; w < count; w++) {
        for (uint32_t i = 0; i < count; i++)
            if (i != w)
                phx_rpc_drop(workers[w].links[i]);
        phx_rpc_close(workers[w].hub);
    }
    return 0;
}
