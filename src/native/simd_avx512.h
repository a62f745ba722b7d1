// 16 rows in a 512-bit register. Compiled four times: plain (Skylake), with VNNI (Ice Lake), with BF16 (Zen 4), with AMX beside (Sapphire Rapids).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

#define PRONK_INLINE static inline __attribute__((always_inline))

struct Simd {
    using F = __m512;     // 16 floats
    using I = __m512i;    // 16 int32
    using Bytes = __m512i;  // [16 rows][4]
    using Pairs = __m512i;  // [16 rows][2] bfloat16
    static constexpr int registers = 32, registers_per_vector = 1;
#ifdef PRONK_TILES
    static constexpr bool tiles = true;
#else
    static constexpr bool tiles = false;
#endif
    static constexpr bool widens_bytes = false, widens_pairs = false, sums_narrow = false;

    PRONK_INLINE F zero() { return _mm512_setzero_ps(); }
    PRONK_INLINE F set(float x) { return _mm512_set1_ps(x); }
    PRONK_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
    PRONK_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    PRONK_INLINE F load_f16(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
    PRONK_INLINE F load_int8(const void* p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
    }
    PRONK_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    PRONK_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
    PRONK_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    PRONK_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    PRONK_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
    PRONK_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
    PRONK_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
    PRONK_INLINE F whole(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    PRONK_INLINE F times_power_of_two(F x, F n) { return _mm512_scalef_ps(x, n); }
    template <int kDistance>
    PRONK_INLINE F swapped(F x) {  // lane i is what lane i ^ kDistance was
        if constexpr (kDistance == 8) return _mm512_shuffle_f32x4(x, x, 0x4e);
        if constexpr (kDistance == 4) return _mm512_shuffle_f32x4(x, x, 0xb1);
        return _mm512_permute_ps(x, kDistance == 2 ? 0x4e : 0xb1);
    }
    PRONK_INLINE float sum(F x) { return _mm512_reduce_add_ps(x); }
    PRONK_INLINE float maximum(F x) { return _mm512_reduce_max_ps(x); }

    PRONK_INLINE I set_int(int32_t x) { return _mm512_set1_epi32(x); }
    PRONK_INLINE F to_float(I x) { return _mm512_cvtepi32_ps(x); }
    PRONK_INLINE I round(F x) { return _mm512_cvtps_epi32(x); }  // to nearest even
    PRONK_INLINE I magnitude(F x) {  // the bits of |x|: ordered as the numbers are, infinity and NaN above all
        return _mm512_and_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
    }
    PRONK_INLINE I max_int(I a, I b) { return _mm512_max_epi32(a, b); }
    PRONK_INLINE int32_t maximum_int(I x) { return _mm512_reduce_max_epi32(x); }
    PRONK_INLINE uint32_t at_least(I a, I b) { return _mm512_cmpge_epi32_mask(a, b); }  // bit i: a[i] >= b[i]
    PRONK_INLINE F under(F x, I bits) {  // x where its magnitude is, 0 elsewhere
        return _mm512_maskz_mov_ps(_mm512_cmplt_epi32_mask(magnitude(x), bits), x);
    }
    PRONK_INLINE void store_int(int32_t* p, I x) { _mm512_storeu_si512(p, x); }
    PRONK_INLINE I load_int(const int32_t* p) { return _mm512_loadu_si512(p); }
    // Those of `mask`, one after the other; gives how many. 16 places are written.
    PRONK_INLINE int compress(uint32_t mask, F x, I k, float* to_x, int32_t* to_k) {
        _mm512_storeu_ps(to_x, _mm512_maskz_compress_ps((__mmask16)mask, x));
        _mm512_storeu_si512(to_k, _mm512_maskz_compress_epi32((__mmask16)mask, k));
        return __builtin_popcount(mask);
    }
    PRONK_INLINE I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
    PRONK_INLINE int32_t sum_int(I x) { return _mm512_reduce_add_epi32(x); }
    PRONK_INLINE void store_int8(int8_t* p, I x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(x)); }

    PRONK_INLINE Bytes load_bytes(const void* p) { return _mm512_loadu_si512(p); }
    // c[row] + byte i of the row's four, left in its place, times x
    PRONK_INLINE F fma_byte(const void* p, uint32_t i, float x, F c) {
        static constexpr uint32_t masks[4] = {255u, 255u << 8, 255u << 16, 255u << 24};
        const I bytes = _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int32_t)masks[i]));
        return fma(_mm512_cvtepu32_ps(bytes), set(x), c);
    }
    // acc[row] += sum of w[row][i] x[i], w unsigned, x signed (four int8 in a word)
    PRONK_INLINE I dot4(I acc, Bytes w, I x) {
#ifdef __AVX512VNNI__
        // Not the intrinsic: GCC 12 copies and spills accumulators around it.
        asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
        return acc;
#else
        // vpmaddubsw would saturate; sums of pairs of 16-bit products do not.
        const I even = _mm512_and_si512(w, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(w, 8);
        const I x_even = _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), x_odd = _mm512_srai_epi16(x, 8);
        acc = _mm512_add_epi32(acc, _mm512_madd_epi16(even, x_even));
        return _mm512_add_epi32(acc, _mm512_madd_epi16(odd, x_odd));
#endif
    }

    PRONK_INLINE void store_bytes(void* p, Bytes x) { _mm512_storeu_si512(p, x); }
    PRONK_INLINE Bytes either(Bytes x, Bytes y) { return _mm512_or_si512(x, y); }
    // What is left of each byte under the mask after kShift bits to the right.
    template <int kShift, int kMask>
    PRONK_INLINE Bytes field(Bytes x) {
        if constexpr (kShift > 0) x = _mm512_srli_epi16(x, kShift);
        return _mm512_and_si512(x, _mm512_set1_epi8((char)kMask));
    }
    PRONK_INLINE Bytes look_up(const uint8_t* table, Bytes x) {  // of 16
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), x);
    }
    PRONK_INLINE F load_nibbles(const void* p, int shift) {  // bits [shift, shift + 4) of 16 bytes
        const I x = _mm512_srl_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), _mm_cvtsi32_si128(shift));
        return _mm512_cvtepi32_ps(_mm512_and_si512(x, _mm512_set1_epi32(15)));
    }
    PRONK_INLINE void nibbles(const void* p, F& low, F& high) {  // both halves of 16 bytes
        // A table of what they stand for: an index is its low four bits, and needs no mask.
        const F numbers = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const I x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
        low = _mm512_permutexvar_ps(x, numbers), high = _mm512_permutexvar_ps(_mm512_srli_epi32(x, 4), numbers);
    }
