/* The flight recorders of other processes of this host, held so that they can be read when a process is gone.
 *
 * A recorder lies in a file without a name, which goes with its process unless somebody else has it. Each is mapped once
 * in this process, however many groups hold it. */
#ifndef PHALANX_RECORDINGS_H
#define PHALANX_RECORDINGS_H

#include <stdint.h>

/* Where a process keeps its recorder.
 *   fd             its descriptor of the file, -1 without a recorder
 *   at             where in the file the recorder begins
 *   device, inode  which file that is: the program may close the descriptor, and its number may become another file's */
struct phx_recorder_file {
    int32_t fd;
    uint64_t at, device, inode;
};

/* Hold the recorder of a living process. NULL if it cannot be mapped, or the descriptor is another file's by now. */
const char *phx_recording_hold(uint32_t pid, uint64_t start_time, const struct phx_recorder_file *place);

/* Release what that returned, which may be NULL. */
void phx_recording_release(const char *memory);

#endif
