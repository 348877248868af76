/* Point-to-point: one ring of bytes for every ordered pair of ranks.
 *
 * Who writes, who reads:
 *   head   written by the sender, release after the bytes it covers; read by the receiver, acquire.
 *   tail   written by the receiver, release after the bytes it covers were copied out; read by the sender, acquire.
 *   bell   (in the place of the rank that is rung) added to by anybody who moved bytes to or from that rank, seq_cst;
 *          read and slept on by that rank. A death between moving bytes and ringing costs the peer a slice of sleep.
 * A sender that dies in the middle of a message leaves a head that covers only whole pieces: the receiver takes
 * those, waits for the rest and finds the process gone. A receiver that dies leaves a full ring: the same. */
#ifndef PHALANX_P2P_H
#define PHALANX_P2P_H

#include "segment.h"

struct phx_ring {
    _Alignas(PHX_LINE) _Atomic uint64_t head;
    _Alignas(PHX_LINE) _Atomic uint64_t tail;
};

/* Bytes of data in one ring of a group of `size`, and of all rings together with their heads and tails. */
uint64_t phx_ring_bytes(uint32_t size);
uint64_t phx_rings_bytes(uint32_t size);

struct phx_mail *phx_mail_open(uint32_t size);
void phx_mail_close(struct phx_mail *mail, uint32_t size);

#endif