#ifdef __AVX512VNNI__
#include "simd_sums.inl"
    PRONK_INLINE I dot_short(I acc, Bytes w, I x) { return dot4(acc, w, x); }
#else
    // Small codes are summed in 16 bits: of each row the first two of a word of four, and in the high half the others.
    static constexpr bool sums_in_words = false, joins_parts = false;
    PRONK_INLINE int32_t sums(I x) {
        const int32_t first = _mm512_mask_reduce_add_epi32(0x3333, x), last = _mm512_mask_reduce_add_epi32(0xcccc, x);
        return (first & 0xffff) | last << 16;
    }
    PRONK_INLINE int32_t total(int32_t sums) { return (int16_t)sums + (sums >> 16); }
    PRONK_INLINE int32_t plus(int32_t x, int32_t y) { return (uint16_t)(x + y) | (int32_t)((uint32_t)((x >> 16) + (y >> 16)) << 16); }
    PRONK_INLINE int32_t times(int32_t sums, int factor) { return (uint16_t)(sums * factor) | (int32_t)((uint32_t)((sums >> 16) * factor) << 16); }
    PRONK_INLINE I begin(int32_t sums, int factor) {
        return _mm512_mullo_epi16(_mm512_set1_epi32(sums), _mm512_set1_epi16((int16_t)factor));
    }
    PRONK_INLINE I add_short(I x, I y) { return _mm512_add_epi16(x, y); }
    PRONK_INLINE I dot_short(I acc, Bytes w, I x) { return add_short(acc, _mm512_maddubs_epi16(w, x)); }
    PRONK_INLINE I widened(I x) { return _mm512_madd_epi16(x, _mm512_set1_epi16(1)); }
#endif

    PRONK_INLINE Pairs load_pairs(const void* p) { return _mm512_loadu_si512(p); }
    // acc[row] += w[row][0] x[0] + w[row][1] x[1]
    PRONK_INLINE F dot2(F acc, Pairs w, I x) {
#ifdef __AVX512BF16__
        return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)x);
#else
        const I high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
        acc = fma(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), acc);
        return fma(_mm512_castsi512_ps(_mm512_and_si512(w, high)), _mm512_castsi512_ps(_mm512_and_si512(x, high)), acc);
#endif
    }
    PRONK_INLINE void store_f16(uint16_t* p, F x) {
        _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    PRONK_INLINE void store_bf16(uint16_t* p, F x) {  // to nearest even; NaN stays NaN
#ifdef __AVX512BF16__
        _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
        const I bits = _mm512_castps_si512(x), lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), set_int(1));
        I rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(lsb, set_int(0x7fff))), 16);
        rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), set_int(0x7fc0));
        _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(rounded));
#endif
    }
};

}  // namespace
