/* Copying between tensors and the segment, and telling `phalanx explain` what moves, which draws an algorithm from it.
 *
 * In every job `phx_tracer` is NULL, and to tell costs one branch for a piece, which the processor predicts.
 *
 * A store to a line that is in no cache first reads the line from memory. An output larger than the caches gains
 * nothing from that, so it is written with streaming stores, which spare the read, a third of the traffic (64 MiB out
 * of a slot in the second-level cache: 3.0 ms instead of 5.0). A smaller output stays in the cache, where its user
 * wants it. */
#ifndef PHALANX_COPY_H
#define PHALANX_COPY_H

#include <stdint.h>
#include <string.h>

#include "segment/comm.h"

extern phx_tracer_fn phx_tracer;

/* This rank has put, taken or added so many bytes; `place` is where they lie in a slot. */
static inline void phx_moved(const phx_comm *comm, enum phx_traced what, const void *place, uint64_t nbytes)
{
    if (__builtin_expect(phx_tracer != NULL, 0) && nbytes)
        phx_tracer(what, (uint64_t)((const char *)place - comm->slots), place, nbytes);
}

/* This rank has raised a counter of its own, or has seen that of `rank` raised. */
static inline void phx_met(enum phx_traced what, uint32_t rank)
{
    if (__builtin_expect(phx_tracer != NULL, 0))
        phx_tracer(what, rank, NULL, 0);
}

#if defined(__x86_64__)
#include <emmintrin.h>

/* Ends with a fence, since streaming stores are not ordered with the counters and locks that are written after them. */
static inline void phx_stream(char *dst, const char *src, uint64_t nbytes)
{
    const uint64_t head = -(uintptr_t)dst % PHX_LINE;
    if (nbytes < head + PHX_LINE) {
        memcpy(dst, src, nbytes);
        return;
    }
    memcpy(dst, src, head);
    dst += head;
    src += head;
    nbytes -= head;
    const uint64_t whole = nbytes / PHX_LINE * PHX_LINE;
    for (uint64_t i = 0; i < whole; i += PHX_LINE) {
        const __m128i a = _mm_loadu_si128((const __m128i *)(src + i));
        const __m128i b = _mm_loadu_si128((const __m128i *)(src + i + 16));
        const __m128i c = _mm_loadu_si128((const __m128i *)(src + i + 32));
        const __m128i d = _mm_loadu_si128((const __m128i *)(src + i + 48));
        _mm_stream_si128((__m128i *)(dst + i), a);
        _mm_stream_si128((__m128i *)(dst + i + 16), b);
        _mm_stream_si128((__m128i *)(dst + i + 32), c);
        _mm_stream_si128((__m128i *)(dst + i + 48), d);
    }
    _mm_sfence();
    memcpy(dst + whole, src + whole, nbytes - whole);
}
#else
static inline void phx_stream(char *dst, const char *src, uint64_t nbytes)
{
    memcpy(dst, src, nbytes);
}
#endif

static inline void phx_copy_in(const phx_comm *comm, char *slot, const void *from, uint64_t nbytes)
{
    memcpy(slot, from, nbytes);
    phx_moved(comm, PHX_PUT, slot, nbytes);
}

/* Copy a piece of an output that has `total` bytes as a whole; the two do not overlap. */
static inline void phx_copy_out(const phx_comm *comm, void *dst, const void *src, uint64_t nbytes, uint64_t total)
{
    if (total >= comm->stream_bytes)
        phx_stream(dst, src, nbytes);
    else
        memcpy(dst, src, nbytes);
    phx_moved(comm, PHX_TAKEN, src, nbytes);
}

#endif
