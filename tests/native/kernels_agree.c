/* The kernels of every instruction set this CPU has must give the same bits: every operation of every dtype, on NaNs,
 * infinities, subnormals, zeros of both signs and ordinary numbers, at odd lengths and at addresses that are not
 * aligned to a vector. A NaN must be a NaN in both, but the compiler chooses which of several NaNs passes its payload
 * on, as everywhere in torch. This file includes the kernels, since the core itself offers only those of this CPU. */
#include <stdio.h>
#include <stdlib.h>

#include "collectives/kernels.c"

phx_tracer_fn phx_tracer; /* the core's is in segment.c */

#define MOST 2100u
#define INPUTS 5

static uint64_t state = 12345;

static uint64_t draw(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * 0x2545f4914f6cdd1dull;
}

/* Bits of one element: often a special value, else anything at all, which as a float may be a NaN with any payload. */
static uint64_t bits_for(uint32_t dtype)
{
    static const uint64_t f64[] = {0,           1ull << 63,           1,           0x000fffffffffffffull,
                                   0x7ffull << 52, 0xfffull << 52, 0x7ff8ull << 48, 0xfff8ull << 48,
                                   0x7ff0000000000001ull, 0x7fefffffffffffffull, 0x3ff0ull << 48, 0xbff0ull << 48};
    static const uint64_t f32[] = {0,          0x80000000, 1,          0x007fffff, 0x7f800000, 0xff800000,
                                   0x7fc00000, 0xffc00000, 0x7f800001, 0x7f7fffff, 0x3f800000, 0xbf800000};
    static const uint64_t f16[] = {0,      0x8000, 1,      0x03ff, 0x7c00, 0xfc00,
                                   0x7e00, 0xfe00, 0x7c01, 0x7bff, 0x3c00, 0xbc00};
    static const uint64_t bf16[] = {0,      0x8000, 1,      0x007f, 0x7f80, 0xff80,
                                    0x7fc0, 0xffc0, 0x7f81, 0x7f7f, 0x3f80, 0xbf80};
    const uint64_t *special = dtype == PHX_F64 ? f64 : dtype == PHX_F32 ? f32 : dtype == PHX_F16 ? f16 : bf16;
    const uint64_t number = draw();
    if (dtype == PHX_BOOL)
        return number >> 40 & 1;
    return number >> 61 == 0 && dtype <= PHX_BF16 ? special[(number >> 8) % 12] : number >> 3;
}

static int is_nan(uint32_t dtype, const char *element)
{
    float f;
    double d;
    uint16_t half;
    memcpy(&half, element, sizeof half);
    switch (dtype) {
    case PHX_F32:
        memcpy(&f, element, sizeof f);
        return f != f;
    case PHX_F64:
        memcpy(&d, element, sizeof d);
        return d != d;
    case PHX_F16:
        return (half & 0x7fff) > 0x7c00;
    case PHX_BF16:
        return (half & 0x7fff) > 0x7f80;
    default:
        return 0;
    }
}

typedef const phx_reduce_fn (*set)[PHX_DTYPES];

static int differ(set wide, uint32_t op, uint32_t dtype, uint32_t inputs, size_t count, size_t shift)
{
    static char in[INPUTS][(MOST + 8) * 8], first[(MOST + 8) * 8], second[(MOST + 8) * 8];
    const size_t element = phx_dtype_bytes(dtype);
    const void *ins[INPUTS];
    for (uint32_t k = 0; k < inputs; k++) {
        char *data = in[k] + (shift + k) % 5 * element;
        for (size_t i = 0; i < count; i++) {
            const uint64_t bits = bits_for(dtype);
            memcpy(data + i * element, &bits, element);
        }
        ins[k] = data;
    }
    const phx_reduce_fn other = wide[op][dtype];
    if (!table_baseline[op][dtype] != !other)
        return 1;
    if (!other)
        return 0;
    table_baseline[op][dtype](first + shift * element, ins, inputs, count);
    other(second + shift * element, ins, inputs, count);
    for (size_t at = 0; at < count; at++) {
        const char *one = first + (shift + at) * element, *two = second + (shift + at) * element;
        if (memcmp(one, two, element) != 0 && !(is_nan(dtype, one) && is_nan(dtype, two))) {
            fprintf(stderr, "op %u, dtype %u, %u inputs, element %zu of %zu, shift %zu:", op, dtype, inputs, at, count,
                    shift);
            for (int k = -2; k < (int)inputs; k++) {
                uint64_t bits = 0;
                memcpy(&bits, k == -2 ? one : k == -1 ? two : (const char *)ins[k] + at * element, element);
                fprintf(stderr, " %s%llx", k == -2 ? "baseline " : k == -1 ? "wide " : "", (unsigned long long)bits);
            }
            fprintf(stderr, "\n");
            return 1;
        }
    }
    return 0;
}

static int check(const char *name, set wide)
{
    static const size_t counts[] = {0, 1, 2, 3, 7, 8, 9, 15, 17, 31, 33, 63, 65, 1023, 1024, 1025, MOST};
    int bad = 0;
    for (uint32_t op = PHX_SUM; op < PHX_OPS; op++)
        for (uint32_t dtype = PHX_F32; dtype < PHX_DTYPES; dtype++)
            for (uint32_t inputs = 1, wrong = 0; inputs <= INPUTS && !wrong; inputs++)
                for (size_t c = 0; c < sizeof counts / sizeof *counts && !wrong; c++)
                    for (size_t shift = 0; shift < 4 && !wrong; shift++)
                        bad |= wrong = (uint32_t)differ(wide, op, dtype, inputs, counts[c], shift);
    printf("%s: %s\n", name, bad ? "DIFFERS" : "agrees");
    return bad;
}

int main(void)
{
    int bad = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
        bad |= check("avx2", table_avx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        bad |= check("avx512", table_avx512);
#endif
    return bad;
}
