/* The shared memory of RPC between processes of one host: every word that two processes share.
 *
 * Each process with a hub has a *place*, one page, and behind it a *slab*, in which its large images lie. Every process that
 * has a link to it maps both: the slab twice, for an image that several processes read privately, because each may
 * change what it has received; when a receiver releases such an image, it drops the pages that it has changed. Each link
 * has a *channel*, made by the side that dials (side 0) and mapped by both, with a ring for each direction. A small image
 * goes through the ring; of a large one only a record does. Only its own process allocates from a slab, and keeps its notes
 * of it in private memory. The slab's file is as large as the machine's memory, and takes memory as it is used. A receiver
 * may keep what it got for as long as it likes: once half of the slab, or of the numbers of its blocks, is in use, it
 * copies what comes and releases it.
 *
 * Both are memfds, found through /proc/<pid>/fd and known by 16 random bytes. Counters of a ring count all bytes that
 * ever went in and came out.
 *
 * Every shared word, its writer, its readers, the memory order, and what is left if the writer dies right before or after.
 * The end of a process ends its links, so most words need no more than that.
 *
 * word        writer, order               readers, order              if the writer dies
 * magic .. slab_bytes, cookie
 *             who makes it, before the descriptor is told to anybody   nobody opens it
 * bell        raised, seq_cst, by who has threads of the place, which before: the message is found when anything else
 *             put something into a ring,  sleep on what they read     happens, at the latest with the death; after: nothing
 *             and by the place's threads  before they looked
 * sleepers    added to, seq_cst, by      who has rung: it sees the    they die with all who wait
 *             threads before they sleep  sleeper, or the kernel the
 *                                        changed bell
 * spinners    added to, seq_cst, by threads that watch the bell and   as sleepers
 *             look at all rings after it. While there is one, nobody
 *             is woken
 * alive_ns    the hub's C thread, every   other watchers, relaxed     it stands still: dead, stopped or exec, told apart in
 *             100 ms, relaxed                                         /proc
 * head        the sender, under a lock,   the receiver, acquire       before: there is no message; after: it is whole
 *             release, after the bytes
 * tail        the receiver under its      the sender, acquire         the ring stays full until the death is noticed
 *             hub's lock, seq_cst
 * waiting     added to, seq_cst, by       the receiver after it has   each message costs a wake that wakes nobody
 *             senders asleep on `tail`    stored `tail`
 * released    in the sender's side. The receiver, release: the        the sender finds the process gone
 *             block's sequence number, when nobody there can reach
 *             its memory. The sender, relaxed: 0, as it lends one.
 *             Read by the sender, acquire
 * borrows     the side, once, release: it has mapped the other hub's  it borrows nothing
 *             slab; read by the other, acquire
 * closed      the side, release, after all that it has sent: why it   as any death
 *             has ended the link (enum phx_rpc_end); read by the
 *             other, acquire, when it has taken everything
 * pid .. image side 0 before the descriptor is told, side 1 as it     they are compared with /proc
 *             attaches: who it is
 */
#ifndef PHALANX_RPC_CHANNEL_H
#define PHALANX_RPC_CHANNEL_H

#include <stdatomic.h>
#include <stdint.h>

#define PHX_RPC_MAGIC 0x637072786e616c61ull
#define PHX_RPC_LINE 128u /* two cache lines: the prefetcher fetches them in pairs */
#define PHX_RPC_PAGE 4096u
#define PHX_RPC_LARGEST_PAGE 65536u
#define PHX_RPC_LARGEST_SLAB (1ull << 40)
#define PHX_RPC_RING_BYTES 262144u
#define PHX_RPC_BLOCKS 16384u
#define PHX_RPC_SHARED_AT 2097152u /* where the hub's slab begins in the file of its place */

struct phx_rpc_place {
    uint64_t magic;
    uint32_t abi;
    uint8_t cookie[16];
    uint64_t slab_bytes;
    _Alignas(PHX_RPC_LINE) _Atomic uint32_t bell, sleepers, spinners;
    _Alignas(PHX_RPC_LINE) _Atomic uint64_t alive_ns;
};

struct phx_rpc_ring {
    _Alignas(PHX_RPC_LINE) _Atomic uint64_t head;
    _Atomic uint32_t waiting;
    _Alignas(PHX_RPC_LINE) _Atomic uint64_t tail;
};

struct phx_rpc_side {
    struct phx_rpc_ring ring;
    _Alignas(PHX_RPC_LINE) _Atomic uint32_t closed;
    uint32_t pid;
    int32_t fd;
    uint8_t place_cookie[16];
    uint64_t start_time, image;
    _Atomic uint32_t borrows;
    _Alignas(PHX_RPC_LINE) _Atomic uint32_t released[PHX_RPC_BLOCKS];
};

struct phx_rpc_channel {
    uint64_t magic;
    uint32_t abi;
    uint8_t cookie[16];
    struct phx_rpc_side sides[2];
};

/* In front of everything in a ring. Records are aligned to 16 bytes and never wrap. */
struct phx_rpc_record {
    uint32_t nbytes; /* of what follows */
    uint32_t type;
    uint64_t unused;
};
enum phx_rpc_type { PHX_RPC_SKIP = 1, PHX_RPC_IMAGE, PHX_RPC_LENT };

/* The content of a PHX_RPC_LENT record: the image's place in the sender's slab; its block, with PHX_RPC_COPY and
 * PHX_RPC_SEVERAL (rpc.h) in the number; and the call that the image is for here. */
struct phx_rpc_lent {
    uint64_t at, nbytes;
    uint32_t block, sequence;
    uint64_t call;
};

/* Return where the rings of a channel begin, at a page; that of side 1 follows that of side 0. */
static inline uint64_t phx_rpc_rings_at(void)
{
    return (sizeof(struct phx_rpc_channel) + PHX_RPC_LARGEST_PAGE - 1) / PHX_RPC_LARGEST_PAGE * PHX_RPC_LARGEST_PAGE;
}
static inline uint64_t phx_rpc_channel_bytes(void)
{
    return phx_rpc_rings_at() + 2 * PHX_RPC_RING_BYTES;
}

#endif
