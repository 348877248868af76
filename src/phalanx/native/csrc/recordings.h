/* The flight recorders of other processes of this host, held so that they can be read when a process is gone.
 *
 * A recorder lies in a file without a name, which goes with its process unless somebody else has it. Each is mapped once
 * in this process, however many groups hold it. */
#ifndef PHALANX_RECORDINGS_H
#define PHALANX_RECORDINGS_H

#include <stdint.h>

/* Hold the recorder of a living process: the file that it has open as `fd`, from `at` on. NULL if it cannot be mapped. */
const char *phx_recording_hold(uint32_t pid, uint64_t start_time, int fd, uint64_t at);

/* Release what that returned, which may be NULL. */
void phx_recording_release(const char *memory);

#endif
