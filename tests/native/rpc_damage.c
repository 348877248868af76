/* A process whose peer writes random values to every place of the memory that they share, between messages that are in
 * order: it neither crashes nor hangs, and learns of the peer's end. The peer is killed in the middle of that. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "rpc/hub.h"

#define SLAB (1u << 19)
#define THREADS 3
#define PATIENCE_S 60 /* far more than a busy machine needs */

struct box {
    struct phx_rpc_box box;
    _Alignas(16) char image[PHX_RPC_SMALL];
};

struct offer {
    uint32_t pid;
    int fd, place;
    uint8_t cookie[16], place_cookie[16];
};

static uint64_t state;
static phx_rpc_hub *hub;
static phx_rpc_link *peer;
static _Atomic uint32_t over;
static volatile uint64_t sum;

static uint64_t chance(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static void give_back(const struct box *box)
{
    if (box->box.block != PHX_RPC_INLINE)
        phx_rpc_release((phx_rpc_link *)(uintptr_t)box->box.link, box->box.block, box->box.sequence, box->box.where,
                        box->box.nbytes);
}

/* Read what a box says is there. */
static void take(const struct box *box)
{
    if (box->box.ended) {
        atomic_store(&over, 1);
        return;
    }
    const int inside = box->box.block == PHX_RPC_INLINE;
    const char *image = inside ? box->image : (const char *)(uintptr_t)box->box.where;
    CHECK(box->box.nbytes >= sizeof(struct phx_rpc_image) && (!inside || box->box.nbytes <= PHX_RPC_SMALL));
    for (uint64_t i = 0; i < box->box.nbytes; i += i + 97 < box->box.nbytes ? 97 : 1)
        sum += (uint64_t)image[i];
    const uint8_t kind = ((const struct phx_rpc_image *)box->image)->kind;
    if (kind != PHX_RPC_ANSWER && kind != PHX_RPC_FAILURE)
        phx_rpc_begun(peer);
    give_back(box);
}

static void *serve(void *unused)
{
    struct box *box = calloc(1, sizeof *box);
    int status;
    while ((status = phx_rpc_next(hub, &box->box)) != PHX_PEER_LOST)
        if (status == PHX_OK)
            take(box);
    free(box);
    return unused;
}

/* Send one message of any kind, and give up if the other process takes none. */
static void send_one(uint32_t kind, uint64_t call)
{
    const uint64_t sizes[] = {32, 100, 5000, PHX_RPC_SMALL, 200000, 3 * SLAB};
    const uint64_t nbytes = sizes[chance() % 6], cut = 32;
    char *image = calloc(1, nbytes);
    *(struct phx_rpc_image *)image = (struct phx_rpc_image){.call = call, .kind = (uint8_t)kind, .nbytes = nbytes};
    const void *data[2] = {image, image + cut};
    const uint64_t parts[2] = {cut, nbytes - cut};
    const int large = nbytes > PHX_RPC_SMALL;
    const int several = chance() % 2;
    uint64_t shared = 0;
    int status = large ? phx_rpc_share(hub, 2, data, parts, &shared) : PHX_OK;
    for (int turn = 0; turn < 3 && (turn ? status == PHX_UNDER_WAY : !status); turn++) {
        const uint64_t taken = phx_rpc_taken(peer);
        status = large ? phx_rpc_lend(peer, shared, call, several) : phx_rpc_send(peer, image, nbytes);
        if (status == PHX_UNDER_WAY)
            phx_rpc_wait_room(peer, taken);
    }
    phx_rpc_unshare(hub, &shared);
    free(image);
}

static void *call(void *unused)
{
    struct box *box = calloc(1, sizeof *box);
    for (uint64_t number = 1; !atomic_load(&over); number++) {
        if (phx_rpc_await(hub, peer, number % 8, 0, &box->box) == PHX_OK)
            take(box);
        phx_rpc_answered(hub);
    }
    free(box);
    return unused;
}

static void victim(int to, int from)
{
    struct offer offer = {.pid = phx_rpc_pid(), .cookie = {1}, .place_cookie = {2}};
    hub = phx_rpc_open(offer.place_cookie, SLAB);
    CHECK(hub);
    peer = phx_rpc_offer(hub, offer.cookie, &offer.fd);
    offer.place = phx_rpc_descriptor(hub);
    char byte;
    CHECK(peer && write(to, &offer, sizeof offer) == sizeof offer && read(from, &byte, 1) == 1);
    CHECK(phx_rpc_confirm(peer) == PHX_OK && phx_rpc_begin(peer) == PHX_OK && write(to, &byte, 1) == 1);
    close(offer.fd);
    pthread_t servers[THREADS], caller;
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&servers[i], NULL, serve, NULL) == 0);
    CHECK(pthread_create(&caller, NULL, call, NULL) == 0);
    while (!atomic_load(&over))
        send_one(1 + (uint32_t)(chance() % 4), chance() % 8);
    pthread_join(caller, NULL);
    phx_rpc_shut(hub);
    for (int i = 0; i < THREADS; i++)
        pthread_join(servers[i], NULL);
    phx_rpc_drop(peer);
    phx_rpc_close(hub);
    _exit(0);
}

