/* The shared memory of RPC between processes of one host: every word that two processes share.
 *
 * Each process with a hub has a *place*, one page, which every process that has a link to it maps. A slab follows it, for
 * images that go to several processes at once. Its receivers map that slab privately, because each may change what it has
 * received; when a receiver returns an image, it drops the pages that it has changed. Each link has a
 * *channel*, made by the side that dials (side 0) and mapped by both. A side sends through two rings and a slab of its
 * own in it. A small image goes through the small ring. A large one lies in the slab, and only a record of it goes
 * through the bulk ring; if the slab has no room, the image goes through the bulk ring in pieces. Only its own side
 * allocates from a slab, and keeps its notes of it in private memory.
 *
 * Both are memfds, found through /proc/<pid>/fd and known by 16 random bytes. Counters of a ring count all bytes that
 * ever went in and came out.
 *
 * Every shared word: its writer, its readers, the memory order, and what is left if the writer dies right before or
 * right after the store.
 *
 *   magic, abi, cookie, slab_bytes
 *               Written before the descriptor is told to anybody; ordered by the connection that tells it.
 *   bell        Raised, seq_cst, by a process after it has put something into a ring, and by the place's own threads to
 *               call each other. A thread of the place that finds nothing sleeps on the value that it read before it
 *               looked. If the sender dies before, its message is there and nobody was rung for: it is found when
 *               anything else happens, at the latest when the death is noticed, which rings too. After: nothing is lost.
 *   sleepers    How many threads of the place sleep on the bell; written by them, seq_cst, before they sleep. Read by the
 *               process that has rung. Either it sees the sleeper and wakes it, or the kernel sees that the bell has
 *               changed and does not let the thread sleep.
 *   spinners    How many threads of the place watch the bell without sleeping, seq_cst. While there is one, nobody is
 *               woken. A thread that ceases to watch looks at all rings after it has taken itself off this count.
 *               sleepers and spinners die with the process that owns the place, and with it all who wait.
 *   alive_ns    When the hub's own C thread last ran, every 40 to 100 ms; relaxed. That it stands still is the death, the
 *               stop or the exec of the process, told apart in /proc.
 *   python_ns   When a thread of the place last entered the core from Python; relaxed.
 *   head        Of a ring, written by the sending side under a lock of its process, release, after the bytes. Read by the
 *               receiving side, acquire. Death before: the message does not exist. Death after: it is whole.
 *   tail        Written by the receiving side under its hub's lock, seq_cst, when it has copied the bytes. Read by the
 *               sending side, acquire. Death: the ring stays full, until the sender learns of the death.
 *   waiting     How many threads of the sending side sleep on `tail`, seq_cst. Read by the receiving side after it has
 *               stored `tail`. If the sender dies it stays raised: each message then costs a wake that wakes nobody.
 *   released    One for each block of the sender's slab. Set to 0 by the sending side, relaxed, when it allocates the
 *               block; the receiving side learns of the block only after that, by the ring's head. Written by the
 *               receiving side, release, with the block's sequence number, when nobody there can reach the block's memory
 *               any more; by the sending side, likewise, under its slab's lock, if it gives up a block that it has not
 *               handed over to the ring (phx_rpc_free()). Read by the sending side, acquire,
 *               before it uses the block again. Death before: the link ends, and the whole channel with it.
 *   returned    As `released`, for the images of the hub's slab: one for each loan, in the lender's side of the channel.
 *               Death of the receiver: the lender finds that its process is gone.
 *   borrows     Whether this side has mapped the other hub's slab. Written once, release; read by the other side, acquire,
 *               before it lends anything.
 *   closed      Why its side has ended the link (enum phx_rpc_end), or 0. Written by that side, release, after all that it
 *               has sent. Read by the other, acquire, which ends the link too when it has taken everything. Death before:
 *               as any death.
 *   pid, fd, place_cookie, start_time, image
 *               Who a side is. Side 0's are written before the descriptor is told; side 1's when it attaches, before it
 *               says so over the connection that told it. A wrong one is no danger: it is compared with /proc.
 */
