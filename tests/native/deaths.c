/* A rank dies at every point of every operation. Each time the others must end, with complete results or with an error
 * that names the dead rank.
 *
 *   deaths RANKS [STRIDE]
 *
 * Built with deaths.h included before every source. For each operation and victim there is one world of forked ranks
 * for the victim's first point, one for its second, and so on, until the victim gets through; it then exits, which is
 * the death right after the last point. With a stride it is every so many points. Worlds run side by side, since their
 * survivors mostly sleep. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "phalanx.h"

#define MAX_RANKS 16
#define AT_ONCE 32
#define TURNS 2 /* every operation twice: its death also falls between two calls */
#define HANG_S 30

enum { MESSAGES = 10, SMALL_ALL_REDUCE, SHARED_ALL_REDUCE, KINDS };
static const char *const names[KINDS] = {
    [PHX_ALL_REDUCE] = "all_reduce", [PHX_BROADCAST] = "broadcast", [PHX_ALL_GATHER] = "all_gather",
    [PHX_BARRIER] = "barrier",       [PHX_REDUCE] = "reduce",       [PHX_REDUCE_SCATTER] = "reduce_scatter",
    [PHX_GATHER] = "gather",         [PHX_SCATTER] = "scatter",     [PHX_ALL_TO_ALL] = "all_to_all",
    [MESSAGES] = "messages",         [SMALL_ALL_REDUCE] = "all_reduce small",
    [SHARED_ALL_REDUCE] = "all_reduce of tensors in shared memory",
};

struct world {
    int segment;
    pid_t pids[MAX_RANKS];
    _Atomic int *opened;
};
#define COUNTERS_BYTES 4096
#define WORLD_BYTES (COUNTERS_BYTES + MAX_RANKS * 8192) /* behind the counters: a tensor for each rank */

static int ranks, count, *tensor;
static long stride;
static const uint8_t cookie[16] = "deaths";
static long points_left; /* 0: this process does not count */

void death_point(void)
{
    if (points_left && --points_left == 0)
        raise(SIGKILL);
}