static uint64_t any_value(void)
{
    const uint64_t values[] = {0,         1,          16,         PHX_RPC_RING_BYTES, SLAB,
                               SLAB - 16, 1ull << 31, 1ull << 32, 1ull << 43,         1ull << 63, UINT64_MAX};
    const uint64_t pick = chance() % 16;
    return pick < 11 ? values[pick] : pick < 14 ? chance() % SLAB : chance();
}

/* Write to one place that the other process reads. */
static void damage(void)
{
    struct phx_rpc_ring *ring = &peer->own->ring, *theirs = &peer->other->ring;
    const struct phx_rpc_end_of_ring *out = &peer->out;
    char *record = out->data + (out->at - (chance() % 8 + 1) * 16) % out->bytes;
    const uint32_t block = (uint32_t)(chance() % 4 ? chance() % 4 : chance() % PHX_RPC_BLOCKS);
    switch (chance() % 16) {
    case 0: atomic_store(&ring->head, any_value()); break;
    case 1: atomic_store(&ring->head, out->at + chance() % 4 * 16); break;
    case 2: atomic_store(&theirs->tail, any_value()); break;
    case 3: atomic_store(&theirs->waiting, (uint32_t)any_value()); break;
    case 4: atomic_store(&peer->other->released[block], (uint32_t)any_value()); break;
    case 5: atomic_store(&peer->own->closed, (uint32_t)(chance() % 64 ? 0 : any_value())); break;
    case 6: atomic_store(&peer->peer->bell, (uint32_t)any_value()); break;
    case 7: atomic_store(&peer->peer->sleepers, (uint32_t)(chance() % 4)); break;
    case 8: atomic_store(&peer->peer->spinners, (uint32_t)(chance() % 4)); break;
    case 9: atomic_store(&hub->place->alive_ns, any_value()); break;
    case 10: memset(peer->own->place_cookie, (int)chance(), 16); break;
    case 11: hub->place->slab_bytes = any_value(); break;
    case 12: *(uint32_t *)(record + chance() % 4 * 4) = (uint32_t)any_value(); break;
    case 13: *(uint64_t *)(record + chance() % 2 * 8) = any_value(); break;
    case 14: *(uint64_t *)(hub->slab.data + chance() % 4 * 8 + chance() % 3 * 4096) = any_value(); break;
    default: *(uint64_t *)(out->data + chance() % (out->bytes / 8) * 8) = any_value();
    }
}

static void attacker(int to, int from, uint64_t often)
{
    const uint8_t cookie[16] = {3};
    struct offer offer;
    char byte = 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    hub = phx_rpc_open(cookie, SLAB);
    CHECK(hub && read(from, &offer, sizeof offer) == sizeof offer);
    peer = phx_rpc_accept(hub, offer.pid, offer.fd, offer.cookie, offer.place, offer.place_cookie);
    CHECK(peer && write(to, &byte, 1) == 1 && read(from, &byte, 1) == 1);
    CHECK(phx_rpc_begin(peer) == PHX_OK);
    struct box *box = calloc(1, sizeof *box);
    for (int turn = 0; turn < 400; turn++) {
        if (chance() % often == 0)
            damage();
        if (chance() % 4)
            send_one(chance() % 16 ? 1 + (uint32_t)(chance() % 4) : (uint32_t)any_value(), chance() % 8);
        else if (!phx_rpc_why(peer) && phx_rpc_waiting(&peer->inbox.in) && phx_rpc_next(hub, &box->box) == PHX_OK)
            give_back(box), phx_rpc_begun(peer);
        if (chance() % 400 == 0)
            raise(SIGKILL);
    }
    raise(SIGKILL);
}

static void pass(uint64_t seed)
{
    int there[2], back[2], status;
    CHECK(pipe2(there, 0) == 0 && pipe2(back, 0) == 0);
    state = seed * 0x9e3779b97f4a7c15ull + 1;
    const pid_t first = fork();
    if (first == 0)
        victim(there[1], back[0]);
    const uint64_t often = 1ull << seed % 8; /* from one in every turn to one that follows many good messages */
    const pid_t second = fork();
    if (second == 0) {
        state += 77;
        attacker(back[1], there[0], often);
    }
    for (int i = 0; i < 2; i++)
        close(there[i]), close(back[i]);
    CHECK(waitpid(second, &status, 0) == second);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) {
        fprintf(stderr, "seed %llu: the peer failed by itself\n", (unsigned long long)seed);
        exit(1);
    }
    for (int i = 0; waitpid(first, &status, WNOHANG) == 0; i++) {
        if (i > PATIENCE_S * 1000) {
            fprintf(stderr, "seed %llu: it does not end (pid %d)\n", (unsigned long long)seed, first);
            kill(first, SIGKILL);
            exit(1);
        }
        usleep(1000);
    }
    if (!WIFEXITED(status) || WEXITSTATUS(status)) {
        fprintf(stderr, "seed %llu: status %x\n", (unsigned long long)seed, status);
        exit(1);
    }
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    for (uint64_t seed = strtoull(argv[1], NULL, 10), i = 0; i < strtoull(argv[2], NULL, 10); i++)
        pass(seed + i);
    return 0;
}
