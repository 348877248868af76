/* A TCP connection: small frames with their digests, and watching for them before sleeping, without the interpreter. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "futex.h"
#include "rpc.h"
#include "rpc_patience.h"

/* A frame (rpc/links/wire_format.py): the length of what follows without the digest, highest byte first; its kind. */
#define LENGTH_BYTES 4u
#define SMALL 1u

/* If a thread that watches gives its core away and gets it back only after so long, somebody else needs the core. Then all
 * threads of this process sleep at once for a while: for much longer than it has waited for the core, because nobody else
 * receives what came meanwhile. */
#define BUSY_NS 30000u
#define LEAST_REST_NS 100000000ull
#define MOST_REST_NS 10000000000ull
#define REST_FACTOR 100u

void phx_rpc_endpoint_key(struct phx_rpc_endpoint *endpoint, const uint8_t *key, uint32_t key_bytes,
                          const char *outgoing, const char *incoming)
{
    uint8_t persons[2][16] = {{0}};
    memcpy(persons[0], outgoing, strnlen(outgoing, 16));
    memcpy(persons[1], incoming, strnlen(incoming, 16));
    phx_blake2b_key(&endpoint->outgoing, key, key_bytes, persons[0]);
    phx_blake2b_key(&endpoint->incoming, key, key_bytes, persons[1]);
}

int64_t phx_rpc_write(struct phx_rpc_endpoint *endpoint, uint64_t number, const uint8_t *frame, uint64_t nbytes)
{
    uint8_t tag[PHX_TAG_BYTES];
    phx_blake2b_tag(&endpoint->outgoing, number, frame, nbytes, tag);
    struct iovec parts[2] = {{(void *)(uintptr_t)frame, nbytes}, {tag, sizeof tag}};
    const struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    const ssize_t sent = sendmsg(endpoint->descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    return sent < 0 ? -errno : sent;
}

/* Whether what has come is one small frame, and message `number` of the session. */
static int is_whole(const struct phx_rpc_endpoint *endpoint, uint64_t number)
{
    const uint8_t *data = endpoint->data;
    if (endpoint->came <= LENGTH_BYTES + PHX_TAG_BYTES || data[LENGTH_BYTES] != SMALL)
        return 0;
    const uint32_t nbytes = endpoint->came - PHX_TAG_BYTES;
    const uint64_t length = (uint64_t)data[0] << 24 | data[1] << 16 | data[2] << 8 | data[3];
    if (length + LENGTH_BYTES != nbytes)
        return 0;
    uint8_t tag[PHX_TAG_BYTES], differs = 0;
    phx_blake2b_tag(&endpoint->incoming, number, data, nbytes, tag);
    for (uint32_t i = 0; i < PHX_TAG_BYTES; i++)
        differs |= tag[i] ^ data[nbytes + i];
    return !differs;
}

static int64_t look(struct phx_rpc_endpoint *endpoint)
{
    const ssize_t came = recv(endpoint->descriptor, endpoint->data, endpoint->size, MSG_DONTWAIT);
    if (came < 0)
        return -errno;
    endpoint->came = (uint32_t)came;
    return came;
}

static void rest(struct phx_rpc_watch *process, uint64_t now, uint64_t lost_ns)
{
    uint64_t rest_ns = REST_FACTOR * lost_ns;
    rest_ns = rest_ns < LEAST_REST_NS ? LEAST_REST_NS : rest_ns > MOST_REST_NS ? MOST_REST_NS : rest_ns;
    atomic_store_explicit(&process->busy_until_ns, now + rest_ns, memory_order_relaxed);
}

/* Look again and again until a time. */
static int64_t watch(struct phx_rpc_endpoint *endpoint, int serves, uint64_t now, uint64_t until)
{
    for (;;) {
        sched_yield();
        const uint64_t before = now;
        now = phx_now_ns();
        const int busy = now - before > BUSY_NS;
        if (busy)
            rest(endpoint->watch, now, now - before);
        const int64_t came = look(endpoint);
        if (came != -EAGAIN || busy || now >= until || (serves && atomic_load(&endpoint->wanted)))
            return came;
        for (int i = 0; i < 50; i++)
            phx_relax();
    }
}

static int may_watch(struct phx_rpc_watch *process, uint64_t now)
{
    return atomic_load(&process->connections) < process->cores &&
           now >= atomic_load_explicit(&process->busy_until_ns, memory_order_relaxed);
}

static int64_t await(struct phx_rpc_endpoint *endpoint, int serves, int watches, int sleep_ms)
{
    int64_t came = look(endpoint);
    const uint64_t since_ns = serves ? endpoint->since_ns : 0;
    if (came != -EAGAIN ? !since_ns : !watches && !sleep_ms)
        return came;
    const uint64_t now = phx_now_ns(), begun = since_ns ? since_ns : now;
    _Atomic uint32_t *usual = &endpoint->usual_ns[serves];
    if (came == -EAGAIN && watches && may_watch(endpoint->watch, now)) {
        const uint64_t until = now + phx_rpc_watch_ns(usual);
        if (!serves)
            came = watch(endpoint, 0, now, until);
        else if (!atomic_exchange(&endpoint->watch->watched, 1)) {
            came = watch(endpoint, 1, now, until);
            atomic_store(&endpoint->watch->watched, 0);
        }
    }
    if (came == -EAGAIN && sleep_ms) {
        struct pollfd polled = {.fd = endpoint->descriptor, .events = POLLIN};
        if (poll(&polled, 1, sleep_ms) > 0)
            came = look(endpoint);
    }
    endpoint->since_ns = serves && came == -EAGAIN ? begun : 0; /* its thread goes to sleep in the epoll */
    if (!endpoint->since_ns)
        phx_rpc_note(usual, phx_now_ns() - begun);
    return came;
}

int64_t phx_rpc_receive(struct phx_rpc_endpoint *endpoint, int serves, int watches, int sleep_ms, uint64_t number)
{
    const int64_t came = endpoint->came ? endpoint->came : await(endpoint, serves, watches, sleep_ms);
    return came > 0 && number != UINT64_MAX && is_whole(endpoint, number) ? came | PHX_RPC_WHOLE : came;
}
