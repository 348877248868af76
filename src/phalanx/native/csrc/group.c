/* Opening and closing one rank's view of a segment. */
#define _GNU_SOURCE
#include "segment/comm.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "messages/mail.h"
#include "segment/copy.h"

phx_tracer_fn phx_tracer;

void phx_trace(phx_tracer_fn tracer)
{
    phx_tracer = tracer;
}

uint32_t phx_abi(void)
{
    return PHX_ABI;
}

/* Free all that a view owns besides the mapping. */
static void free_view(phx_comm *comm)
{
    phx_mail_close(comm->mail);
    for (uint32_t p = 0; p < comm->size; p++)
        if (comm->recorders[p])
            munmap((void *)comm->recorders[p], PHX_RECORDER_BYTES);
    free(comm->shared);
    free(comm->lines);
    free(comm);
}

static phx_comm *new_view(uint32_t size)
{
    /* The arrays with an element for each rank lie behind it. */
    phx_comm *comm = calloc(1, sizeof *comm + size * (sizeof *comm->met + sizeof *comm->compared + 3 * sizeof(void *)));
    if (!comm)
        return NULL;
    comm->size = size;
    comm->met = (struct phx_process *)(comm + 1);
    comm->compared = (uint64_t *)(comm->met + size);
    comm->inputs = (const void **)(comm->compared + size);
    comm->tensors = (const char **)(comm->inputs + size);
    comm->recorders = comm->tensors + size;
    comm->mail = phx_mail_open(comm);
    if (comm->mail)
        return comm;
    free(comm);
    return NULL;
}

phx_comm *phx_open(int fd, uint32_t rank, const uint8_t *cookie, uint32_t spin, phx_poll poll)
{
    struct phx_header header;
    if (phx_segment_read(fd, cookie, &header) != 0)
        return NULL;
    if (rank >= header.size) {
        errno = EPROTO;
        return NULL;
    }
    phx_comm *comm = new_view(header.size);
    if (!comm)
        return NULL;
    const struct phx_layout at = phx_layout_of(header.size, header.chunk_bytes);
    char *base = mmap(NULL, at.end, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        const int reason = errno;
        free_view(comm);
        errno = reason;
        return NULL;
    }
    comm->rank = rank;
    comm->spin = spin;
    comm->cores = phx_usable_cores();
    comm->chunk_bytes = header.chunk_bytes;
    comm->small_bytes = header.small_bytes;
    comm->stream_bytes = header.stream_bytes;
    comm->timeout_ns = comm->message_timeout_ns = UINT64_MAX;
    comm->poll = poll;
    comm->mapped_bytes = at.end;
    comm->header = (struct phx_header *)base;
    comm->flags = (struct phx_flags *)(base + at.flags);
    comm->places = (struct phx_place *)(base + at.places);
    comm->slots = base + at.slots;
    comm->rings = (struct phx_ring *)(base + at.rings);
    comm->ring_data = base + at.ring_data;
    /* A rank that gave up waiting for the others, and so told that it had left, may come again before they have met. */
    atomic_store_explicit(&comm->places[rank].going, PHX_HERE, memory_order_relaxed);
    comm->places[rank].pid = phx_own_pid();
    struct phx_process own;
    phx_process_read(comm->places[rank].pid, &own);
    comm->places[rank].image = own.image;
    comm->places[rank].recorder = phx_recorder_file();
    phx_remember(comm);
    return comm;
}

void phx_close(phx_comm *comm)
{
    phx_forget(comm);
    phx_tell(comm, PHX_LEFT);
    phx_ready_leave(comm->mail);
    munmap((void *)comm->header, comm->mapped_bytes);
    free_view(comm);
}

int phx_share_memory(phx_comm *comm, const void *base, uint64_t nbytes)
{
    struct phx_memory *more = realloc(comm->shared, (comm->nshared + 1) * sizeof *more);
    if (!more)
        return PHX_SYSTEM;
    more[comm->nshared] = (struct phx_memory){base, nbytes};
    comm->shared = more;
    comm->nshared++;
    return PHX_OK;
}

void phx_name_ranks(phx_comm *comm, const int32_t *names)
{
    comm->names = names;
}

const char *phx_recorder_of(const phx_comm *comm, uint32_t rank)
{
    return rank < comm->size ? comm->recorders[rank] : NULL;
}

void phx_set_timeout(phx_comm *comm, uint64_t timeout_ns, uint64_t message_timeout_ns)
{
    comm->timeout_ns = timeout_ns;
    comm->message_timeout_ns = message_timeout_ns;
}
