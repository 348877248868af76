/* Combining several inputs element by element, in their order. Numbers are combined nowhere else in the core. */
#ifndef PHALANX_KERNELS_H
#define PHALANX_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* dst[i] = inputs[0][i] op inputs[1][i] op ..., for `count` elements. dst overlaps no input. 16-bit floats
 * accumulate in 32 bits and are rounded once, to nearest even; averages divide before that rounding. */
typedef void (*phx_reduce_fn)(void *dst, const void *const *inputs, uint32_t ninputs, size_t count);

/* The kernel for this CPU, or NULL for a pair that has no meaning (bitwise operations on floats). */
phx_reduce_fn phx_reduce_kernel(uint32_t op, uint32_t dtype);

/* Bytes per element, 0 for an unknown dtype. */
size_t phx_dtype_bytes(uint32_t dtype);

#endif
