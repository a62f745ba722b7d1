// 16 rows in four 128-bit registers. Compiled three times: plain ARMv8, with dotprod, and with i8mm and bf16.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace {

#define PRONK_INLINE static inline __attribute__((always_inline))

struct Simd {
    struct F { float32x4_t v[4]; };
    struct I { int32x4_t v[4]; };
    struct Bytes { uint8x16_t v[4]; };   // [16 rows][4]
    struct Pairs { uint16x8_t v[4]; };   // [16 rows][2] bfloat16
    static constexpr int registers = 32, registers_per_vector = 4;
    static constexpr bool widens_bytes = false, widens_pairs = false, sums_narrow = false, tiles = false;

    template <class Body>
    PRONK_INLINE F each(Body body) { return {{body(0), body(1), body(2), body(3)}}; }
    template <class Body>
    PRONK_INLINE I each_int(Body body) { return {{body(0), body(1), body(2), body(3)}}; }

    PRONK_INLINE F zero() { return set(0); }
    PRONK_INLINE F set(float x) { return each([=](int) { return vdupq_n_f32(x); }); }
    PRONK_INLINE F load(const float* p) { return each([=](int i) { return vld1q_f32(p + 4 * i); }); }
    PRONK_INLINE void store(float* p, F x) {
        for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
    }
    PRONK_INLINE F load_f16(const void* p) {
        return each([=](int i) {
            return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8((const uint8_t*)p + 8 * i)));
        });
    }
    PRONK_INLINE F load_int8(const void* p) { return floats_of(vld1q_s8((const int8_t*)p)); }
    PRONK_INLINE F floats_of(int8x16_t x) {
        const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_s8(vget_high_s8(x));
        return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
                 vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
    }
    PRONK_INLINE F fma(F a, F b, F c) { return each([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); }); }
    PRONK_INLINE F add(F a, F b) { return each([&](int i) { return vaddq_f32(a.v[i], b.v[i]); }); }
    PRONK_INLINE F sub(F a, F b) { return each([&](int i) { return vsubq_f32(a.v[i], b.v[i]); }); }
    PRONK_INLINE F mul(F a, F b) { return each([&](int i) { return vmulq_f32(a.v[i], b.v[i]); }); }
    PRONK_INLINE F div(F a, F b) { return each([&](int i) { return vdivq_f32(a.v[i], b.v[i]); }); }
    PRONK_INLINE F max(F a, F b) { return each([&](int i) { return vmaxq_f32(a.v[i], b.v[i]); }); }
    PRONK_INLINE F min(F a, F b) { return each([&](int i) { return vminq_f32(a.v[i], b.v[i]); }); }
    PRONK_INLINE F whole(F x) { return each([&](int i) { return vrndnq_f32(x.v[i]); }); }
    PRONK_INLINE F times_power_of_two(F x, F n) {  // 0 under 2^-126
        return each([&](int i) {
            const int32x4_t least = vdupq_n_s32(-127), most = vdupq_n_s32(128);
            const int32x4_t exponent = vminq_s32(vmaxq_s32(vcvtq_s32_f32(n.v[i]), least), most);
            return vmulq_f32(x.v[i], vreinterpretq_f32_s32(vshlq_n_s32(vsubq_s32(exponent, least), 23)));
        });
    }
    template <int kDistance>
    PRONK_INLINE F swapped(F x) {  // lane i is what lane i ^ kDistance was
        if constexpr (kDistance >= 4) return each([&](int i) { return x.v[i ^ kDistance / 4]; });
        if constexpr (kDistance == 2) return each([&](int i) { return vextq_f32(x.v[i], x.v[i], 2); });
        return each([&](int i) { return vrev64q_f32(x.v[i]); });
    }
    PRONK_INLINE float sum(F x) {
        return vaddvq_f32(vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3])));
    }
    PRONK_INLINE float maximum(F x) {
        return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.v[0], x.v[2]), vmaxq_f32(x.v[1], x.v[3])));
    }

    PRONK_INLINE I set_int(int32_t x) { return each_int([=](int) { return vdupq_n_s32(x); }); }
    PRONK_INLINE F to_float(I x) { return each([&](int i) { return vcvtq_f32_s32(x.v[i]); }); }
    PRONK_INLINE I round(F x) { return each_int([&](int i) { return vcvtnq_s32_f32(x.v[i]); }); }  // to nearest even
    PRONK_INLINE I magnitude(F x) {  // the bits of |x|: ordered as the numbers are, infinity and NaN above all
        return each_int([&](int i) { return vandq_s32(vreinterpretq_s32_f32(x.v[i]), vdupq_n_s32(0x7fffffff)); });
    }
    PRONK_INLINE I max_int(I a, I b) { return each_int([&](int i) { return vmaxq_s32(a.v[i], b.v[i]); }); }
    PRONK_INLINE int32_t maximum_int(I x) {
        return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.v[0], x.v[1]), vmaxq_s32(x.v[2], x.v[3])));
    }
    PRONK_INLINE uint32_t at_least(I a, I b) {  // bit i: a[i] >= b[i]
        static constexpr uint32_t places[4] = {1, 2, 4, 8};
        uint32_t mask = 0;
        for (int i = 0; i < 4; ++i) mask |= vaddvq_u32(vandq_u32(vcgeq_s32(a.v[i], b.v[i]), vld1q_u32(places))) << 4 * i;
        return mask;
    }
    PRONK_INLINE F under(F x, I bits) {  // x where its magnitude is, 0 elsewhere
        const I m = magnitude(x);
        return each([&](int i) {
            return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x.v[i]), vcltq_s32(m.v[i], bits.v[i])));
        });
    }
    PRONK_INLINE void store_int(int32_t* p, I x) {
        for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, x.v[i]);
    }
    PRONK_INLINE I load_int(const int32_t* p) { return each_int([=](int i) { return vld1q_s32(p + 4 * i); }); }
    PRONK_INLINE I add_int(I a, I b) { return each_int([&](int i) { return vaddq_s32(a.v[i], b.v[i]); }); }
    PRONK_INLINE int32_t sum_int(I x) {
        return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3])));
    }
    PRONK_INLINE void store_int8(int8_t* p, I x) {
        const int16x8_t low = vcombine_s16(vqmovn_s32(x.v[0]), vqmovn_s32(x.v[1]));
        const int16x8_t high = vcombine_s16(vqmovn_s32(x.v[2]), vqmovn_s32(x.v[3]));
        vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
    }

    PRONK_INLINE Bytes load_bytes(const void* p) {
        const uint8_t* q = (const uint8_t*)p;
        return {{vld1q_u8(q), vld1q_u8(q + 16), vld1q_u8(q + 32), vld1q_u8(q + 48)}};
    }
    // c[row] + byte i of the row's four, left in its place, times x
    PRONK_INLINE F fma_byte(const void* p, uint32_t i, float x, F c) {
        const uint32x4_t mask = vdupq_n_u32(255u << 8 * i);
        const Bytes w = load_bytes(p);
        return each([&](int v) {
            const uint32x4_t bytes = vandq_u32(vreinterpretq_u32_u8(w.v[v]), mask);
            return vfmaq_f32(c.v[v], vcvtq_f32_u32(bytes), vdupq_n_f32(x));
        });
    }
    PRONK_INLINE int32x4_t dot(int32x4_t acc, uint8x16_t w, int8x16_t x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
        return vusdotq_s32(acc, w, x);
#elif defined(__ARM_FEATURE_DOTPROD)
        // w x = (w - 128) x + 128 x, both signed
        acc = vdotq_s32(acc, vreinterpretq_s8_u8(veorq_u8(w, vdupq_n_u8(128))), x);
        return vaddq_s32(acc, vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), x), 7));