#define REQUIRE(condition)                                                                                       \
    do {                                                                                                         \
        if (!(condition)) {                                                                                      \
            fprintf(stderr, "rank %d, turn %d: %s\n", rank, turn, #condition);                                   \
            _exit(1);                                                                                            \
        }                                                                                                        \
    } while (0)

static int given(int turn, int rank, int i)
{
    return turn * 3 + rank * 7 + i;
}

static int sum_given(int turn, int i)
{
    int sum = 0;
    for (int rank = 0; rank < ranks; rank++)
        sum += given(turn, rank, i);
    return sum;
}

static int pass_a_message(phx_comm *comm, int rank, const int *x, int *y, uint64_t nbytes)
{
    const uint32_t next = (uint32_t)((rank + 1) % ranks), before = (uint32_t)((rank + ranks - 1) % ranks);
    phx_message *sent = PHX_SENT, *received = phx_recv(comm, y, &(struct phx_end){nbytes, PHX_I32, 0}, before, 0);
    if (!phx_send_now(comm, x, &(struct phx_end){nbytes, PHX_I32, 0}, next, 0))
        sent = phx_send(comm, x, &(struct phx_end){nbytes, PHX_I32, 0}, next, 0);
    int status = phx_message_wait(comm, received, 0);
    if (!status && sent != PHX_SENT)
        status = phx_message_wait(comm, sent, 0);
    phx_message_free(comm, received);
    if (sent != PHX_SENT)
        phx_message_free(comm, sent);
    return status;
}

/* One call with root 0; its result is checked if it returns PHX_OK. */
static int call(phx_comm *comm, int rank, int turn, uint32_t kind)
{
    static int own[400000], y[MAX_RANKS * 3000];
    int *x = kind == SHARED_ALL_REDUCE ? tensor : own;
    const int n = kind == SMALL_ALL_REDUCE ? 8 : kind == MESSAGES ? 150000 : count;
    const uint64_t nbytes = (uint64_t)n * sizeof *own;
    void *outs[MAX_RANKS];
    const void *ins[MAX_RANKS];
    uint64_t sizes[MAX_RANKS];
    for (int i = 0; i < n; i++)
        x[i] = given(turn, rank, i);
    for (int p = 0; p < ranks; p++) {
        outs[p] = y + p * n;
        ins[p] = x;
        sizes[p] = nbytes;
    }
    int status = PHX_OK;
    switch (kind) {
    case PHX_ALL_REDUCE:
    case SMALL_ALL_REDUCE:
    case SHARED_ALL_REDUCE:
    case PHX_REDUCE:
        status = kind == PHX_REDUCE ? phx_reduce(comm, x, x, (uint64_t)n, PHX_I32, PHX_SUM, 0, 0)
                                    : phx_all_reduce(comm, x, x, (uint64_t)n, PHX_I32, PHX_SUM, 0);
        for (int i = 0; i < n && !status; i++)
            REQUIRE(x[i] == (kind == PHX_REDUCE && rank ? given(turn, rank, i) : sum_given(turn, i)));
        return status;
    case PHX_REDUCE_SCATTER:
        status = phx_reduce_scatter(comm, ins, y, (uint64_t)n, PHX_I32, PHX_SUM, 0);
        for (int i = 0; i < n && !status; i++)
            REQUIRE(y[i] == sum_given(turn, i));
        return status;
    case PHX_BROADCAST:
        status = phx_broadcast(comm, x, nbytes, PHX_I32, 0, 0);
        for (int i = 0; i < n && !status; i++)
            REQUIRE(x[i] == given(turn, 0, i));
        return status;
    case PHX_SCATTER:
        status = phx_scatter(comm, ins, y, nbytes, PHX_I32, 0, 0);
        for (int i = 0; i < n && !status; i++)
            REQUIRE(y[i] == given(turn, 0, i));
        return status;
    case PHX_ALL_GATHER:
    case PHX_GATHER:
    case PHX_ALL_TO_ALL:
        status = kind == PHX_ALL_GATHER ? phx_all_gather(comm, x, outs, nbytes, PHX_I32, 0)
                 : kind == PHX_GATHER   ? phx_gather(comm, x, outs, nbytes, PHX_I32, 0, 0)
                                        : phx_all_to_all(comm, ins, sizes, outs, sizes, PHX_I32);
        for (int p = 0; p < ranks && !status && !(kind == PHX_GATHER && rank); p++)
            for (int i = 0; i < n; i++)
                REQUIRE(y[p * n + i] == given(turn, p, i));
        return status;
    case MESSAGES: {
        static int z[400000];
        status = pass_a_message(comm, rank, x, z, nbytes);
        for (int i = 0; i < n && !status; i++)
            REQUIRE(z[i] == given(turn, (rank + ranks - 1) % ranks, i));
        return status;
    }
    default:
        return phx_barrier(comm);
    }
}

static void require_news_of(phx_comm *comm, int rank, int turn, int status, pid_t victim_pid, int victim)
{
    struct phx_breakage why;
    REQUIRE(status == PHX_PEER_LOST);
    REQUIRE(phx_breakage(comm, &why) == PHX_PEER_LOST);
    REQUIRE(why.peer == (uint32_t)victim);
    REQUIRE(why.peer_pid == (uint32_t)victim_pid);
    REQUIRE(phx_barrier(comm) == PHX_PEER_LOST);
    REQUIRE(phx_all_reduce(comm, &turn, &turn, 1, PHX_I32, PHX_SUM, 0) == PHX_PEER_LOST);
}

static phx_comm *enter(struct world *world, int rank)
{
    alarm(HANG_S);
    phx_comm *comm = phx_open(world->segment, (uint32_t)rank, cookie, 50, NULL);
    if (!comm)
        _exit(2);
    char *tensors = (char *)world->opened + COUNTERS_BYTES;
    tensor = (int *)(tensors + rank * 8192);
    if (phx_share_memory(comm, tensors, WORLD_BYTES - COUNTERS_BYTES))
        _exit(2);
    atomic_fetch_add(world->opened, 1);
    while (atomic_load(world->opened) < ranks)
        usleep(100);
    return comm;
}

static void run_rank(struct world *world, int rank, uint32_t kind, int victim, long point)
{
    phx_comm *comm = enter(world, rank);
    points_left = rank == victim ? point : 0;
    int status = PHX_OK, turn = 0;
    for (; turn < TURNS && !status; turn++)
        status = call(comm, rank, turn, kind);
    if (rank == victim)
        _exit(status ? 3 : 0); /* no other rank has died */
    for (; turn < TURNS + 4 && !status; turn++)
        status = phx_barrier(comm);
    _Atomic uint32_t *victims_pid = (_Atomic uint32_t *)(world->opened + 1);
    require_news_of(comm, rank, turn, status, (pid_t)atomic_load(victims_pid), victim);
    phx_close(comm);
    _exit(0);
}

/* The last rank is dead; rank 1 notices it first and dies while it breaks the group. The others must name one of the
 * two, however much of the reason rank 1 has written. */
static void run_rank_beside_noticer(struct world *world, int rank, uint32_t kind, int victim, long point)
{
    (void)kind;
    const int turn = 0, first = ranks - 1;
    phx_comm *comm = enter(world, rank);
    if (rank == first)
        _exit(0);
    if (rank != victim)
        usleep(150000);
    points_left = rank == victim ? point : 0;
    const int status = phx_barrier(comm);
    if (rank == victim)
        _exit(status == PHX_PEER_LOST ? 0 : 3);
    struct phx_breakage why;
    REQUIRE(status == PHX_PEER_LOST);
    REQUIRE(phx_breakage(comm, &why) == PHX_PEER_LOST);
    REQUIRE(why.peer == (uint32_t)first || why.peer == (uint32_t)victim);
    REQUIRE(why.peer_pid != 0);
    phx_close(comm);
    _exit(0);
}

typedef void body(struct world *world, int rank, uint32_t kind, int victim, long point);

static void start(struct world *world, body *run, uint32_t kind, int victim, long point)
{
    /* Slots of a few cache lines, so that a small call goes through each of them more than once. */
    const uint64_t chunk_bytes = 64u * (uint64_t)(ranks > 4 ? ranks : 4);
    count = (int)(5 * chunk_bytes / sizeof(int)) - 3;
    world->segment = memfd_create("deaths", MFD_CLOEXEC);
    world->opened = mmap(NULL, WORLD_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (phx_segment_format(world->segment, (uint32_t)ranks, chunk_bytes, 128, 256, cookie) != PHX_OK)
        abort();
    /* The victim first: the others find its pid beside the counter. */
    for (int i = 0; i < ranks; i++) {
        const int rank = (victim + i) % ranks;
        world->pids[rank] = fork();
        if (world->pids[rank] == 0)
            run(world, rank, kind, victim, point);
        if (rank == victim)
            atomic_store((_Atomic int *)world->opened + 1, world->pids[rank]);
    }
    close(world->segment);
}

/* Whether the victim ended without reaching its point; -1 if a survivor did not end well. */
static int finish(struct world *world, uint32_t kind, int victim, long point)
{
    int through = 0, bad = 0;
    for (int rank = 0; rank < ranks; rank++) {
        int status;
        waitpid(world->pids[rank], &status, 0);
        const int killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        if (rank == victim)
            through = !killed;
        if (rank == victim ? !killed && status != 0 : status != 0) {
            fprintf(stderr, "%s, victim %d of %d at point %ld: rank %d %s %d\n", names[kind] ? names[kind] : "noticer",
                    victim, ranks, point, rank, WIFSIGNALED(status) ? "signal" : "exit",
                    WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
            bad = 1;
        }
    }
    munmap((void *)world->opened, WORLD_BYTES);
    return bad ? -1 : through;
}

static int try_every_point(body *run, uint32_t kind, int victim, long *points)
{
    int bad = 0;
    for (long first = 1, through = 0; !through; first += AT_ONCE * stride) {
        struct world worlds[AT_ONCE];
        for (int i = 0; i < AT_ONCE; i++)
            start(&worlds[i], run, kind, victim, first + i * stride);
        for (int i = 0; i < AT_ONCE; i++) {
            const int end = finish(&worlds[i], kind, victim, first + i * stride);
            bad |= end < 0;
            through |= end > 0;
            *points += end == 0;
        }
        if (bad)
            return 1;
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 2 || (ranks = atoi(argv[1])) < 2 || ranks > MAX_RANKS) {
        fprintf(stderr, "usage: deaths RANKS [STRIDE]\n");
        return 2;
    }
    stride = argc > 2 ? atol(argv[2]) : 1;
    int bad = 0;
    long points = 0;
    for (uint32_t kind = 1; kind < KINDS; kind++) {
        bad |= try_every_point(run_rank, kind, 0, &points);
        bad |= try_every_point(run_rank, kind, ranks - 1, &points);
    }
    if (ranks > 2)
        bad |= try_every_point(run_rank_beside_noticer, 0, 1, &points);
    printf("ranks %d: %ld deaths: %s\n", ranks, points, bad ? "FAILED" : "ok");
    return bad;
}
