/* The inner loops of codec bf16 (codec_bf16.py says what they mean), for compilers that make them vector code.
 *
 * The same results as the numpy forms in planes.py, to the bit. Nothing here allocates or keeps state. Bytes are
 * little-endian, as on every machine that this is built for.
 */
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#define REST 0x807F /* sign and mantissa */
#define EXPONENT 0x7F80
#define GROUP 64    /* numbers that are looked at at once for outliers */

typedef uint16_t unaligned16 __attribute__((aligned(1)));

/* Parts pairs of rows: upper and lower [rows, channels] -> differences [rows, channels, 2] and rest [rows, channels].
 * shift [channels] is what is taken off each exponent. */
FOR_EACH_PROCESSOR
void draftsmith_part(const uint16_t *restrict upper, const uint16_t *restrict lower, const uint16_t *restrict shift,
                     size_t rows, size_t channels, uint16_t *restrict differences, unaligned16 *restrict rest)
{
    for (size_t row = 0; row < rows; row++) {
        const size_t start = row * channels;
        for (size_t c = 0; c < channels; c++) {
            const uint16_t a = upper[start + c], b = lower[start + c], s = shift[c];
            const uint16_t low = (uint16_t)((uint16_t)((a >> 7) - s) & 0x00FF);
            const uint16_t high = (uint16_t)((uint16_t)((b >> 7) - s) << 8);
            differences[start + c] = (uint16_t)(low | high);
            const uint16_t r = (uint16_t)(b & REST);
            rest[start + c] = (uint16_t)((uint16_t)(r << 8) | (uint16_t)(r >> 8) | (uint16_t)(a & REST));
        }
    }
}

/* 1 if all numbers are finite, 0 if one is NaN or infinite. */
FOR_EACH_PROCESSOR
int draftsmith_are_finite(const uint16_t *numbers, size_t size)
{
    uint16_t found = 0;
    for (size_t i = 0; i < size; i++)
        found |= (uint16_t)((numbers[i] & EXPONENT) == EXPONENT);
    return !found;
}

/* Adds the exponents of every step-th of these rows [rows, channels] to sums [channels]. */
FOR_EACH_PROCESSOR
void draftsmith_add_exponents(const uint16_t *restrict numbers, size_t rows, size_t channels, size_t step,
                              uint32_t *restrict sums)
{
    for (size_t row = 0; row < rows; row += step)
        for (size_t c = 0; c < channels; c++)
            sums[c] += (uint32_t)(uint16_t)((numbers[row * channels + c] >> 7) & 0x00FF);
}

/* Finds the differences [size] of span and more: their places and values, ascending; each is replaced by `filler`.
 * Returns how many there are, or most + 1 as soon as there are more than `most`. */
FOR_EACH_PROCESSOR
size_t draftsmith_outliers(uint8_t *restrict differences, size_t size, uint8_t span, uint8_t filler, size_t most,
                           uint32_t *restrict places, uint8_t *restrict far)
{
    size_t found = 0;
    for (size_t start = 0; start < size; start += GROUP) {
        const size_t count = size - start < GROUP ? size - start : GROUP;
        uint8_t *group = differences + start;
        uint8_t largest = 0;
        if (count == GROUP) {
            for (size_t i = 0; i < GROUP; i++)
                largest = group[i] > largest ? group[i] : largest;
            if (largest < span)
                continue;
        }
        for (size_t i = 0; i < count; i++) {
            if (group[i] < span)
                continue;
            if (found == most)
                return most + 1;
            places[found] = (uint32_t)(start + i);
            far[found] = group[i];
            group[i] = filler;
            found++;
        }
    }
    return found;
}

/* Two differences a byte: that of i below, that of half + i above. */
FOR_EACH_PROCESSOR
void draftsmith_pack(const uint8_t *restrict differences, size_t half, uint8_t *restrict packed)
{
    for (size_t i = 0; i < half; i++)
        packed[i] = (uint8_t)(differences[i] | (uint8_t)(differences[half + i] << 4));
}

/* The inverse of draftsmith_pack. */
FOR_EACH_PROCESSOR
void draftsmith_unpack(const uint8_t *restrict packed, size_t half, uint8_t *restrict differences)
{
    for (size_t i = 0; i < half; i++) {
        differences[i] = packed[i] & 0x0F;
        differences[half + i] = packed[i] >> 4;
    }
}

/* The inverse of draftsmith_part. */
FOR_EACH_PROCESSOR
void draftsmith_join(const uint16_t *restrict differences, const unaligned16 *restrict rest,
                     const uint16_t *restrict shift, size_t rows, size_t channels, uint16_t *restrict upper,
                     uint16_t *restrict lower)
{
    for (size_t row = 0; row < rows; row++) {
        const size_t start = row * channels;
        for (size_t c = 0; c < channels; c++) {
            const uint16_t d = differences[start + c], r = rest[start + c], s = shift[c];
            const uint16_t a = (uint16_t)((uint16_t)(d + s) & 0x00FF), b = (uint16_t)((uint16_t)((d >> 8) + s) & 0x00FF);
            upper[start + c] = (uint16_t)((uint16_t)(a << 7) | (uint16_t)(r & REST));
            lower[start + c] = (uint16_t)((uint16_t)(b << 7) | (uint16_t)(((r << 8) | (r >> 8)) & REST));
        }
    }
}
