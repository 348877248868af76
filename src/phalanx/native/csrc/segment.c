/* Making, mapping and leaving a segment; whether the process behind a place still runs. */
#define _GNU_SOURCE
#include "segment.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "p2p.h"

#define MAGIC 0x786e616c61687050ull
#define HEADER_BYTES 4096u

_Static_assert(sizeof(struct phx_header) <= HEADER_BYTES, "the header fits its page");
_Static_assert(sizeof(struct phx_flags) == PHX_LINE, "one rank's flags are one cache line");
_Static_assert(sizeof(struct phx_place) % PHX_LINE == 0, "places do not share cache lines");

uint32_t phx_abi(void)
{
    return PHX_ABI;
}

static uint64_t slots_offset(uint32_t size)
{
    const uint64_t end = HEADER_BYTES + (uint64_t)size * (sizeof(struct phx_flags) + sizeof(struct phx_place));
    return (end + HEADER_BYTES - 1) / HEADER_BYTES * HEADER_BYTES;
}

static uint64_t rings_offset(uint32_t size, uint64_t chunk_bytes)
{
    return slots_offset(size) + (uint64_t)size * PHX_RING * chunk_bytes;
}

uint64_t phx_segment_bytes(uint32_t size, uint64_t chunk_bytes)
{
    return rings_offset(size, chunk_bytes) + phx_rings_bytes(size);
}

int phx_segment_format(int fd, uint32_t size, uint64_t chunk_bytes, uint64_t small_bytes,
                       uint64_t stream_bytes, const uint8_t *cookie)
{
    if (size < 1 || size > PHX_MAX_RANKS || chunk_bytes < (uint64_t)size * PHX_LINE ||
        chunk_bytes % PHX_LINE)
        return PHX_BAD_ARGUMENT;
    struct phx_header header = {
        .magic = MAGIC, .abi = PHX_ABI, .size = size, .chunk_bytes = chunk_bytes, .small_bytes = small_bytes,
        .stream_bytes = stream_bytes};
    memcpy(header.cookie, cookie, sizeof header.cookie);
    if (ftruncate(fd, (off_t)phx_segment_bytes(size, chunk_bytes)) != 0)
        return PHX_SYSTEM;
    return pwrite(fd, &header, sizeof header, 0) == (ssize_t)sizeof header ? PHX_OK : PHX_SYSTEM;
}

phx_comm *phx_open(int fd, uint32_t rank, const uint8_t *cookie, uint32_t spin, phx_poll poll)
{
    struct stat file;
    struct phx_header header;
    if (fstat(fd, &file) != 0)
        return NULL;
    /* A file of another process with this number is no accident to trust: check before mapping. */
    if (pread(fd, &header, sizeof header, 0) != (ssize_t)sizeof header || header.magic != MAGIC ||
        header.abi != PHX_ABI || memcmp(header.cookie, cookie, sizeof header.cookie) != 0 || rank >= header.size ||
        (uint64_t)file.st_size != phx_segment_bytes(header.size, header.chunk_bytes)) {
        errno = EPROTO;
        return NULL;
    }
    phx_comm *comm = calloc(1, sizeof *comm);
    if (!comm)
        return NULL;
    comm->mapped_bytes = (uint64_t)file.st_size;
    comm->seen = calloc(header.size, sizeof *comm->seen);
    comm->compared = calloc(header.size, sizeof *comm->compared);
    comm->inputs = calloc(header.size, sizeof *comm->inputs);
    char *base = mmap(NULL, comm->mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    comm->mail = phx_mail_open(header.size);
    if (base == MAP_FAILED || !comm->seen || !comm->compared || !comm->inputs || !comm->mail) {
        if (base != MAP_FAILED)
            munmap(base, comm->mapped_bytes);
        if (comm->mail)
            phx_mail_close(comm->mail, header.size);
        free(comm->seen);
        free(comm->compared);
        free(comm->inputs);
        free(comm);
        return NULL;
    }
    comm->rank = rank;
    comm->size = header.size;
    comm->chunk_bytes = header.chunk_bytes;
    comm->small_bytes = header.small_bytes;
    comm->stream_bytes = header.stream_bytes;
    comm->spin = spin;
    cpu_set_t cores;
    comm->cores = sched_getaffinity(0, sizeof cores, &cores) ? 1 : (uint32_t)CPU_COUNT(&cores);
    comm->poll = poll;
    comm->timeout_ns = UINT64_MAX;
    comm->header = (struct phx_header *)base;
    comm->flags = (struct phx_flags *)(base + HEADER_BYTES);
    comm->places = (struct phx_place *)(comm->flags + header.size);
    comm->slots = base + slots_offset(header.size);
    comm->rings = (struct phx_ring *)(base + rings_offset(header.size, header.chunk_bytes));
    comm->places[rank].pid = (uint32_t)getpid();
    comm->places[rank].start_time = phx_process_start_time((uint32_t)getpid());
    return comm;
}

void phx_close(phx_comm *comm)
{
    phx_mail_close(comm->mail, comm->size);
    munmap((void *)comm->header, comm->mapped_bytes);
    free(comm->seen);
    free(comm->compared);
    free(comm->inputs);
    free(comm);
}

void phx_set_timeout(phx_comm *comm, uint64_t timeout_ns)
{
    comm->timeout_ns = timeout_ns;
}

#define CANNOT_TELL UINT64_MAX

static uint64_t unless_gone(uint32_t pid)
{
    return kill((pid_t)pid, 0) == 0 || errno != ESRCH ? CANNOT_TELL : 0;
}

/* State and start time from /proc/<pid>/stat; 0 when there is no such process or it has ended. A pidfd would
 * be surer but costs a descriptor per peer and group; the start time tells a reused pid just as well. A rank that cannot
 * look there (no descriptor left, no memory, not allowed) must not take the others for dead. */
uint64_t phx_process_start_time(uint32_t pid)
{
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    const int reason = errno;
    if (fd >= 0)
        close(fd);
    if (length < 0 && (reason == ENOENT || reason == ESRCH))
        return 0;
    if (length <= 0)
        return unless_gone(pid);
    text[length] = 0;
    char state;
    unsigned long long start_time;
    const char *after_name = strrchr(text, ')'); /* the name may hold anything, also ')' and spaces */
    if (!after_name || sscanf(after_name + 1,
                              " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                              &state, &start_time) != 2)
        return unless_gone(pid);
    return state == 'Z' || state == 'X' || state == 'x' ? 0 : start_time;
}

int phx_place_alive(const struct phx_place *place)
{
    const uint64_t start_time = phx_process_start_time(place->pid);
    return start_time && (start_time == place->start_time || start_time == CANNOT_TELL ||
                          place->start_time == CANNOT_TELL);
}