#else
        const int16x8_t w_low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(w)));
        const int16x8_t w_high = vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(w)));
        const int16x8_t x_low = vmovl_s8(vget_low_s8(x)), x_high = vmovl_s8(vget_high_s8(x));
        const int32x4_t a = vmull_s16(vget_low_s16(w_low), vget_low_s16(x_low)), b = vmull_high_s16(w_low, x_low);
        const int32x4_t c = vmull_s16(vget_low_s16(w_high), vget_low_s16(x_high)), d = vmull_high_s16(w_high, x_high);
        return vaddq_s32(acc, vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d)));
#endif
    }
    // acc[row] += sum of w[row][i] x[i], w unsigned, x signed (four int8 in a word)
    PRONK_INLINE I dot4(I acc, Bytes w, I x) {
        return each_int([&](int i) { return dot(acc.v[i], w.v[i], vreinterpretq_s8_s32(x.v[i])); });
    }

    PRONK_INLINE void store_bytes(void* p, Bytes x) {
        for (int i = 0; i < 4; ++i) vst1q_u8((uint8_t*)p + 16 * i, x.v[i]);
    }
    PRONK_INLINE Bytes either(Bytes x, Bytes y) {
        for (int i = 0; i < 4; ++i) x.v[i] = vorrq_u8(x.v[i], y.v[i]);
        return x;
    }
    // What is left of each byte under the mask after kShift bits to the right.
    template <int kShift, int kMask>
    PRONK_INLINE Bytes field(Bytes x) {
        for (uint8x16_t& b : x.v) {
            if constexpr (kShift > 0) b = vshrq_n_u8(b, kShift);
            b = vandq_u8(b, vdupq_n_u8(kMask));
        }
        return x;
    }
    PRONK_INLINE Bytes look_up(const uint8_t* table, Bytes x) {  // of 16
        for (uint8x16_t& b : x.v) b = vqtbl1q_u8(vld1q_u8(table), b);
        return x;
    }
    PRONK_INLINE F load_nibbles(const void* p, int shift) {  // bits [shift, shift + 4) of 16 bytes
        const uint8x16_t x = vandq_u8(vshlq_u8(vld1q_u8((const uint8_t*)p), vdupq_n_s8((int8_t)-shift)), vdupq_n_u8(15));
        return load_int8((const uint8_t*)&x);
    }
    PRONK_INLINE void nibbles(const void* p, F& low, F& high) {  // both halves of 16 bytes
        const uint8x16_t x = vld1q_u8((const uint8_t*)p);
        low = floats_of(vreinterpretq_s8_u8(vandq_u8(x, vdupq_n_u8(15))));
        high = floats_of(vreinterpretq_s8_u8(vshrq_n_u8(x, 4)));
    }