#ifndef PHALANX_RPC_SEGMENT_H
#define PHALANX_RPC_SEGMENT_H

#include <stdatomic.h>
#include <stdint.h>

#define PHX_RPC_MAGIC 0x637072786e616c61ull
#define PHX_RPC_LINE 128u /* two cache lines: the prefetcher fetches them in pairs */
#define PHX_RPC_PAGE 4096u
#define PHX_RPC_LARGEST_PAGE 65536u
#define PHX_RPC_LARGEST_SLAB (1ull << 40)
#define PHX_RPC_SMALL_RING 262144u
#define PHX_RPC_BULK_RING 1048576u
#define PHX_RPC_PIECE 131072u /* of an image that goes in pieces: less than half of the bulk ring */
#define PHX_RPC_BLOCKS 1024u
#define PHX_RPC_LOANS 512u
#define PHX_RPC_SHARED_AT 2097152u /* where the hub's slab begins in the file of its place */

struct phx_rpc_place {
    uint64_t magic;
    uint32_t abi;
    uint8_t cookie[16];
    uint64_t slab_bytes;
    _Alignas(PHX_RPC_LINE) _Atomic uint32_t bell, sleepers, spinners;
    _Alignas(PHX_RPC_LINE) _Atomic uint64_t alive_ns, python_ns;
};

struct phx_rpc_ring {
    _Alignas(PHX_RPC_LINE) _Atomic uint64_t head;
    _Atomic uint32_t waiting;
    _Alignas(PHX_RPC_LINE) _Atomic uint64_t tail;
};

struct phx_rpc_side {
    struct phx_rpc_ring rings[2];
    _Alignas(PHX_RPC_LINE) _Atomic uint32_t closed;
    uint32_t pid;
    int32_t fd;
    uint8_t place_cookie[16];
    uint64_t start_time, image;
    _Atomic uint32_t borrows;
    _Alignas(PHX_RPC_LINE) _Atomic uint32_t released[PHX_RPC_BLOCKS];
    _Alignas(PHX_RPC_LINE) _Atomic uint32_t returned[PHX_RPC_LOANS];
};

struct phx_rpc_channel {
    uint64_t magic;
    uint32_t abi;
    uint8_t cookie[16];
    uint64_t slab_bytes;
    struct phx_rpc_side sides[2];
};

/* In front of everything in a ring. Records are aligned to 16 bytes and never wrap. */
struct phx_rpc_record {
    uint32_t nbytes; /* of what follows */
    uint32_t type;
    uint64_t whole; /* of an image in pieces, in its first piece: the bytes of all of them */
};
enum phx_rpc_type { PHX_RPC_SKIP = 1, PHX_RPC_IMAGE, PHX_RPC_BLOCK, PHX_RPC_FIRST, PHX_RPC_MORE, PHX_RPC_LENT };

/* What a PHX_RPC_BLOCK record says. */
struct phx_rpc_block {
    uint64_t at, nbytes; /* in the slab */
    uint32_t block, sequence;
};

/* What a PHX_RPC_LENT record says: a block of the hub's slab, with the number and sequence number of the loan, and the call
 * that the image is for here. */
struct phx_rpc_lent {
    struct phx_rpc_block block;
    uint64_t call;
};
/* What is added to the number of a loan in a phx_rpc_box, to tell it from a block. */
#define PHX_RPC_LOAN 0x80000000u

/* Where the parts of a channel begin, each at a page; a side's ring or slab follows at its number times its size. */
static inline uint64_t phx_rpc_rings_at(void)
{
    return (sizeof(struct phx_rpc_channel) + PHX_RPC_LARGEST_PAGE - 1) / PHX_RPC_LARGEST_PAGE * PHX_RPC_LARGEST_PAGE;
}
static inline uint64_t phx_rpc_slabs_at(void)
{
    const uint64_t end = phx_rpc_rings_at() + 2 * (PHX_RPC_SMALL_RING + PHX_RPC_BULK_RING), huge = 2097152;
    return (end + huge - 1) / huge * huge;
}

#endif
