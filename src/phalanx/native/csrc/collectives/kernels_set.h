/* The kernels for one instruction set. Included by kernels.c once per set, with
 *   KERNEL(name)   the name with the set's suffix        TARGET  the function attribute
 *   LANES          floats in one of its vectors, which then also convert f16 in hardware; 0 for plain C
 *
 * Every set combines element i in the order of the inputs, so all sets agree bit for bit. (The exception is the payload
 * of a NaN that results from several NaNs, which C leaves open.) Blocks keep the partial results in the first-level
 * cache when there are more than two inputs. */

#define BLOCK 1024u

#define SAME_TYPE(name, type, COMBINE, FINISH)                                                          \
    TARGET static void KERNEL(name)(void *dst_, const void *const *in, uint32_t n, size_t count)         \
    {                                                                                                   \
        for (size_t at = 0; at < count; at += BLOCK) {                                                  \
            const size_t length = count - at < BLOCK ? count - at : BLOCK;                              \
            const type *restrict first = (const type *)in[0] + at;                                      \
            type *restrict dst = (type *)dst_ + at;                                                     \
            if (n == 1)                                                                                 \
                memcpy(dst, first, length * sizeof *dst);                                               \
            for (uint32_t k = 1; k < n; k++) {                                                          \
                const type *restrict next = (const type *)in[k] + at;                                   \
                if (k == 1)                                                                             \
                    for (size_t i = 0; i < length; i++) {                                               \
                        const type a = first[i], b = next[i];                                           \
                        dst[i] = COMBINE(a, b);                                                         \
                    }                                                                                   \
                else                                                                                    \
                    for (size_t i = 0; i < length; i++) {                                               \
                        const type a = dst[i], b = next[i];                                             \
                        dst[i] = COMBINE(a, b);                                                         \
                    }                                                                                   \
            }                                                                                           \
            FINISH(dst, length, n, type)                                                                \
        }                                                                                               \
    }

#define NOTHING(dst, length, n, type)
#define DIVIDE(dst, length, n, type)                                                                    \
    for (size_t i = 0; i < length; i++)                                                                 \
        dst[i] /= (type)n;

/* Integers are added and multiplied as unsigned: torch's wrap around, and in C that is undefined for signed ones. */
#define ADD(a, b) (a + b)
#define MULTIPLY(a, b) (a * b)
#define SMALLER(a, b) (b < a ? b : a)
#define LARGER(a, b) (a < b ? b : a)
#define BIT_AND(a, b) (a & b)
#define BIT_OR(a, b) (a | b)
#define BIT_XOR(a, b) (a ^ b)

