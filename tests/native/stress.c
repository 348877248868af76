/* The core under sanitizers: ranks as threads, random collectives beside random messages, checked against plain sums.
 *
 *   stress RANKS TURNS SEED [CHUNK_BYTES]
 *
 * All ranks draw the same operations from the seed, and their delays from a seed of their own. Meanwhile a second
 * thread of each rank passes messages from rank to rank: with tags that arrive out of order, of sizes beyond a ring,
 * and, with two ranks, received from any source. At the end rank 0 waits for a message from any source while the others
 * leave one by one. `make sanitize` builds it with AddressSanitizer and UBSan, and with
 * ThreadSanitizer. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "phalanx.h"

#define MAX_RANKS 64
#define MAX_COUNT 9000u
#define MAX_MESSAGE 200000u

static int ranks, turns, segment;
static unsigned seed;
static const uint8_t cookie[16] = "stress";
static phx_comm *views[MAX_RANKS];
static int shared_memory;
#define SHARED_BYTES (MAX_RANKS * MAX_COUNT * sizeof(int)) /* a tensor for each rank */
static int *tensors[MAX_RANKS]; /* of each rank: its tensor there, where this rank has mapped it */
static pthread_barrier_t everyone;

#define REQUIRE(condition)                                                                              \
    do {                                                                                                \
        if (!(condition)) {                                                                             \
            fprintf(stderr, "rank %d, turn %d, seed %u: %s\n", rank, turn, seed, #condition);           \
            abort();                                                                                    \
        }                                                                                               \
    } while (0)

static unsigned draw(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static int given(int turn, int rank, unsigned i)
{
    return turn * 3 + rank * 7 + (int)i;
}

static int sum_given(int turn, unsigned i)
{
    int sum = 0;
    for (int rank = 0; rank < ranks; rank++)
        sum += given(turn, rank, i);
    return sum;
}

/* How many bytes `from` sends `to`: a size of its own for every pair, nothing for some. */
static uint64_t pair_bytes(int from, int to, unsigned count)
{
    return sizeof(int) * (uint64_t)(count * ((unsigned)(from + 2 * to) % 3) / 2);
}

static void *pass_messages(void *argument)
{
    const int rank = (int)(long)argument, next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
    phx_comm *comm = views[rank];
    unsigned state = seed + 99;
    char *out = malloc(MAX_MESSAGE), *in = malloc(MAX_MESSAGE);
    for (int turn = 0; turn < turns; turn++) {
        const uint64_t nbytes = draw(&state) % (turn % 7 ? 3000 : MAX_MESSAGE);
        const struct phx_end end = {.nbytes = nbytes, .dtype = PHX_U8};
        const uint32_t tag = draw(&state) % 3;
        const uint32_t source = ranks == 2 && turn % 5 == 0 ? PHX_ANY_SOURCE : (uint32_t)before;
        memset(out, turn + rank, nbytes);
        phx_message *sent = PHX_SENT;
        if (!phx_send_now(comm, out, &end, (uint32_t)next, tag))
            sent = phx_send(comm, out, &end, (uint32_t)next, tag);
        phx_message *received = phx_recv(comm, in, &end, source, tag);
        REQUIRE(phx_message_wait(comm, received, 0) == PHX_OK);
        REQUIRE(phx_message_source(received) == (uint32_t)before);
        for (uint64_t i = 0; i < nbytes; i++)
            REQUIRE(in[i] == (char)(turn + before));
        phx_message_free(comm, received);
        if (sent != PHX_SENT) {
            REQUIRE(phx_message_wait(comm, sent, 0) == PHX_OK);
            phx_message_free(comm, sent);
        }
    }
    free(out);
    free(in);
    return NULL;
}

static void one_collective(phx_comm *comm, int rank, int turn, unsigned kind, unsigned count, unsigned root, int *x,
                           int *y)
{
    const uint64_t nbytes = count * sizeof *x;
    void *outs[MAX_RANKS];
    const void *ins[MAX_RANKS];
    uint64_t in_bytes[MAX_RANKS], out_bytes[MAX_RANKS];
    for (unsigned i = 0; i < count; i++)
        x[i] = given(turn, rank, i);
    for (int p = 0; p < ranks; p++) {
        outs[p] = y + (size_t)p * count;
        ins[p] = x;
        in_bytes[p] = pair_bytes(rank, p, count);
        out_bytes[p] = pair_bytes(p, rank, count);
    }
    switch (kind) {
    case 0:
        if ((turn + rank) % 3) /* some ranks give a tensor in shared memory, others one of their own */
            x = memcpy(tensors[rank], x, nbytes);
        REQUIRE(phx_all_reduce(comm, x, x, count, PHX_I32, PHX_SUM, count) == PHX_OK);
        for (unsigned i = 0; i < count; i++)
            REQUIRE(x[i] == sum_given(turn, i));
        break;
    case 1:
        REQUIRE(phx_reduce(comm, x, x, count, PHX_I32, PHX_SUM, root, count) == PHX_OK);
        for (unsigned i = 0; i < count; i++)
            REQUIRE(x[i] == ((unsigned)rank == root ? sum_given(turn, i) : given(turn, rank, i)));
        break;
    case 2:
        REQUIRE(phx_reduce_scatter(comm, ins, y, count, PHX_I32, PHX_SUM, count) == PHX_OK);
        for (unsigned i = 0; i < count; i++)
            REQUIRE(y[i] == sum_given(turn, i));
        break;
    case 3:
        REQUIRE(phx_broadcast(comm, x, nbytes, PHX_I32, root, count) == PHX_OK);
        for (unsigned i = 0; i < count; i++)
            REQUIRE(x[i] == given(turn, (int)root, i));
        break;
    case 4:
    case 5:
        if (kind == 4)
            REQUIRE(phx_all_gather(comm, x, outs, nbytes, PHX_I32, count) == PHX_OK);
        else
            REQUIRE(phx_gather(comm, x, outs, nbytes, PHX_I32, root, count) == PHX_OK);
        for (int p = 0; p < ranks && (kind == 4 || (unsigned)rank == root); p++)
            for (unsigned i = 0; i < count; i++)
                REQUIRE(((int *)outs[p])[i] == given(turn, p, i));
        break;
    case 6:
        REQUIRE(phx_scatter(comm, ins, y, nbytes, PHX_I32, root, count) == PHX_OK);
        for (unsigned i = 0; i < count; i++)
            REQUIRE(y[i] == given(turn, (int)root, i));
        break;
    case 7:
        REQUIRE(phx_all_to_all(comm, ins, in_bytes, outs, out_bytes, PHX_I32) == PHX_OK);
        for (int p = 0; p < ranks; p++)
            for (unsigned i = 0; i < out_bytes[p] / sizeof *x; i++)
                REQUIRE(((int *)outs[p])[i] == given(turn, p, i));
        break;
    default:
        REQUIRE(phx_barrier(comm) == PHX_OK);
    }
}

static void leave(phx_comm *comm, int rank)
{
    const int turn = turns;
    char byte;
    REQUIRE(phx_compare_rest(comm, 60000000000ull) == PHX_OK);
    usleep((unsigned)rank * 1000u);
    if (rank == 0 && ranks > 1) {
        const struct phx_end end = {.nbytes = 1, .dtype = PHX_U8};
        phx_message *received = phx_recv(comm, &byte, &end, PHX_ANY_SOURCE, 77);
        REQUIRE(phx_message_wait(comm, received, 0) == PHX_PEER_LEFT);
        phx_message_free(comm, received);
        REQUIRE(!phx_send_now(comm, &byte, &end, 1, 77));
        phx_message *sent = phx_send(comm, &byte, &end, 1, 77);
        REQUIRE(phx_message_wait(comm, sent, 0) == PHX_PEER_LEFT);
        phx_message_free(comm, sent);
    }
    phx_close(comm);
}

static void *run_rank(void *argument)
{
    const int rank = (int)(long)argument;
    unsigned shared = seed, own = seed + 1000u * (unsigned)(rank + 1);
    views[rank] = phx_open(segment, (uint32_t)rank, cookie, 20, NULL);
    if (!views[rank])
        abort();
    int *mapped = mmap(NULL, SHARED_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, shared_memory, 0);
    tensors[rank] = mapped + (size_t)rank * MAX_COUNT;
    if (mapped == MAP_FAILED || phx_share_memory(views[rank], mapped, SHARED_BYTES) != PHX_OK)
        abort();
    pthread_barrier_wait(&everyone);
    phx_look(views[rank]);
    pthread_t mail;
    if (ranks > 1)
        pthread_create(&mail, NULL, pass_messages, argument);
    int *x = malloc(MAX_COUNT * sizeof *x), *y = malloc((size_t)ranks * MAX_COUNT * sizeof *y);
    for (int turn = 0; turn < turns; turn++) {
        const unsigned kind = draw(&shared) % 9, count = draw(&shared) % (turn % 5 ? 200 : MAX_COUNT);
        const unsigned root = draw(&shared) % (unsigned)ranks;
        if (draw(&own) % 8 == 0)
            usleep(draw(&own) % 50);
        if (draw(&own) % 3 == 0)
            sched_yield();
        one_collective(views[rank], rank, turn, kind, count, root, x, y);
    }
    if (ranks > 1)
        pthread_join(mail, NULL);
    leave(views[rank], rank);
    free(x);
    free(y);
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc < 4 || (ranks = atoi(argv[1])) < 1 || ranks > MAX_RANKS) {
        fprintf(stderr, "usage: stress RANKS TURNS SEED [CHUNK_BYTES]\n");
        return 2;
    }
    turns = atoi(argv[2]);
    seed = (unsigned)atoi(argv[3]);
    const uint64_t least = 64u * (uint64_t)ranks, asked = argc > 4 ? (uint64_t)atoi(argv[4]) : 4096;
    segment = memfd_create("stress", MFD_CLOEXEC);
    if (phx_segment_format(segment, (uint32_t)ranks, asked > least ? asked : least, 2048, 8192, cookie) != PHX_OK)
        abort();
    shared_memory = memfd_create("stress", MFD_CLOEXEC);
    if (ftruncate(shared_memory, SHARED_BYTES))
        abort();
    pthread_barrier_init(&everyone, NULL, (unsigned)ranks);
    pthread_t threads[MAX_RANKS];
    for (long rank = 0; rank < ranks; rank++)
        pthread_create(&threads[rank], NULL, run_rank, (void *)rank);
    for (int rank = 0; rank < ranks; rank++)
        pthread_join(threads[rank], NULL);
    printf("ranks %d, turns %d, seed %u: ok\n", ranks, turns, seed);
    return 0;
}
