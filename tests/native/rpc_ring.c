/* A ring between two threads: every record arrives whole and in order, also where the counters pass 2^32 and 2^64, and a
 * ring whose file has no memory left says so. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "rpc/ring.h"

#define RECORDS 8000u

static struct phx_rpc_ring ring;
static struct phx_rpc_end_of_ring out, in;

static uint64_t size_of(uint32_t number)
{
    uint64_t state = number * 0x9e3779b97f4a7c15ull + 1;
    state ^= state >> 29;
    return number % 31 == 0 ? out.bytes / 2 - sizeof(struct phx_rpc_record) - state % 64 : state % 200;
}

static void *send_all(void *unused)
{
    for (uint32_t number = 0; number < RECORDS; number++) {
        const uint64_t nbytes = size_of(number);
        for (;;) {
            const uint64_t taken = atomic_load_explicit(&ring.tail, memory_order_acquire);
            char *place = phx_rpc_reserve(&out, PHX_RPC_IMAGE, nbytes);
            CHECK(place || !out.no_memory);
            if (place) {
                CHECK((uintptr_t)place % 16 == 0 && place >= out.data && place + nbytes <= out.data + out.bytes);
                memset(place, (int)number, nbytes);
                phx_rpc_publish(&out, nbytes);
                break;
            }
            phx_sleep(phx_low_half(&ring.tail), (uint32_t)taken, &ring.waiting);
        }
    }
    return unused;
}

static void receive_all(void)
{
    for (uint32_t number = 0; number < RECORDS;) {
        struct phx_rpc_record record;
        const char *bytes;
        const int there = phx_rpc_peek(&in, &record, &bytes);
        CHECK(there >= 0);
        if (!there) {
            usleep(1);
            continue;
        }
        CHECK(record.type == PHX_RPC_IMAGE && record.nbytes == size_of(number));
        for (uint64_t i = 0; i < record.nbytes; i++)
            CHECK(bytes[i] == (char)number);
        phx_rpc_advance(&in, phx_rpc_takes(record.nbytes));
        number++;
    }
    CHECK(!phx_rpc_waiting(&in));
}

static char *file_of(uint64_t nbytes, uint64_t mapped)
{
    const int fd = memfd_create("phalanx-test", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)nbytes) == 0);
    char *data = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(data != MAP_FAILED);
    close(fd);
    return data;
}

static void pass(uint64_t bytes, uint64_t start)
{
    ring.head = ring.tail = start;
    out = in = (struct phx_rpc_end_of_ring){
        .ring = &ring, .data = file_of(bytes, bytes), .bytes = bytes, .at = start, .seen = start};
    pthread_t sender;
    CHECK(pthread_create(&sender, NULL, send_all, NULL) == 0);
    receive_all();
    pthread_join(sender, NULL);
    munmap(out.data, bytes);
}

static void without_memory(void)
{
    const uint64_t bytes = PHX_RPC_RING_BYTES, there = 8 * PHX_RPC_LARGEST_PAGE / 4;
    ring.head = ring.tail = 0;
    out = (struct phx_rpc_end_of_ring){.ring = &ring, .data = file_of(there, bytes), .bytes = bytes};
    uint64_t sent = 0;
    void *place;
    while ((place = phx_rpc_reserve(&out, PHX_RPC_IMAGE, 1000))) {
        memset(place, 1, 1000);
        phx_rpc_publish(&out, 1000);
        sent++;
    }
    CHECK(out.no_memory && sent && sent * 1024 <= there);
    munmap(out.data, bytes);
}

int main(void)
{
    pass(4096, 0);
    pass(PHX_RPC_RING_BYTES, 0);
    pass(4096, (1ull << 32) - 64 * 4096);
    pass(PHX_RPC_RING_BYTES, (1ull << 32) - (1 << 26) + 48);
    pass(4096, -64ull * 4096 + 16);
    without_memory();
    return 0;
}
