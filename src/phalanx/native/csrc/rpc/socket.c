/* A TCP connection: small frames with their digests, without the interpreter. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "rpc/rpc.h"

/* A frame (rpc/links/wire_format.py): the length of what follows without the digest, highest byte first; its kind. */
#define LENGTH_BYTES 4u
#define SMALL 1u

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

int64_t phx_rpc_receive(struct phx_rpc_endpoint *endpoint, int sleep_ms, uint64_t number)
{
    int64_t came = endpoint->came;
    if (!came)
        came = look(endpoint);
    if (came == -EAGAIN && sleep_ms) {
        struct pollfd polled = {.fd = endpoint->descriptor, .events = POLLIN};
        if (poll(&polled, 1, sleep_ms) > 0)
            came = look(endpoint);
    }
    return came > 0 && number != UINT64_MAX && is_whole(endpoint, number) ? came | PHX_RPC_WHOLE : came;
}
