/* The choice of the reduction kernel for this CPU, made at run time, and the scalar conversions that all sets share. */
#include "collectives/kernels.h"

#include <string.h>

#include "phalanx.h"
#include "segment/copy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

static inline uint16_t f32_to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0x7fc0; /* a NaN must not round up to infinity */
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static inline float bf16_to_f32(uint16_t half)
{
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#if defined(__aarch64__) /* converts in hardware */
static inline float f16_to_f32(uint16_t half)
{
    __fp16 value;
    memcpy(&value, &half, sizeof value);
    return value;
}

static inline uint16_t f32_to_f16(float value)
{
    const __fp16 rounded = (__fp16)value;
    uint16_t half;
    memcpy(&half, &rounded, sizeof half);
    return half;
}
#else
static inline float f16_to_f32(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7fffu;
    uint32_t bits;
    float value;
    if (magnitude >= 0x7c00u)
        bits = sign | 0x7f800000u | (magnitude & 0x3ffu) << 13 | (magnitude > 0x7c00u ? 0x400000u : 0u);
    else if (magnitude >= 0x400u)
        bits = sign | ((magnitude << 13) + ((127u - 15u) << 23));
    else {
        value = (float)magnitude * 0x1p-24f; /* subnormal: exact in 32 bits */
        memcpy(&bits, &value, sizeof bits);
        bits |= sign;
    }
    memcpy(&value, &bits, sizeof bits);
    return value;
}

static inline uint16_t f32_to_f16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | (bits >> 13 & 0x3ffu));
    if (bits >= 0x477ff000u) /* rounds to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (bits < 0x38800000u) { /* subnormal: adding 0.5 leaves the rounded result in the low bits */
        float shifted;
        memcpy(&shifted, &bits, sizeof bits);
        shifted += 0.5f;
        memcpy(&bits, &shifted, sizeof bits);
        return (uint16_t)(sign | (bits - 0x3f000000u));
    }
    return (uint16_t)(sign | ((bits - ((127u - 15u) << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13));
}
#endif

#define KERNEL(name) name##_baseline
#define TARGET
#define LANES 0
#include "collectives/kernels_set.h"

#if defined(__x86_64__)
#define KERNEL(name) name##_avx2
#define TARGET __attribute__((target("avx2,f16c")))
#define LANES 8
#include "collectives/kernels_set.h"

#define KERNEL(name) name##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx2,f16c")))
#define LANES 16
#include "collectives/kernels_set.h"
#endif

phx_reduce_fn phx_reduce_kernel(uint32_t op, uint32_t dtype)
{
    if (op >= PHX_OPS || dtype >= PHX_DTYPES)
        return NULL;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return table_avx512[op][dtype];
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
        return table_avx2[op][dtype];
#endif
    return table_baseline[op][dtype];
}

size_t phx_dtype_bytes(uint32_t dtype)
{
    static const size_t bytes[PHX_DTYPES] = {
        [PHX_BYTES] = 1, [PHX_F32] = 4, [PHX_F64] = 8, [PHX_F16] = 2, [PHX_BF16] = 2, [PHX_U8] = 1,  [PHX_U16] = 2,
        [PHX_U32] = 4,   [PHX_U64] = 8, [PHX_I8] = 1,  [PHX_I16] = 2, [PHX_I32] = 4,  [PHX_I64] = 8, [PHX_BOOL] = 1,
    };
    return dtype < PHX_DTYPES ? bytes[dtype] : 0;
}

int phx_combine(const void *const *ins, uint32_t nins, void *out, uint64_t count, uint32_t dtype, uint32_t op)
{
    const phx_reduce_fn kernel = phx_reduce_kernel(op, dtype);
    if (!kernel || !nins)
        return PHX_BAD_ARGUMENT;
    kernel(out, ins, nins, count);
    if (phx_tracer)
        phx_tracer(PHX_COMBINED, nins, out, count * phx_dtype_bytes(dtype));
    return PHX_OK;
}
