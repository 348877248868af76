/* The kernels for one instruction set. Included by reduce.c once per set, with
 *   KERNEL(name)  the name with the set's suffix        TARGET  the function attribute
 *   HALF_LOAD / HALF_STORE  whether the set converts f16 in hardware (F16C)
 *
 * Element i is added in the order of the inputs whatever the set and the block, so all sets agree bit for
 * bit. Blocks keep the partial sums in the first-level cache when there are more than two inputs. */

#define BLOCK 1024u

#define SAME_TYPE_SUM(name, type)                                                                       \
    TARGET static void KERNEL(name)(void *dst_, const void *const *in, uint32_t n, size_t count)         \
    {                                                                                                   \
        type *restrict dst = dst_;                                                                      \
        for (size_t at = 0; at < count; at += BLOCK) {                                                  \
            const size_t length = count - at < BLOCK ? count - at : BLOCK;                              \
            const type *restrict a = (const type *)in[0] + at;                                          \
            const type *restrict b = (const type *)in[n > 1 ? 1 : 0] + at;                              \
            type *restrict d = dst + at;                                                                \
            if (n == 1)                                                                                 \
                memcpy(d, a, length * sizeof *d);                                                       \
            else                                                                                        \
                for (size_t i = 0; i < length; i++)                                                     \
                    d[i] = a[i] + b[i];                                                                 \
            for (uint32_t k = 2; k < n; k++) {                                                          \
                const type *restrict c = (const type *)in[k] + at;                                      \
                for (size_t i = 0; i < length; i++)                                                     \
                    d[i] += c[i];                                                                       \
            }                                                                                           \
        }                                                                                               \
    }

SAME_TYPE_SUM(sum_f32, float)
SAME_TYPE_SUM(sum_f64, double)
/* Unsigned, because torch's integers wrap around and C's signed ones must not. */
SAME_TYPE_SUM(sum_i32, uint32_t)
SAME_TYPE_SUM(sum_i64, uint64_t)

TARGET static void KERNEL(bf16_to_f32)(float *dst, const uint16_t *src, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = (uint32_t)src[i] << 16;
        memcpy(&dst[i], &bits, sizeof bits);
    }
}

TARGET static void KERNEL(f32_to_bf16)(uint16_t *dst, const float *src, size_t count)
{
    for (size_t i = 0; i < count; i++)
        dst[i] = f32_to_bf16(src[i]);
}

TARGET static void KERNEL(f16_to_f32)(float *dst, const uint16_t *src, size_t count)
{
    size_t i = 0;
#if HARDWARE_F16
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + i))));
#endif
    for (; i < count; i++)
        dst[i] = f16_to_f32(src[i]);
}

TARGET static void KERNEL(f32_to_f16)(uint16_t *dst, const float *src, size_t count)
{
    size_t i = 0;
#if HARDWARE_F16
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(dst + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < count; i++)
        dst[i] = f32_to_f16(src[i]);
}

#define WIDENED_SUM(name, widen, narrow)                                                                \
    TARGET static void KERNEL(name)(void *dst_, const void *const *in, uint32_t n, size_t count)         \
    {                                                                                                   \
        float sum[BLOCK], term[BLOCK];                                                                  \
        uint16_t *dst = dst_;                                                                           \
        for (size_t at = 0; at < count; at += BLOCK) {                                                  \
            const size_t length = count - at < BLOCK ? count - at : BLOCK;                              \
            KERNEL(widen)(sum, (const uint16_t *)in[0] + at, length);                                   \
            for (uint32_t k = 1; k < n; k++) {                                                          \
                KERNEL(widen)(term, (const uint16_t *)in[k] + at, length);                              \
                for (size_t i = 0; i < length; i++)                                                     \
                    sum[i] += term[i];                                                                  \
            }                                                                                           \
            KERNEL(narrow)(dst + at, sum, length);                                                      \
        }                                                                                               \
    }

WIDENED_SUM(sum_f16, f16_to_f32, f32_to_f16)
WIDENED_SUM(sum_bf16, bf16_to_f32, f32_to_bf16)

#undef SAME_TYPE_SUM
#undef WIDENED_SUM
#undef BLOCK
