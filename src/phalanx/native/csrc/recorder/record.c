/* Writing and reading the records of a process's operations. */
#define _GNU_SOURCE
#include "recorder/record.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "recorder/clock.h"

#define TAG (1ull << 63)

/* The memory of this process, NULL without a recorder. It is set before the process has a group, and stays mapped. */
static char *memory;
static struct phx_recorder_file file = {.fd = -1};
__thread __attribute__((tls_model("initial-exec"))) struct phx_record *phx_record_under_way;

static struct phx_recorder_header *header_of(const char *at)
{
    return (struct phx_recorder_header *)(uintptr_t)at;
}

static struct phx_record *record_of(const char *at, uint64_t number)
{
    return (struct phx_record *)(uintptr_t)(at + PHX_RECORDS_AT) + number % PHX_RECORDS;
}

/* The memory is the parent's. */
static void forget_in_child(void)
{
    memory = NULL;
    file.fd = -1;
    phx_record_under_way = NULL;
}

void *phx_recorder_open(int fd, uint64_t offset, uint32_t pid, int32_t rank, uint32_t size)
{
    static int noted;
    struct stat found;
    if (fstat(fd, &found))
        return NULL;
    void *mapped = mmap(NULL, PHX_RECORDER_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
    if (mapped == MAP_FAILED)
        return NULL;
    if (!noted && pthread_atfork(NULL, NULL, forget_in_child)) {
        munmap(mapped, PHX_RECORDER_BYTES);
        return NULL;
    }
    noted = 1;
    phx_clock_open();
    struct phx_recorder_header *header = header_of(mapped);
    header->version = PHX_ABI;
    header->pid = pid;
    atomic_store_explicit(&header->size, size, memory_order_relaxed);
    atomic_store_explicit(&header->rank, rank, memory_order_relaxed);
    atomic_store_explicit(&header->step, -1, memory_order_relaxed);
    atomic_store_explicit(&header->magic, PHX_RECORDER_MAGIC, memory_order_release);
    memory = mapped;
    file = (struct phx_recorder_file){.fd = fd, .at = offset, .device = found.st_dev, .inode = found.st_ino};
    return mapped;
}

struct phx_recorder_file phx_recorder_file(void)
{
    return file;
}

void phx_recorder_names(uint32_t dtypes, int32_t rank, uint32_t size)
{
    if (!memory)
        return;
    atomic_store_explicit(&header_of(memory)->dtypes, dtypes, memory_order_release);
    atomic_store_explicit(&header_of(memory)->rank, rank, memory_order_relaxed);
    atomic_store_explicit(&header_of(memory)->size, size, memory_order_relaxed);
}

void phx_recorder_mark(int32_t step, uint32_t label)
{
    if (!memory)
        return;
    atomic_store_explicit(&header_of(memory)->step, step, memory_order_relaxed);
    atomic_store_explicit(&header_of(memory)->label, label, memory_order_relaxed);
}

static int is_message(uint32_t what)
{
    return (what & 0xff) >= PHX_SEND;
}

static uint64_t begin(const struct phx_record_group *group, uint32_t in_group, uint32_t what, uint64_t nbytes,
                      uint32_t site, int32_t peer, uint64_t entered_ns)
{
    struct phx_recorder_header *header = header_of(memory);
    const uint64_t n = atomic_fetch_add_explicit(&header->next, 1, memory_order_relaxed);
    struct phx_record *record = record_of(memory, n);
    __builtin_prefetch(record_of(memory, n + 1), 1); /* the next begins with an exchange there, which would wait for it */
    uint64_t before = atomic_load_explicit(&record->word, memory_order_relaxed);
    if (before % 2 || before > 2 * n ||
        !atomic_compare_exchange_strong_explicit(&record->word, &before, 2 * n + 1, memory_order_acquire,
                                                 memory_order_relaxed)) {
        atomic_fetch_add_explicit(&header->lost, 1, memory_order_relaxed);
        return 0;
    }
    atomic_thread_fence(memory_order_release);
    const memory_order order = memory_order_relaxed;
    atomic_store_explicit(&record->left, TAG | n, order);
    atomic_store_explicit(&record->entered_ns, entered_ns, order);
    atomic_store_explicit(&record->nbytes, nbytes, order);
    atomic_store_explicit(&record->in_group, in_group, order);
    atomic_store_explicit(&record->what, what, order);
    atomic_store_explicit(&record->group, group->name, order);
    atomic_store_explicit(&record->site, site, order);
    atomic_store_explicit(&record->label, atomic_load_explicit(&header->label, order), order);
    atomic_store_explicit(&record->peer, peer, order);
    atomic_store_explicit(&record->awaits, -1, order);
    atomic_store_explicit(&record->step, atomic_load_explicit(&header->step, order), order);
    atomic_store_explicit(&record->word, 2 * n + 2, memory_order_release);
    if (!is_message(what))
        phx_record_under_way = record;
    return TAG | n;
}

uint64_t phx_record_begin(struct phx_record_group *group, uint32_t what, uint64_t nbytes, uint32_t site, int32_t peer)
{
    if (!memory || !group)
        return 0;
    _Atomic uint32_t *count = is_message(what) ? &group->messages : &group->collectives;
    const uint32_t in_group = atomic_fetch_add_explicit(count, 1, memory_order_relaxed) + 1;
    return begin(group, in_group, what, nbytes, site, peer, phx_clock_now());
}

uint64_t phx_record_begin_at(struct phx_record_group *group, uint32_t what, uint64_t nbytes, uint32_t site, int32_t peer,
                             uint64_t entered_ns)
{
    if (!memory || !group)
        return 0;
    const uint32_t next = atomic_load_explicit(&group->collectives, memory_order_relaxed) + 1;
    return begin(group, next, what, nbytes, site, peer, entered_ns);
}

void phx_record_end(uint64_t ticket, int failed)
{
    if (!memory || !ticket)
        return;
    struct phx_record *record = record_of(memory, ticket & ~TAG);
    const uint64_t entered = atomic_load_explicit(&record->entered_ns, memory_order_relaxed), now = phx_clock_now();
    const uint64_t left = now > entered ? now : entered; /* threads have clocks of their own, and any may end it */
    uint64_t expected = ticket;
    if (phx_record_under_way == record)
        phx_record_under_way = NULL;
    atomic_compare_exchange_strong_explicit(&record->left, &expected, left << 1 | (failed != 0), memory_order_release,
                                            memory_order_relaxed);
}

void phx_record_drop(uint64_t ticket)
{
    if (!memory || !ticket)
        return;
    const uint64_t n = ticket & ~TAG;
    struct phx_record *record = record_of(memory, n);
    uint64_t there = 2 * n + 2;
    if (phx_record_under_way == record)
        phx_record_under_way = NULL;
    atomic_compare_exchange_strong_explicit(&record->word, &there, 0, memory_order_relaxed, memory_order_relaxed);
}

void phx_record_awaits(int32_t rank)
{
    if (phx_record_under_way)
        atomic_store_explicit(&phx_record_under_way->awaits, rank, memory_order_relaxed);
}

void phx_record_piece(uint64_t done, uint64_t of)
{
    if (memory)
        atomic_store_explicit(&header_of(memory)->pieces, done << 32 | of, memory_order_relaxed);
}

struct phx_record_place phx_record_place(void)
{
    struct phx_record_place place = {.peer = -1};
    if (!phx_record_under_way)
        return place;
    place.line = atomic_load_explicit(&phx_record_under_way->site, memory_order_relaxed);
    place.in_group = atomic_load_explicit(&phx_record_under_way->in_group, memory_order_relaxed);
    place.what = atomic_load_explicit(&phx_record_under_way->what, memory_order_relaxed);
    place.peer = atomic_load_explicit(&phx_record_under_way->peer, memory_order_relaxed);
    if (place.line >= sizeof place.identity && place.line < PHX_STRINGS)
        memcpy(&place.identity, memory + PHX_STRINGS_AT + place.line - sizeof place.identity, sizeof place.identity);
    return place;
}

uint32_t phx_records_read(const char *from, uint64_t first, struct phx_record_seen *out, uint64_t *next)
{
    const struct phx_recorder_header *header = header_of(from);
    uint32_t found = 0;
    if (atomic_load_explicit(&header->magic, memory_order_acquire) != PHX_RECORDER_MAGIC)
        return 0;
    *next = atomic_load_explicit(&header->next, memory_order_relaxed);
    const uint64_t begun = *next > first ? *next - first : 0;
    const uint32_t wanted = begun < PHX_RECORDS ? (uint32_t)begun : PHX_RECORDS;
    for (uint32_t i = 0; i < wanted; i++) {
        const struct phx_record *record = record_of(from, first + i);
        const uint64_t word = atomic_load_explicit(&record->word, memory_order_acquire);
        if (word % 2 || !word || word / 2 - 1 < first)
            continue;
        const memory_order order = memory_order_relaxed;
        const uint64_t left = atomic_load_explicit(&record->left, order);
        const uint64_t nbytes = atomic_load_explicit(&record->nbytes, order);
        struct phx_record_seen *seen = &out[found];
        *seen = (struct phx_record_seen){
            .number = word / 2 - 1,
            .entered_ns = atomic_load_explicit(&record->entered_ns, order),
            .left_ns = left & TAG ? 0 : left >> 1,
            .nbytes = nbytes & ((1ull << PHX_NBYTES_BITS) - 1),
            .shape = (uint32_t)(nbytes >> PHX_NBYTES_BITS),
            .in_group = atomic_load_explicit(&record->in_group, order),
            .what = atomic_load_explicit(&record->what, order),
            .group = atomic_load_explicit(&record->group, order),
            .site = atomic_load_explicit(&record->site, order),
            .label = atomic_load_explicit(&record->label, order),
            .peer = atomic_load_explicit(&record->peer, order),
            .awaits = atomic_load_explicit(&record->awaits, order),
            .step = atomic_load_explicit(&record->step, order),
            .failed = !(left & TAG) && left & 1,
        };
        atomic_thread_fence(memory_order_acquire);
        found += atomic_load_explicit(&record->word, order) == word;
    }
    return found;
}
