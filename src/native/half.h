// float16 and bfloat16 as their bits. Exact one way, rounded to nearest even the other; NaN stays NaN, and quiet.
//
// Without branches, so that loops over them vectorize on any processor, and without subnormal floats in between, so
// that threads which flush those to zero get the same bits. Static, because units compiled for different processors
// include this, and the linker would keep one copy for all.
#pragma once

#include <bit>
#include <cstdint>

namespace pronk {

static_assert(std::endian::native == std::endian::little, "weights are read and packed in little-endian order");

static inline float f16_to_f32(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    const uint32_t special = magnitude >= 0x7c00 ? 112u << 23 : 0;  // infinity and NaN have the highest exponent
    const uint32_t normal = (magnitude << 13) + (112u << 23) + special;
    // Subnormals count steps of 2^-24, and so does the fraction of 0.5.
    const float subnormal = std::bit_cast<float>(magnitude | 0x3f000000u) - 0.5f;
    return std::bit_cast<float>(sign | (magnitude < 0x400 ? std::bit_cast<uint32_t>(subnormal) : normal));
}

static inline uint16_t f32_to_f16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
    const uint32_t rounded = ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112u << 10);
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t half = magnitude < 0x38800000u ? subnormal : rounded;  // 2^-14
    half = magnitude >= 0x47800000u ? 0x7c00 : half;                // 2^16
    half = magnitude > 0x7f800000u ? 0x7e00 | (magnitude >> 13 & 0x1ff) : half;
    return static_cast<uint16_t>((bits >> 16 & 0x8000) | half);
}

static inline float bf16_to_f32(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

static inline uint16_t f32_to_bf16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x), rounded = bits + 0x7fff + (bits >> 16 & 1);
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40 : rounded >> 16);
}

static inline bool f16_is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }
static inline bool bf16_is_finite(uint16_t x) { return (x & 0x7f80) != 0x7f80; }

}  // namespace pronk
