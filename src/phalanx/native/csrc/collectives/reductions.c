/* All-reduce, reduce and reduce-scatter in shared memory; on every path the result is taken in rank order.
 *
 * Small (at most small_bytes over all ranks): every rank puts in its whole input, waits for the others and combines all
 * slots. One synchronisation; p * n bytes read per rank (by the root alone for a reduce).
 *
 * Large, chunk by chunk (the reduce-scatter and all-gather of Rabenseifner 2004, without its messages): rank r is the
 * only one to reduce slice r. It puts in only what the others reduce, combines slice r of the others' slots with its
 * own input, leaves the result in its slot and its output, and copies out the others' slices (for a reduce only the
 * root does). Two synchronisations per chunk; each rank copies 2 (p-1)/p * n bytes and reads n while reducing.
 *
 * A tensor in shared memory (phx_share_memory()) stays where it is: the others read it there instead of in its rank's
 * slots, and its rank leaves slice r in it. Each rank decides that for its own tensor, and `tensor` in its place tells
 * the others. Such a call has one more synchronisation at its end, since others may still be reading.
 *
 * Reduce-scatter: every rank puts the blocks of the others into its slot, a share each, and reduces its own block from
 * its input and the others' slots. One synchronisation per piece; each rank copies (p-1) * n bytes in and reads p *
 * n. */
#include "collectives/kernels.h"
#include "collectives/pipeline.h"

#define BLOCK 8192u /* bytes reduced before they are copied to the output: still in the first-level cache */

struct reduction {
    const char *in;         /* of a reduce-scatter the rank's own block */
    char *out;              /* NULL on ranks that do not get the result */
    uint64_t nbytes;
    phx_reduce_fn reduce;
    size_t element;
    const void *const *ins; /* of a reduce-scatter: a block for each rank */
};

/* -- small ------------------------------------------------------------------------------------------------------ */

static void put_whole(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct reduction *call = job;
    (void)i;
    phx_copy_in(comm, phx_slot(comm, comm->rank, chunk), call->in, call->nbytes);
}

static int reduce_whole(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct reduction *call = job;
    (void)i;
    if (!call->out)
        return PHX_OK;
    const int status = phx_wait_all_ready(comm, chunk);
    if (status)
        return status;
    for (uint32_t p = 0; p < comm->size; p++)
        comm->inputs[p] = phx_slot(comm, p, chunk);
    call->reduce(call->out, comm->inputs, comm->size, call->nbytes / call->element);
    for (uint32_t p = 0; p < comm->size; p++)
        phx_moved(comm, PHX_ADDED, phx_slot(comm, p, chunk), call->nbytes);
    return PHX_OK;
}

/* -- large ------------------------------------------------------------------------------------------------------ */

/* Publish with the call's first chunk where this rank's tensor lies. */
static void publish_tensor(phx_comm *comm, const struct reduction *call, uint64_t chunk)
{
    uint64_t *place = &comm->places[comm->rank].tensor[chunk % PHX_SLOTS];
    *place = 0;
    /* Data of one chunk goes through slots: that takes no second synchronisation. */
    const int may_stay = call->in == call->out && call->nbytes > comm->chunk_bytes;
    for (uint64_t k = 0; k < comm->nshared && may_stay; k++) {
        const struct phx_memory *memory = &comm->shared[k];
        if (call->in >= memory->base && call->in + call->nbytes <= memory->base + memory->nbytes)
            *place = (k + 1) << PHX_OFFSET_BITS | (uint64_t)(call->in - memory->base);
    }
    comm->tensors[comm->rank] = *place ? call->in : NULL;
}

/* Read where the others' tensors lie, after they have published the call's first chunk. */
static void find_tensors(phx_comm *comm, uint64_t chunk)
{
    for (uint32_t p = 0; p < comm->size; p++) {
        const uint64_t place = comm->places[p].tensor[chunk % PHX_SLOTS], offset = place << (64 - PHX_OFFSET_BITS);
        if (p != comm->rank)
            comm->tensors[p] =
                place ? comm->shared[(place >> PHX_OFFSET_BITS) - 1].base + (offset >> (64 - PHX_OFFSET_BITS)) : NULL;
    }
}

/* Return where rank p has the piece of the call that begins at `at`. */
static const char *piece_of(const phx_comm *comm, uint32_t p, uint64_t at, uint64_t chunk)
{
    return comm->tensors[p] ? comm->tensors[p] + at : phx_slot(comm, p, chunk);
}

/* After the last piece: wait until nobody reads a tensor any more, if somebody did. Returns how many chunks that
 * took. */
