/* BLAKE2b (RFC 7693) with a key, as Python's hashlib computes it: the digests of RPC's frames, without the interpreter. */
#ifndef PHALANX_BLAKE2B_H
#define PHALANX_BLAKE2B_H

#include <stdint.h>

#define PHX_TAG_BYTES 16u /* of a digest */

/* A digest that has its key. Nobody writes it after phx_blake2b_key(), so any threads may use it. */
struct phx_blake2b {
    uint64_t state[8];
};

/* `key` has at most 64 bytes, `person` 16. */
void phx_blake2b_key(struct phx_blake2b *keyed, const uint8_t *key, uint32_t key_bytes, const uint8_t *person);
/* The digest of a number, as 8 bytes with the highest first, and `nbytes` bytes behind it. */
void phx_blake2b_tag(const struct phx_blake2b *keyed, uint64_t number, const uint8_t *data, uint64_t nbytes,
                     uint8_t tag[PHX_TAG_BYTES]);

#endif
