/* A TCP connection: small frames with their digests, without the interpreter. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "rpc/rpc.h"

/* -- BLAKE2b with a key, by the letters of RFC 7693, whose names these are ----------------------------------------- */

#define BLOCK 128u

static const uint64_t IV[8] = {
    0x6a09e667f3bcc908ull, 0xbb67ae8584caa73bull, 0x3c6ef372fe94f82bull, 0xa54ff53a5f1d36f1ull,
    0x510e527fade682d1ull, 0x9b05688c2b3e6c1full, 0x1f83d9abfb41bd6bull, 0x5be0cd19137e2179ull,
};

static const uint8_t SIGMA[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
};

static uint64_t little(const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static inline uint64_t rotated(uint64_t word, unsigned bits)
{
    return word >> bits | word << (64 - bits);
}

#define MIX(a, b, c, d, x, y)                                                                                          \
    do {                                                                                                               \
        v[a] += v[b] + (x);                                                                                            \
        v[d] = rotated(v[d] ^ v[a], 32);                                                                               \
        v[c] += v[d];                                                                                                  \
        v[b] = rotated(v[b] ^ v[c], 24);                                                                               \
        v[a] += v[b] + (y);                                                                                            \
        v[d] = rotated(v[d] ^ v[a], 16);                                                                               \
        v[c] += v[d];                                                                                                  \
        v[b] = rotated(v[b] ^ v[c], 63);                                                                               \
    } while (0)

/* Take a block into the state; `before` bytes have been taken with it, and `last` is ~0 for the last block. */
static void compress(uint64_t h[8], const uint8_t *block, uint64_t before, uint64_t last)
{
    uint64_t v[16], m[16];
    for (int i = 0; i < 16; i++)
        m[i] = little(block + 8 * i);
    memcpy(v, h, 64);
    memcpy(v + 8, IV, 64);
    v[12] ^= before;
    v[14] ^= last;
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) {
        const uint8_t *s = SIGMA[i];
        MIX(0, 4, 8, 12, m[s[0]], m[s[1]]);
        MIX(1, 5, 9, 13, m[s[2]], m[s[3]]);
        MIX(2, 6, 10, 14, m[s[4]], m[s[5]]);
        MIX(3, 7, 11, 15, m[s[6]], m[s[7]]);
        MIX(0, 5, 10, 15, m[s[8]], m[s[9]]);
        MIX(1, 6, 11, 12, m[s[10]], m[s[11]]);
        MIX(2, 7, 8, 13, m[s[12]], m[s[13]]);
        MIX(3, 4, 9, 14, m[s[14]], m[s[15]]);
    }
    for (int i = 0; i < 8; i++)
        h[i] ^= v[i] ^ v[i + 8];
}

/* `key` has at most 64 bytes, `person` 16. */
static void set_key(struct phx_blake2b *keyed, const uint8_t *key, uint32_t key_bytes, const uint8_t *person)
{
    uint8_t block[BLOCK] = {0};
    memcpy(block, key, key_bytes);
    memcpy(keyed->state, IV, sizeof IV);
    keyed->state[0] ^= 0x01010000u ^ key_bytes << 8 ^ PHX_TAG_BYTES;
    keyed->state[6] ^= little(person);
    keyed->state[7] ^= little(person + 8);
    compress(keyed->state, block, BLOCK, 0); /* it is never the last block, because a number follows */
}

/* The digest of a number, as 8 bytes with the highest first, and `nbytes` bytes behind it. */
static void make_tag(const struct phx_blake2b *keyed, uint64_t number, const uint8_t *data, uint64_t nbytes,
                     uint8_t tag[PHX_TAG_BYTES])
{
    uint64_t state[8], before = BLOCK;
    uint8_t block[BLOCK];
    memcpy(state, keyed->state, sizeof state);
    for (int i = 0; i < 8; i++)
        block[i] = (uint8_t)(number >> (56 - 8 * i));
    uint32_t filled = 8;
    for (;;) {
        const uint32_t room = BLOCK - filled, taken = nbytes < room ? (uint32_t)nbytes : room;
        memcpy(block + filled, data, taken);
        data += taken;
        nbytes -= taken;
        filled += taken;
        if (!nbytes)
            break;
        before += BLOCK;
        compress(state, block, before, 0);
        filled = 0;
    }
    memset(block + filled, 0, BLOCK - filled);
    compress(state, block, before + filled, ~0ull);
    for (int i = 0; i < 2; i++)
        state[i] = little((const uint8_t *)&state[i]);
    memcpy(tag, state, PHX_TAG_BYTES);
}

/* -- frames -------------------------------------------------------------------------------------------------------- */

/* A frame (rpc/links/frames.py): the length of what follows without the digest, highest byte first; its kind. */
#define LENGTH_BYTES 4u
#define SMALL 1u

void phx_rpc_endpoint_key(struct phx_rpc_endpoint *endpoint, const uint8_t *key, uint32_t key_bytes,
                          const char *outgoing, const char *incoming)
{
    uint8_t persons[2][16] = {{0}};
    memcpy(persons[0], outgoing, strnlen(outgoing, 16));
    memcpy(persons[1], incoming, strnlen(incoming, 16));
    set_key(&endpoint->outgoing, key, key_bytes, persons[0]);
    set_key(&endpoint->incoming, key, key_bytes, persons[1]);
}

int64_t phx_rpc_write(struct phx_rpc_endpoint *endpoint, uint64_t number, const uint8_t *frame, uint64_t nbytes)
{
    uint8_t tag[PHX_TAG_BYTES];
    make_tag(&endpoint->outgoing, number, frame, nbytes, tag);
    struct iovec parts[2] = {{(void *)(uintptr_t)frame, nbytes}, {tag, sizeof tag}};
    const struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    const ssize_t sent = sendmsg(endpoint->descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    return sent < 0 ? -errno : sent;
}

/* Return whether what has come is one small frame, and message `number` of the session. */
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
    make_tag(&endpoint->incoming, number, data, nbytes, tag);
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