static int end_reading(phx_comm *comm, uint64_t chunk, uint64_t call, uint64_t *chunks)
{
    for (uint32_t p = 0; p < comm->size; p++)
        *chunks |= comm->tensors[p] != NULL;
    if (!*chunks)
        return PHX_OK;
    const int status = phx_enter(comm, chunk, call);
    if (status)
        return status;
    phx_publish(comm, chunk);
    return phx_wait_all_ready(comm, chunk);
}

struct slice {
    uint64_t first, last; /* bytes within the chunk */
};

/* The slice of a chunk of `nbytes` that `rank` reduces: whole cache lines, so no two ranks write one. */
static struct slice slice_of(const phx_comm *comm, uint32_t rank, uint64_t nbytes)
{
    const uint64_t lines = (nbytes + PHX_LINE - 1) / PHX_LINE;
    const uint64_t first = lines * rank / comm->size * PHX_LINE;
    const uint64_t last = lines * (rank + 1) / comm->size * PHX_LINE;
    return (struct slice){first < nbytes ? first : nbytes, last < nbytes ? last : nbytes};
}

static void put_others_slices(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct reduction *call = job;
    const uint64_t at = i * comm->chunk_bytes, length = phx_piece(call->nbytes, at, comm->chunk_bytes);
    const struct slice mine = slice_of(comm, comm->rank, length);
    char *slot = phx_slot(comm, comm->rank, chunk);
    if (i == 0 && comm->nshared)
        publish_tensor(comm, call, chunk);
    if (comm->tensors[comm->rank])
        return;
    phx_copy_in(comm, slot, call->in + at, mine.first);
    phx_copy_in(comm, slot + mine.last, call->in + at + mine.last, length - mine.last);
}

static int reduce_own_slice(phx_comm *comm, const struct reduction *call, uint64_t at, uint64_t length, uint64_t chunk)
{
    const struct slice mine = slice_of(comm, comm->rank, length);
    char *slot = phx_slot(comm, comm->rank, chunk), block_of_sums[BLOCK];
    const int status = phx_wait_all_ready(comm, chunk);
    if (status)
        return status;
    if (at == 0 && comm->nshared)
        find_tensors(comm, chunk);
    for (uint64_t b = mine.first; b < mine.last; b += BLOCK) {
        const uint64_t block = phx_piece(mine.last, b, BLOCK);
        char *sums = comm->tensors[comm->rank] ? block_of_sums : slot + b; /* they must not overwrite an input */
        for (uint32_t p = 0; p < comm->size; p++)
            comm->inputs[p] = p == comm->rank ? call->in + at + b : piece_of(comm, p, at, chunk) + b;
        call->reduce(sums, comm->inputs, comm->size, block / call->element);
        if (call->out)
            memcpy(call->out + at + b, sums, block);
    }
    for (uint32_t p = 0; p < comm->size; p++)
        if (p != comm->rank)
            phx_moved(comm, PHX_ADDED, phx_slot(comm, p, chunk) + mine.first, mine.last - mine.first);
    phx_moved(comm, PHX_PUT, slot + mine.first, mine.last - mine.first);
    phx_raise(comm, &comm->flags[comm->rank].done, chunk + 1);
    return PHX_OK;
}

static int copy_others_slices(phx_comm *comm, const struct reduction *call, uint64_t at, uint64_t length, uint64_t chunk)
{
    /* Each rank starts with the one after it, so that they do not all read the same slot at once. */
    for (uint32_t n = 1; n < comm->size; n++) {
        const uint32_t p = (comm->rank + n) % comm->size;
        const int status = phx_wait(comm, p, &comm->flags[p].done, chunk + 1);
        if (status)
            return status;
        const struct slice theirs = slice_of(comm, p, length);
        memcpy(call->out + at + theirs.first, piece_of(comm, p, at, chunk) + theirs.first, theirs.last - theirs.first);
        phx_moved(comm, PHX_TAKEN, phx_slot(comm, p, chunk) + theirs.first, theirs.last - theirs.first);
    }
    return PHX_OK;
}

static int reduce_and_copy_slices(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct reduction *call = job;
    const uint64_t at = i * comm->chunk_bytes, length = phx_piece(call->nbytes, at, comm->chunk_bytes);
    const int status = reduce_own_slice(comm, call, at, length, chunk);
    return status || !call->out ? status : copy_others_slices(comm, call, at, length, chunk);
}

/* -- reduce-scatter ------------------------------------------------------------------------------------------------ */

