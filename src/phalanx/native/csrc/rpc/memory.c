#define _GNU_SOURCE
#include "rpc/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u
#endif

int phx_rpc_make_file(uint64_t nbytes)
{
    /* Some systems refuse memory that could be executed (vm.memfd_noexec); kernels before 6.3 do not know the flag. */
    int fd = memfd_create("phalanx-rpc", MFD_CLOEXEC | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL)
        fd = memfd_create("phalanx-rpc", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return -1;
    if (ftruncate(fd, (off_t)nbytes) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        return fd;
    const int reason = errno;
    close(fd);
    errno = reason;
    return -1;
}

int phx_rpc_open_file(uint32_t pid, int number)
{
    char path[48];
    struct stat file;
    snprintf(path, sizeof path, "/proc/%u/fd/%d", pid, number);
    /* The number may belong to another file by now. A descriptor of O_PATH shows what it is without opening it, and
     * stays at that file. */
    const int seen = open(path, O_PATH | O_CLOEXEC);
    if (seen < 0)
        return -1;
    int fd = -1;
    errno = EPROTO;
    if (fstat(seen, &file) == 0 && S_ISREG(file.st_mode)) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", seen);
        fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    }
    int reason = errno;
    close(seen);
    const int seals = fd < 0 ? -1 : fcntl(fd, F_GET_SEALS);
    if (fd >= 0 && (seals < 0 || !(seals & F_SEAL_SHRINK))) {
        close(fd);
        fd = -1;
        reason = EPROTO;
    }
    errno = reason;
    return fd;
}

int phx_rpc_back(void *data, uint64_t nbytes)
{
    return madvise(data, nbytes, MADV_POPULATE_WRITE) == 0 || (errno != EFAULT && errno != ENOMEM);
}

int phx_rpc_changed(int pagemap, uint64_t where, uint64_t nbytes)
{
    const uint64_t in_ram = 1ull << 63, swapped = 1ull << 62, of_file = 1ull << 61;
    const uint64_t page = phx_rpc_page_bytes(), end = (where + nbytes + page - 1) / page;
    uint64_t entries[512];
    for (uint64_t at = where / page; at < end;) {
        const uint64_t count = end - at < 512 ? end - at : 512;
        if (pread(pagemap, entries, count * 8, (off_t)(at * 8)) != (ssize_t)(count * 8))
            return 1;
        for (uint64_t i = 0; i < count; i++)
            if ((entries[i] & swapped) || ((entries[i] & in_ram) && !(entries[i] & of_file)))
                return 1;
        at += count;
    }
    return 0;
}

uint64_t phx_rpc_page_bytes(void)
{
    static _Atomic uint64_t known; /* the same value, whichever thread writes it */
    uint64_t bytes = known;
    if (!bytes)
        known = bytes = (uint64_t)sysconf(_SC_PAGESIZE);
    return bytes;
}
