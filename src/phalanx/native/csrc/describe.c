/* What ranks tell each other once a group is broken. On the way there nobody pays for it: a call is one word. */
#include <string.h>

#include "segment.h"

void phx_describe(phx_comm *comm, const char *text)
{
    struct phx_place *place = &comm->places[comm->rank];
    uint32_t nothing = 0;
    if (!atomic_compare_exchange_strong(&place->told, &nothing, 1))
        return; /* the first thing told is the one that broke the group */
    strncpy(place->text, text, PHX_TEXT - 1);
    atomic_store_explicit(&place->told, 2, memory_order_release);
}

int phx_description(const phx_comm *comm, uint32_t rank, char *out)
{
    if (rank >= comm->size || atomic_load_explicit(&comm->places[rank].told, memory_order_acquire) != 2)
        return 0;
    memcpy(out, comm->places[rank].text, PHX_TEXT);
    return 1;
}

uint64_t phx_call_chunk(const phx_comm *comm)
{
    return comm->call_chunk;
}