static void put_others_blocks(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct reduction *call = job;
    const uint64_t step = phx_share(comm), at = i * step, length = phx_piece(call->nbytes, at, step);
    for (uint32_t p = 0; p < comm->size; p++)
        if (p != comm->rank)
            phx_copy_in(comm, phx_share_at(comm, comm->rank, p, chunk, step), (const char *)call->ins[p] + at, length);
}

static int reduce_own_block(phx_comm *comm, void *job, uint64_t i, uint64_t chunk)
{
    const struct reduction *call = job;
    const uint64_t step = phx_share(comm), at = i * step, length = phx_piece(call->nbytes, at, step);
    char result[BLOCK]; /* the output may be the input's own block, which must stay whole until it is read */
    const int status = phx_wait_all_ready(comm, chunk);
    if (status)
        return status;
    for (uint64_t b = 0; b < length; b += BLOCK) {
        const uint64_t block = phx_piece(length, b, BLOCK);
        for (uint32_t p = 0; p < comm->size; p++)
            comm->inputs[p] = p == comm->rank ? call->in + at + b : phx_share_at(comm, p, comm->rank, chunk, step) + b;
        call->reduce(result, comm->inputs, comm->size, block / call->element);
        memcpy(call->out + at + b, result, block);
    }
    for (uint32_t p = 0; p < comm->size; p++)
        if (p != comm->rank)
            phx_moved(comm, PHX_ADDED, phx_share_at(comm, p, comm->rank, chunk, step), length);
    return PHX_OK;
}

/* -- calls ------------------------------------------------------------------------------------------------------ */

static int reduce(phx_comm *comm, const void *in, void *out, uint64_t count, uint32_t dtype, uint32_t op, uint64_t call)
{
    const struct phx_steps small = {put_whole, reduce_whole};
    const struct phx_steps large = {put_others_slices, reduce_and_copy_slices};
    const size_t element = phx_dtype_bytes(dtype);
    struct reduction job = {in, out, count * element, phx_reduce_kernel(op, dtype), element, NULL};
    if (!job.reduce || phx_lacks_memory(in, job.nbytes))
        return PHX_BAD_ARGUMENT;
    if (comm->size == 1 && out != in)
        memcpy(out, in, job.nbytes);
    if (job.nbytes * comm->size <= comm->small_bytes && job.nbytes <= comm->chunk_bytes)
        return phx_pass_call(comm, 1, call, small, &job);
    const uint64_t pieces = phx_pieces(job.nbytes, comm->chunk_bytes);
    int status = phx_pass_pieces(comm, comm->chunk, pieces, call, large, &job);
    uint64_t last = 0;
    if (!status)
        status = end_reading(comm, comm->chunk + pieces, call, &last);
    if (status)
        return status;
    comm->chunk += pieces + last;
    return phx_done(comm);
}

int phx_all_reduce(phx_comm *comm, const void *in, void *out, uint64_t count, uint32_t dtype, uint32_t op,
                   uint64_t shape)
{
    if (phx_lacks_memory(out, count))
        return PHX_BAD_ARGUMENT;
    return reduce(comm, in, out, count, dtype, op, phx_call(PHX_ALL_REDUCE, dtype, op, 0, count, shape));
}

int phx_reduce(phx_comm *comm, const void *in, void *out, uint64_t count, uint32_t dtype, uint32_t op, uint32_t root,
               uint64_t shape)
{
    if (root >= comm->size || (comm->rank == root && phx_lacks_memory(out, count)))
        return PHX_BAD_ARGUMENT;
    const uint64_t call = phx_call(PHX_REDUCE, dtype, op, root, count, shape);
    return reduce(comm, in, comm->rank == root ? out : NULL, count, dtype, op, call);
}

int phx_reduce_scatter(phx_comm *comm, const void *const *ins, void *out, uint64_t count, uint32_t dtype, uint32_t op,
                       uint64_t shape)
{
    const struct phx_steps steps = {put_others_blocks, reduce_own_block};
    const size_t element = phx_dtype_bytes(dtype);
    struct reduction job = {ins[comm->rank], out, count * element, phx_reduce_kernel(op, dtype), element, ins};
    if (!job.reduce || phx_lacks_memory(out, count) || phx_any_lacks_memory(ins, comm->size, count))
        return PHX_BAD_ARGUMENT;
    if (comm->size == 1 && out != ins[0])
        memcpy(out, ins[0], job.nbytes);
    const uint64_t call = phx_call(PHX_REDUCE_SCATTER, dtype, op, 0, count, shape);
    return phx_pass_call(comm, phx_pieces(job.nbytes, phx_share(comm)), call, steps, &job);
}
