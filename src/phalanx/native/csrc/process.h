/* Whether the process that opened a place of the segment still runs. */
#ifndef PHALANX_PROCESS_H
#define PHALANX_PROCESS_H

#include "segment.h"

/* When a process started, in clock ticks since boot; 0 if there is no such process or it has ended (a zombie has). */
uint64_t phx_process_start_time(uint32_t pid);

/* Whether the process that opened this place still runs. A rank that cannot find out takes it to be alive. */
int phx_place_alive(const struct phx_place *place);

#endif