#if defined(__ARM_FEATURE_DOTPROD)
#include "simd_sums.inl"
    PRONK_INLINE I dot_short(I acc, Bytes w, I x) {  // small codes are signed bytes as well
        return each_int([&](int i) { return vdotq_s32(acc.v[i], vreinterpretq_s8_u8(w.v[i]), vreinterpretq_s8_s32(x.v[i])); });
    }
#else
    // Small codes are summed in 16 bits: of each row the first two of a word of four, and in the high half the others.
    static constexpr bool sums_in_words = false, joins_parts = false;
    PRONK_INLINE int32_t sums(I x) {
        const int32x4_t s = vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3])), pairs = vpaddq_s32(s, s);
        return (vgetq_lane_s32(pairs, 0) & 0xffff) | (int32_t)((uint32_t)vgetq_lane_s32(pairs, 1) << 16);
    }
    PRONK_INLINE int32_t total(int32_t sums) { return (int16_t)sums + (sums >> 16); }
    PRONK_INLINE int32_t plus(int32_t x, int32_t y) { return (uint16_t)(x + y) | (int32_t)((uint32_t)((x >> 16) + (y >> 16)) << 16); }
    PRONK_INLINE int32_t times(int32_t sums, int factor) { return (uint16_t)(sums * factor) | (int32_t)((uint32_t)((sums >> 16) * factor) << 16); }
    PRONK_INLINE I begin(int32_t sums, int factor) {
        const int16x8_t s = vmulq_n_s16(vreinterpretq_s16_s32(vdupq_n_s32(sums)), (int16_t)factor);
        return each_int([&](int) { return vreinterpretq_s32_s16(s); });
    }
    PRONK_INLINE int32x4_t add_halves(int32x4_t x, int16x8_t y) {
        return vreinterpretq_s32_s16(vaddq_s16(vreinterpretq_s16_s32(x), y));
    }
    PRONK_INLINE I add_short(I x, I y) {
        return each_int([&](int i) { return add_halves(x.v[i], vreinterpretq_s16_s32(y.v[i])); });
    }
    PRONK_INLINE I dot_short(I acc, Bytes w, I x) {  // small codes are signed bytes as well
        return each_int([&](int i) {
            const int8x16_t codes = vreinterpretq_s8_u8(w.v[i]), by = vreinterpretq_s8_s32(x.v[i]);
            return add_halves(acc.v[i], vpaddq_s16(vmull_s8(vget_low_s8(codes), vget_low_s8(by)), vmull_high_s8(codes, by)));
        });
    }
    PRONK_INLINE I widened(I x) {
        return each_int([&](int i) { return vpaddlq_s16(vreinterpretq_s16_s32(x.v[i])); });
    }
#endif

    PRONK_INLINE Pairs load_pairs(const void* p) {
        const uint16_t* q = (const uint16_t*)p;
        return {{vld1q_u16(q), vld1q_u16(q + 8), vld1q_u16(q + 16), vld1q_u16(q + 24)}};
    }
    // acc[row] += w[row][0] x[0] + w[row][1] x[1]; not BFDOT, which rounds otherwise than the other sets do
    PRONK_INLINE F dot2(F acc, Pairs w, I x) {
        return each([&](int i) {
            const uint32x4_t high = vdupq_n_u32(0xffff0000), u = vreinterpretq_u32_u16(w.v[i]), y = vreinterpretq_u32_s32(x.v[i]);
            const float32x4_t a = vfmaq_f32(acc.v[i], vreinterpretq_f32_u32(vshlq_n_u32(u, 16)), vreinterpretq_f32_u32(vshlq_n_u32(y, 16)));
            return vfmaq_f32(a, vreinterpretq_f32_u32(vandq_u32(u, high)), vreinterpretq_f32_u32(vandq_u32(y, high)));
        });
    }
    PRONK_INLINE void store_f16(uint16_t* p, F x) {
        for (int i = 0; i < 4; ++i) vst1_u8((uint8_t*)(p + 4 * i), vreinterpret_u8_f16(vcvt_f16_f32(x.v[i])));
    }
    PRONK_INLINE void store_bf16(uint16_t* p, F x) {  // to nearest even; NaN stays NaN
        for (int i = 0; i < 4; ++i) {
            const uint32x4_t bits = vreinterpretq_u32_f32(x.v[i]), lsb = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
            const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(lsb, vdupq_n_u32(0x7fff))), 16);
            const uint32x4_t number = vceqq_f32(x.v[i], x.v[i]);
            vst1_u16(p + 4 * i, vmovn_u32(vbslq_u32(number, rounded, vdupq_n_u32(0x7fc0))));
        }
    }
};

}  // namespace