#define FLOAT(suffix, type)                                                                             \
    SAME_TYPE(sum_##suffix, type, ADD, NOTHING)                                                         \
    SAME_TYPE(avg_##suffix, type, ADD, DIVIDE)                                                          \
    SAME_TYPE(product_##suffix, type, MULTIPLY, NOTHING)                                                \
    SAME_TYPE(min_##suffix, type, SMALLER, NOTHING)                                                     \
    SAME_TYPE(max_##suffix, type, LARGER, NOTHING)

#define UNSIGNED(suffix, type)                                                                          \
    SAME_TYPE(sum_##suffix, type, ADD, NOTHING)                                                         \
    SAME_TYPE(product_##suffix, type, MULTIPLY, NOTHING)                                                \
    SAME_TYPE(min_##suffix, type, SMALLER, NOTHING)                                                     \
    SAME_TYPE(max_##suffix, type, LARGER, NOTHING)                                                      \
    SAME_TYPE(band_##suffix, type, BIT_AND, NOTHING)                                                    \
    SAME_TYPE(bor_##suffix, type, BIT_OR, NOTHING)                                                      \
    SAME_TYPE(bxor_##suffix, type, BIT_XOR, NOTHING)

#define SIGNED(suffix, type)                                                                            \
    SAME_TYPE(min_##suffix, type, SMALLER, NOTHING)                                                     \
    SAME_TYPE(max_##suffix, type, LARGER, NOTHING)

FLOAT(f32, float)
FLOAT(f64, double)
UNSIGNED(u8, uint8_t)
UNSIGNED(u16, uint16_t)
UNSIGNED(u32, uint32_t)
UNSIGNED(u64, uint64_t)
SIGNED(i8, int8_t)
SIGNED(i16, int16_t)
SIGNED(i32, int32_t)
SIGNED(i64, int64_t)

/* 16-bit floats are widened, combined in registers and rounded once. A set with vectors takes LANES of f16 or twice as
 * many bf16 at a time and the rest one by one; both ways give the same bits. */
#if LANES == 8
#define VECTOR __m256
#define SELECT(mask, yes, no) _mm256_blendv_epi8((__m256i)(no), (__m256i)(yes), (__m256i)(mask))
#define V(operation) _mm256_##operation##_ps
#define LOAD_F16(from) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from)))
#define STORE_F16(to, value) _mm_storeu_si128((__m128i *)(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT))
#elif LANES == 16
#define VECTOR __m512
#define SELECT(mask, yes, no) _mm512_ternarylogic_epi32((__m512i)(mask), (__m512i)(yes), (__m512i)(no), 0xca)
#define V(operation) _mm512_##operation##_ps
#define LOAD_F16(from) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from)))
#define STORE_F16(to, value) _mm256_storeu_si256((__m256i *)(to), _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT))
#endif

#if LANES
typedef uint32_t KERNEL(bits) __attribute__((vector_size(4 * LANES)));

/* Two bf16 share 32 bits. The upper one is a float once the lower one's bits are cleared; the lower one is shifted. */
TARGET static inline void KERNEL(load_bf16)(const uint16_t *from, VECTOR *low, VECTOR *high)
{
    KERNEL(bits) both;
    memcpy(&both, from, sizeof both);
    *low = (VECTOR)(both << 16);
    *high = (VECTOR)(both & 0xffff0000u);
}

/* AVX512_BF16's own conversion is not used: it flushes subnormal numbers to zero, which the other sets do not. */
TARGET static inline KERNEL(bits) KERNEL(round_bf16)(VECTOR value)
{
    const KERNEL(bits) bits = (KERNEL(bits))value, is_nan = (KERNEL(bits))(value != value);
    const KERNEL(bits) nan = 0x7fc00000u - (KERNEL(bits)){0}, rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    return (KERNEL(bits))SELECT(is_nan, nan, rounded);
}

TARGET static inline void KERNEL(store_bf16)(uint16_t *to, VECTOR low, VECTOR high)
{
    const KERNEL(bits) upper = 0xffff0000u - (KERNEL(bits)){0};
    const KERNEL(bits) both = (KERNEL(bits))SELECT(upper, KERNEL(round_bf16)(high), KERNEL(round_bf16)(low) >> 16);
    memcpy(to, &both, sizeof both);
}

#define VECTORS_OF_F16(V_COMBINE, V_FINISH)                                                             \
    for (; i + LANES <= count; i += LANES) {                                                            \
        VECTOR a = LOAD_F16((const uint16_t *)in[0] + i);                                               \
        for (uint32_t k = 1; k < n; k++)                                                                \
            a = V_COMBINE(a, LOAD_F16((const uint16_t *)in[k] + i));                                    \
        STORE_F16(dst + i, V_FINISH(a, n));                                                             \
    }
#define VECTORS_OF_BF16(V_COMBINE, V_FINISH)                                                            \
    for (; i + 2 * LANES <= count; i += 2 * LANES) {                                                    \
        VECTOR low, high, next_low, next_high;                                                          \
        KERNEL(load_bf16)((const uint16_t *)in[0] + i, &low, &high);                                    \
        for (uint32_t k = 1; k < n; k++) {                                                              \
            KERNEL(load_bf16)((const uint16_t *)in[k] + i, &next_low, &next_high);                      \
            low = V_COMBINE(low, next_low);                                                             \
            high = V_COMBINE(high, next_high);                                                          \
        }                                                                                               \
        KERNEL(store_bf16)(dst + i, V_FINISH(low, n), V_FINISH(high, n));                               \
    }
#else
#define VECTORS_OF_F16(V_COMBINE, V_FINISH)
#define VECTORS_OF_BF16(V_COMBINE, V_FINISH)
#endif
#define V_ADD(a, b) (a + b)
#define V_MULTIPLY(a, b) (a * b)
#define V_DIVIDE(a, n) (a / (float)n)
/* minps and maxps give their second operand when one is a NaN, as SMALLER(a, b) and LARGER(a, b) give a. */
#define V_SMALLER(a, b) V(min)(b, a)
#define V_LARGER(a, b) V(max)(b, a)
#define V_NOTHING(a, n) a
#define NOTHING1(a, n) a
#define DIVIDE1(a, n) (a / (float)n)

#define WIDENED(name, suffix, VECTORS, COMBINE, FINISH)                                                 \
    TARGET static void KERNEL(name##_##suffix)(void *dst_, const void *const *in, uint32_t n, size_t count) \
    {                                                                                                   \
        uint16_t *restrict dst = dst_;                                                                  \
        size_t i = 0;                                                                                   \
        VECTORS(V_##COMBINE, V_##FINISH)                                                                \
        for (size_t length; i < count; i += length) {                                                   \
            float sums[BLOCK];                                                                          \
            length = count - i < BLOCK ? count - i : BLOCK;                                             \
            for (size_t j = 0; j < length; j++)                                                         \
                sums[j] = suffix##_to_f32(((const uint16_t *)in[0])[i + j]);                            \
            for (uint32_t k = 1; k < n; k++)                                                            \
                for (size_t j = 0; j < length; j++) {                                                   \
                    const float a = sums[j], b = suffix##_to_f32(((const uint16_t *)in[k])[i + j]);     \
                    sums[j] = COMBINE(a, b);                                                            \
                }                                                                                       \
            for (size_t j = 0; j < length; j++)                                                         \
                dst[i + j] = f32_to_##suffix(FINISH##1(sums[j], n));                                    \
        }                                                                                               \
    }

#define HALF(suffix, VECTORS)                                                                           \
    WIDENED(sum, suffix, VECTORS, ADD, NOTHING)                                                         \
    WIDENED(avg, suffix, VECTORS, ADD, DIVIDE)                                                          \
    WIDENED(product, suffix, VECTORS, MULTIPLY, NOTHING)                                                \
    WIDENED(min, suffix, VECTORS, SMALLER, NOTHING)                                                     \
    WIDENED(max, suffix, VECTORS, LARGER, NOTHING)

HALF(f16, VECTORS_OF_F16)
HALF(bf16, VECTORS_OF_BF16)

/* [operation][dtype]; a pair that is not listed is NULL. */
#define FLOATS_OF(op)                                                                                   \
    [PHX_F32] = KERNEL(op##_f32), [PHX_F64] = KERNEL(op##_f64), [PHX_F16] = KERNEL(op##_f16),            \
    [PHX_BF16] = KERNEL(op##_bf16)
#define UNSIGNED_OF(op)                                                                                 \
    [PHX_U8] = KERNEL(op##_u8), [PHX_U16] = KERNEL(op##_u16), [PHX_U32] = KERNEL(op##_u32),              \
    [PHX_U64] = KERNEL(op##_u64)
/* Where the sign does not matter. */
#define WRAPPING_OF(op)                                                                                 \
    UNSIGNED_OF(op), [PHX_I8] = KERNEL(op##_u8), [PHX_I16] = KERNEL(op##_u16), [PHX_I32] = KERNEL(op##_u32), \
                     [PHX_I64] = KERNEL(op##_u64)
#define ORDERED_OF(op)                                                                                  \
    UNSIGNED_OF(op), [PHX_I8] = KERNEL(op##_i8), [PHX_I16] = KERNEL(op##_i16), [PHX_I32] = KERNEL(op##_i32), \
                     [PHX_I64] = KERNEL(op##_i64)

static const phx_reduce_fn KERNEL(table)[PHX_OPS][PHX_DTYPES] = {
    /* A bool is one byte, 0 or 1: a sum is true if any is, a product if all are. */
    [PHX_SUM] = {FLOATS_OF(sum), WRAPPING_OF(sum), [PHX_BOOL] = KERNEL(bor_u8)},
    [PHX_AVG] = {FLOATS_OF(avg)},
    [PHX_PRODUCT] = {FLOATS_OF(product), WRAPPING_OF(product), [PHX_BOOL] = KERNEL(band_u8)},
    [PHX_MIN] = {FLOATS_OF(min), ORDERED_OF(min), [PHX_BOOL] = KERNEL(band_u8)},
    [PHX_MAX] = {FLOATS_OF(max), ORDERED_OF(max), [PHX_BOOL] = KERNEL(bor_u8)},
    [PHX_BAND] = {WRAPPING_OF(band), [PHX_BOOL] = KERNEL(band_u8)},
    [PHX_BOR] = {WRAPPING_OF(bor), [PHX_BOOL] = KERNEL(bor_u8)},
    [PHX_BXOR] = {WRAPPING_OF(bxor), [PHX_BOOL] = KERNEL(bxor_u8)},
};

/* The other macros are the same in every set. */
#undef KERNEL
#undef TARGET
#undef LANES
#undef VECTORS_OF_F16
#undef VECTORS_OF_BF16
#undef VECTOR
#undef SELECT
#undef V
#undef LOAD_F16
#undef STORE_F16
