// 16 rows in an array: what every compiler can do, and the reference for the others.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace {

#define PRONK_INLINE static inline

struct Simd {
    struct F { float v[16]; };
    struct I { int32_t v[16]; };
    struct Bytes { uint8_t v[64]; };   // [16 rows][4]
    struct Pairs { uint16_t v[32]; };  // [16 rows][2] bfloat16
    static constexpr int registers = 16, registers_per_vector = 4;
    static constexpr bool widens_bytes = false, widens_pairs = false, sums_narrow = false, tiles = false;

    template <class Body>
    PRONK_INLINE F each(Body body) {
        F y;
        for (int i = 0; i < 16; ++i) y.v[i] = body(i);
        return y;
    }
    template <class Body>
    PRONK_INLINE I each_int(Body body) {
        I y;
        for (int i = 0; i < 16; ++i) y.v[i] = body(i);
        return y;
    }

    PRONK_INLINE F zero() { return set(0); }
    PRONK_INLINE F set(float x) { return each([=](int) { return x; }); }
    PRONK_INLINE F load(const float* p) {
        F y;
        std::memcpy(y.v, p, sizeof y.v);
        return y;
    }
    PRONK_INLINE void store(float* p, F x) { std::memcpy(p, x.v, sizeof x.v); }
    PRONK_INLINE F load_f16(const void* p) {
        uint16_t h[16];
        std::memcpy(h, p, sizeof h);
        return each([&](int i) { return pronk::f16_to_f32(h[i]); });
    }
    PRONK_INLINE F load_int8(const void* p) { return each([=](int i) { return (float)((const int8_t*)p)[i]; }); }
    // Rounded twice: a fused product would be a call into the C library here.
    PRONK_INLINE F fma(F a, F b, F c) { return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
    PRONK_INLINE F add(F a, F b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
    PRONK_INLINE F sub(F a, F b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
    PRONK_INLINE F mul(F a, F b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
    PRONK_INLINE F div(F a, F b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
    // As x86 has them: where either is NaN, the second.
    PRONK_INLINE F max(F a, F b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
    PRONK_INLINE F min(F a, F b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
    PRONK_INLINE F whole(F x) { return each([&](int i) { return std::nearbyint(x.v[i]); }); }
    PRONK_INLINE F times_power_of_two(F x, F n) {  // 0 under 2^-126
        return each([&](int i) {
            const float exponent = n.v[i] > 128 ? 128 : n.v[i] > -127 ? n.v[i] : -127;
            return x.v[i] * std::bit_cast<float>((uint32_t)(exponent + 127) << 23);
        });
    }
    template <int kDistance>
    PRONK_INLINE F swapped(F x) { return each([&](int i) { return x.v[i ^ kDistance]; }); }
    PRONK_INLINE float sum(F x) {
        for (int width = 8; width > 0; width /= 2)
            for (int i = 0; i < width; ++i) x.v[i] += x.v[i + width];
        return x.v[0];
    }
    PRONK_INLINE float maximum(F x) {
        for (int i = 1; i < 16; ++i) x.v[0] = x.v[0] > x.v[i] ? x.v[0] : x.v[i];
        return x.v[0];
    }

    PRONK_INLINE I set_int(int32_t x) { return each_int([=](int) { return x; }); }
    PRONK_INLINE F to_float(I x) { return each([&](int i) { return (float)x.v[i]; }); }
    PRONK_INLINE I round(F x) {  // to nearest even; what does not fit becomes the least integer, as on x86
        return each_int([&](int i) {
            return std::fabs(x.v[i]) < 2147483648.0f ? (int32_t)std::nearbyint(x.v[i]) : INT32_MIN;
        });
    }
    PRONK_INLINE I magnitude(F x) {
        I y;
        std::memcpy(y.v, x.v, sizeof y.v);
        for (int i = 0; i < 16; ++i) y.v[i] &= 0x7fffffff;
        return y;
    }
    PRONK_INLINE I max_int(I a, I b) { return each_int([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
    PRONK_INLINE int32_t maximum_int(I x) {
        for (int i = 1; i < 16; ++i) x.v[0] = x.v[0] > x.v[i] ? x.v[0] : x.v[i];
        return x.v[0];
    }
    PRONK_INLINE uint32_t at_least(I a, I b) {  // bit i: a[i] >= b[i]
        uint32_t mask = 0;
        for (int i = 0; i < 16; ++i) mask |= (uint32_t)(a.v[i] >= b.v[i]) << i;
        return mask;
    }
    PRONK_INLINE F under(F x, I bits) {  // x where its magnitude is, 0 elsewhere
        const I m = magnitude(x);
        return each([&](int i) { return m.v[i] < bits.v[i] ? x.v[i] : 0.0f; });
    }
    PRONK_INLINE void store_int(int32_t* p, I x) { std::memcpy(p, x.v, sizeof x.v); }
    PRONK_INLINE I load_int(const int32_t* p) {
        I y;
        std::memcpy(y.v, p, sizeof y.v);
        return y;
    }
    PRONK_INLINE I add_int(I a, I b) { return each_int([&](int i) { return a.v[i] + b.v[i]; }); }
    PRONK_INLINE int32_t sum_int(I x) {
        for (int i = 1; i < 16; ++i) x.v[0] += x.v[i];
        return x.v[0];
    }
    PRONK_INLINE void store_int8(int8_t* p, I x) {
        for (int i = 0; i < 16; ++i) p[i] = (int8_t)(x.v[i] > 127 ? 127 : x.v[i] < -128 ? -128 : x.v[i]);
    }

    PRONK_INLINE Bytes load_bytes(const void* p) {
        Bytes y;
        std::memcpy(y.v, p, sizeof y.v);
        return y;
    }
    // c[row] + byte i of the row's four, left in its place, times x
    PRONK_INLINE F fma_byte(const void* p, uint32_t i, float x, F c) {
        uint32_t words[16];
        std::memcpy(words, p, sizeof words);
        return each([&](int row) { return (float)(words[row] & 255u << 8 * i) * x + c.v[row]; });
    }
    PRONK_INLINE I dot4(I acc, Bytes w, I x) {
        int8_t b[4];
        std::memcpy(b, x.v, 4);  // the word is the same in all rows
        return each_int([&](int i) {
            const uint8_t* r = w.v + 4 * i;
            return acc.v[i] + r[0] * b[0] + r[1] * b[1] + r[2] * b[2] + r[3] * b[3];
        });
    }

    PRONK_INLINE void store_bytes(void* p, Bytes x) { std::memcpy(p, x.v, sizeof x.v); }
    PRONK_INLINE Bytes either(Bytes x, Bytes y) {
        for (int i = 0; i < 64; ++i) x.v[i] |= y.v[i];
        return x;
    }
    // What is left of each byte under the mask after kShift bits to the right.
    template <int kShift, int kMask>
    PRONK_INLINE Bytes field(Bytes x) {
        for (uint8_t& b : x.v) b = (uint8_t)(b >> kShift & kMask);
        return x;
    }
    PRONK_INLINE Bytes look_up(const uint8_t* table, Bytes x) {  // of 16
        for (uint8_t& b : x.v) b = table[b];
        return x;
    }
    PRONK_INLINE F load_nibbles(const void* p, int shift) {  // bits [shift, shift + 4) of 16 bytes
        return each([=](int i) { return (float)(((const uint8_t*)p)[i] >> shift & 15); });
    }
    PRONK_INLINE void nibbles(const void* p, F& low, F& high) {  // both halves of 16 bytes
        low = load_nibbles(p, 0), high = load_nibbles(p, 4);
    }
#include "simd_sums.inl"
    PRONK_INLINE I dot_short(I acc, Bytes w, I x) { return dot4(acc, w, x); }

    PRONK_INLINE Pairs load_pairs(const void* p) {
        Pairs y;
        std::memcpy(y.v, p, sizeof y.v);
        return y;
    }
    PRONK_INLINE F dot2(F acc, Pairs w, I x) {
        uint16_t b[2];
        std::memcpy(b, x.v, 4);
        const float low = pronk::bf16_to_f32(b[0]), high = pronk::bf16_to_f32(b[1]);
        return each([&](int i) {
            return acc.v[i] + pronk::bf16_to_f32(w.v[2 * i]) * low + pronk::bf16_to_f32(w.v[2 * i + 1]) * high;
        });
    }
    PRONK_INLINE void store_f16(uint16_t* p, F x) {
        for (int i = 0; i < 16; ++i) p[i] = pronk::f32_to_f16(x.v[i]);
    }
    PRONK_INLINE void store_bf16(uint16_t* p, F x) {
        for (int i = 0; i < 16; ++i) p[i] = pronk::f32_to_bf16(x.v[i]);
    }
};

}  // namespace
