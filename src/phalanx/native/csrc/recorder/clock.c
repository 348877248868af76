/* Learning how the processor's counter runs beside the clock. */
#define _GNU_SOURCE
#include "recorder/clock.h"

#include <fcntl.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "system/futex.h"

#define MEASURED_NS 1000000ull  /* the shortest time in which the rate is measured: exact to some millionths then */
#define FORGOTTEN_NS 1000000000ull /* and the longest */
#define UNDISTURBED 1000u       /* in how many counts the clock is read, if nothing comes between */

__thread __attribute__((tls_model("initial-exec"))) struct phx_clock phx_clock;
#if defined(__x86_64__)
static int usable; /* written before this process has a group */

void phx_clock_open(void)
{
    char source[4] = "";
    int mode = 0;
    const int file = open("/sys/devices/system/clocksource/clocksource0/current_clocksource", O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return;
    /* The kernel itself uses it, and this process may: a debugger that replays forbids that. */
    usable = read(file, source, sizeof source) == sizeof source && !memcmp(source, "tsc\n", sizeof source) &&
             !prctl(PR_GET_TSC, &mode) && mode == PR_TSC_ENABLE;
    close(file);
}

/* Measure the rate from the moment before to this one, if it is time. */
static void measure(struct phx_clock *clock, uint64_t count, uint64_t ns)
{
    const uint64_t passed = ns - clock->since_ns, counts = count - clock->since_count;
    if (passed < MEASURED_NS)
        return;
    if (passed < FORGOTTEN_NS && counts > passed / 4 && counts < passed * 64)
        clock->rate = (passed << 32) / counts;
    clock->since_ns = ns;
    clock->since_count = count;
}

uint64_t phx_clock_ask(void)
{
    if (!usable)
        return phx_now_ns();
    struct phx_clock *clock = &phx_clock;
    const uint64_t before = __builtin_ia32_rdtsc(), ns = phx_now_ns(), took = __builtin_ia32_rdtsc() - before;
    clock->valid = 0;
    if (took > UNDISTURBED) /* which of the counts belongs to the time is not known */
        return ns;
    clock->count = before + took / 2;
    clock->ns = ns;
    measure(clock, clock->count, ns);
    if (clock->rate)
        clock->valid = (PHX_CLOCK_NS << 32) / clock->rate;
    return ns;
}
#else
void phx_clock_open(void)
{
}

uint64_t phx_clock_ask(void)
{
    return phx_now_ns();
}
#endif
