// 16 rows in two 256-bit registers. Compiled twice: plain (Haswell, Zen 1-3) and with AVX-VNNI (Alder Lake).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

#define PRONK_INLINE static inline __attribute__((always_inline))

struct Simd {
    struct F { __m256 a, b; };
    struct I { __m256i a, b; };
    using Bytes = I;  // [16 rows][4]
    using Pairs = I;  // [16 rows][2] bfloat16
    static constexpr int registers = 16, registers_per_vector = 2;

    PRONK_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    PRONK_INLINE F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    PRONK_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    PRONK_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
    PRONK_INLINE F load_f16(const void* p) {
        const __m128i* h = (const __m128i*)p;
        return {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
    }
    PRONK_INLINE F load_int8(const void* p) {
        const __m128i x = _mm_loadu_si128((const __m128i*)p);
        return to_float({_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x))});
    }
    PRONK_INLINE F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)}; }
    PRONK_INLINE F add(F a, F b) { return {_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)}; }
    PRONK_INLINE F sub(F a, F b) { return {_mm256_sub_ps(a.a, b.a), _mm256_sub_ps(a.b, b.b)}; }
    PRONK_INLINE F mul(F a, F b) { return {_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
    PRONK_INLINE F div(F a, F b) { return {_mm256_div_ps(a.a, b.a), _mm256_div_ps(a.b, b.b)}; }
    PRONK_INLINE F max(F a, F b) { return {_mm256_max_ps(a.a, b.a), _mm256_max_ps(a.b, b.b)}; }
    PRONK_INLINE F min(F a, F b) { return {_mm256_min_ps(a.a, b.a), _mm256_min_ps(a.b, b.b)}; }
    PRONK_INLINE F whole(F x) {
        constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        return {_mm256_round_ps(x.a, nearest), _mm256_round_ps(x.b, nearest)};
    }
    PRONK_INLINE __m256 power(__m256 n) {  // 2^n of a whole n; 0 under 2^-126
        const __m256i least = _mm256_set1_epi32(-127), most = _mm256_set1_epi32(128);
        const __m256i exponent = _mm256_min_epi32(_mm256_max_epi32(_mm256_cvtps_epi32(n), least), most);
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_sub_epi32(exponent, least), 23));
    }
    PRONK_INLINE F times_power_of_two(F x, F n) { return mul(x, {power(n.a), power(n.b)}); }
    template <int kDistance>
    PRONK_INLINE F swapped(F x) {  // lane i is what lane i ^ kDistance was
        if constexpr (kDistance == 8) return {x.b, x.a};
        if constexpr (kDistance == 4) return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
        constexpr int order = kDistance == 2 ? 0x4e : 0xb1;
        return {_mm256_permute_ps(x.a, order), _mm256_permute_ps(x.b, order)};
    }
    PRONK_INLINE float sum(F x) {
        const __m256 s = _mm256_add_ps(x.a, x.b);
        __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
        q = _mm_add_ps(q, _mm_movehl_ps(q, q));
        return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
    }
    PRONK_INLINE float maximum(F x) {
        const __m256 s = _mm256_max_ps(x.a, x.b);
        __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
        q = _mm_max_ps(q, _mm_movehl_ps(q, q));
        return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
    }

    PRONK_INLINE I set_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
    PRONK_INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
    PRONK_INLINE I round(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }  // to nearest even
    PRONK_INLINE I magnitude(F x) {  // the bits of |x|: ordered as the numbers are, infinity and NaN above all
        const __m256i mask = _mm256_set1_epi32(0x7fffffff);
        return {_mm256_and_si256(_mm256_castps_si256(x.a), mask), _mm256_and_si256(_mm256_castps_si256(x.b), mask)};
    }
    PRONK_INLINE I max_int(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
    PRONK_INLINE int32_t maximum_int(I x) {
        const __m256i s = _mm256_max_epi32(x.a, x.b);
        __m128i q = _mm_max_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
        q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4e));
        return _mm_cvtsi128_si32(_mm_max_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
    }
    PRONK_INLINE uint32_t at_least(I x, I y) {  // bit i: x[i] >= y[i]
        const int a = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(y.a, x.a)));
        const int b = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(y.b, x.b)));
        return ~(uint32_t)(a | b << 8) & 0xffff;
    }
    PRONK_INLINE F under(F x, I bits) {  // x where its magnitude is, 0 elsewhere
        const I m = magnitude(x);
        return {_mm256_and_ps(x.a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(bits.a, m.a))),
                _mm256_and_ps(x.b, _mm256_castsi256_ps(_mm256_cmpgt_epi32(bits.b, m.b)))};
    }
    PRONK_INLINE void store_int(int32_t* p, I x) {
        _mm256_storeu_si256((__m256i*)p, x.a), _mm256_storeu_si256((__m256i*)(p + 8), x.b);
    }
    PRONK_INLINE I load_int(const int32_t* p) { return load_bytes(p); }
    PRONK_INLINE I add_int(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
    PRONK_INLINE int32_t sum_int(I x) {
        const __m256i s = _mm256_add_epi32(x.a, x.b);
        __m128i q = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
        q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
    }
    PRONK_INLINE void store_int8(int8_t* p, I x) {
        const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
        _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    }

    PRONK_INLINE Bytes load_bytes(const void* p) {
        const __m256i* q = (const __m256i*)p;
        return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
    }
    // c[row] + byte i of the row's four, left in its place, times x
    PRONK_INLINE F fma_byte(const void* p, uint32_t i, float x, F c) {
        const __m128i shift = _mm_cvtsi32_si128((int)(8 * i));
        const __m256i mask = _mm256_set1_epi32(255);
        const Bytes w = load_bytes(p);
        const I bytes = {_mm256_and_si256(_mm256_srl_epi32(w.a, shift), mask), _mm256_and_si256(_mm256_srl_epi32(w.b, shift), mask)};
        return fma(to_float(bytes), set(x * (float)(1u << 8 * i)), c);
    }
    // Or else GCC 12 keeps a second copy of sums in loops, and has no registers left for either.
    template <class Vector>
    PRONK_INLINE Vector in_place(Vector sum) {
        asm("" : "+x"(sum));
        return sum;
    }
    PRONK_INLINE __m256i dot(__m256i acc, __m256i w, __m256i x) {
#ifdef __AVXVNNI__
        asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
        return acc;
#else
        // vpmaddubsw would saturate; sums of pairs of 16-bit products do not.
        const __m256i even = _mm256_and_si256(w, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(w, 8);
        const __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), x_odd = _mm256_srai_epi16(x, 8);
        acc = _mm256_add_epi32(acc, _mm256_madd_epi16(even, x_even));
        return in_place(_mm256_add_epi32(acc, _mm256_madd_epi16(odd, x_odd)));
#endif
    }
    // acc[row] += sum of w[row][i] x[i], w unsigned, x signed (four int8 in a word)
    PRONK_INLINE I dot4(I acc, Bytes w, I x) { return {dot(acc.a, w.a, x.a), dot(acc.b, w.b, x.b)}; }

    // As words, bytes are multiplied in two instructions for 16, four of which are for what dot() makes words of each time.
    static constexpr bool widens_pairs = true, tiles = false;
#ifdef __AVXVNNI__
    static constexpr bool widens_bytes = false, sums_narrow = false;
#else
    static constexpr bool widens_bytes = true, sums_narrow = true;
#endif
    PRONK_INLINE I even_words(Bytes x) {
        const __m256i low = _mm256_set1_epi16(255);
        return {_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low)};
    }
    PRONK_INLINE I odd_words(Bytes x) { return {_mm256_srli_epi16(x.a, 8), _mm256_srli_epi16(x.b, 8)}; }
    PRONK_INLINE void widen_bytes(const void* p, int16_t* even, int16_t* odd) {  // 32 signed ones
        const __m256i x = _mm256_loadu_si256((const __m256i*)p);
        _mm256_storeu_si256((__m256i*)even, _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
        _mm256_storeu_si256((__m256i*)odd, _mm256_srai_epi16(x, 8));
    }
    // acc[row] += w[row][0] x[0] + w[row][1] x[1], of words
    PRONK_INLINE I dot_words(I acc, I w, I x) {
        acc = add_int(acc, {_mm256_madd_epi16(w.a, x.a), _mm256_madd_epi16(w.b, x.b)});
        return {in_place(acc.a), in_place(acc.b)};
    }

    // acc[row] += w[row] x of one word, or of two; sums of both fit in 16 bits
    PRONK_INLINE __m256i narrow_sum(__m256i acc, __m256i sum) {
        return in_place(_mm256_add_epi32(acc, _mm256_madd_epi16(sum, _mm256_set1_epi16(1))));
    }
    PRONK_INLINE I dot_narrow(I acc, Bytes w, I x) {
        return {narrow_sum(acc.a, _mm256_maddubs_epi16(w.a, x.a)), narrow_sum(acc.b, _mm256_maddubs_epi16(w.b, x.b))};
    }
    PRONK_INLINE I dot_narrow(I acc, Bytes w, I x, Bytes v, I y) {
        const __m256i a = _mm256_add_epi16(_mm256_maddubs_epi16(w.a, x.a), _mm256_maddubs_epi16(v.a, y.a));
        const __m256i b = _mm256_add_epi16(_mm256_maddubs_epi16(w.b, x.b), _mm256_maddubs_epi16(v.b, y.b));
        return {narrow_sum(acc.a, a), narrow_sum(acc.b, b)};
    }
    // 32 signed bytes as four times two words. Bits of those that do not fit, whose second word `out` has as a zero: of the first two
    // numbers of both words, or of the last two, what is over 0 is over `most` together, or what is under 0 is under -most.
    PRONK_INLINE uint32_t take_fitting(const void* p, void* out, int most) {
        const __m256i x = _mm256_loadu_si256((const __m256i*)p), zero = _mm256_setzero_si256(), ones = _mm256_set1_epi8(1);
        const auto sums = [=](__m256i numbers) {
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_max_epi8(numbers, zero), ones);
            return _mm256_add_epi16(pairs, _mm256_srli_epi64(pairs, 32));
        };
        const __m256i largest = _mm256_max_epi16(sums(x), sums(_mm256_sub_epi8(zero, x)));
        const __m256i over = _mm256_cmpgt_epi16(largest, _mm256_set1_epi16((short)most));  // in the low half of two words
        const __m256i last = _mm256_andnot_si256(_mm256_cmpeq_epi32(_mm256_slli_epi64(over, 32), zero), _mm256_set1_epi64x((long long)0xffffffff00000000));
        _mm256_storeu_si256((__m256i*)out, _mm256_andnot_si256(last, x));
        return (uint32_t)_mm256_movemask_pd(_mm256_castsi256_pd(last));
    }

    PRONK_INLINE void store_bytes(void* p, Bytes x) { store_int((int32_t*)p, x); }
    // In place, or else GCC 12 shifts first what is put together later, and has no registers left.
    PRONK_INLINE Bytes either(Bytes x, Bytes y) { return {in_place(_mm256_or_si256(x.a, y.a)), in_place(_mm256_or_si256(x.b, y.b))}; }
    // What is left of each byte under the mask after kShift bits to the right.
    template <int kShift, int kMask>
    PRONK_INLINE Bytes field(Bytes x) {
        const __m256i mask = _mm256_set1_epi8((char)kMask);
        if constexpr (kShift > 0) x = {_mm256_srli_epi16(x.a, kShift), _mm256_srli_epi16(x.b, kShift)};
        return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
    }
    PRONK_INLINE Bytes look_up(const uint8_t* table, Bytes x) {  // of 16
        const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
        return {_mm256_shuffle_epi8(t, x.a), _mm256_shuffle_epi8(t, x.b)};
    }
    PRONK_INLINE F load_nibbles(const void* p, int shift) {  // bits [shift, shift + 4) of 16 bytes
        const __m128i x = _mm_and_si128(_mm_srl_epi16(_mm_loadu_si128((const __m128i*)p), _mm_cvtsi32_si128(shift)), _mm_set1_epi8(15));
        return to_float({_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(x, x))});
    }
    PRONK_INLINE void nibbles(const void* p, F& low, F& high) {  // both halves of 16 bytes
        const __m128i x = _mm_loadu_si128((const __m128i*)p);
        const __m256i a = _mm256_cvtepu8_epi32(x), b = _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(x, x)), mask = _mm256_set1_epi32(15);
        low = to_float({_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)});
        high = to_float({_mm256_srli_epi32(a, 4), _mm256_srli_epi32(b, 4)});
    }
#ifdef __AVXVNNI__
#include "simd_sums.inl"
    PRONK_INLINE I dot_short(I acc, Bytes w, I x) { return dot4(acc, w, x); }
#else
    // Small codes are summed in 16 bits: of each row the first two of a word of four, and in the high half the others. What widens
    // such sums multiplies them as well.
    static constexpr bool sums_in_words = false, joins_parts = true;
    PRONK_INLINE int32_t sums(I x) {
        const __m256i s = _mm256_add_epi32(x.a, x.b);
        const __m128i q = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1)), pairs = _mm_hadd_epi32(q, q);
        return _mm_cvtsi128_si32(_mm_packs_epi32(pairs, pairs));
    }
    PRONK_INLINE int32_t total(int32_t sums) { return (int16_t)sums + (sums >> 16); }
    PRONK_INLINE int32_t plus(int32_t x, int32_t y) { return (uint16_t)(x + y) | (int32_t)((uint32_t)((x >> 16) + (y >> 16)) << 16); }
    PRONK_INLINE int32_t times(int32_t sums, int factor) { return (uint16_t)(sums * factor) | (int32_t)((uint32_t)((sums >> 16) * factor) << 16); }
    PRONK_INLINE I begin(int32_t sums, int factor) {
        const __m256i s = _mm256_mullo_epi16(_mm256_set1_epi32(sums), _mm256_set1_epi16((int16_t)factor));
        return {s, s};
    }
    PRONK_INLINE I add_short(I x, I y) { return {_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)}; }
    PRONK_INLINE I dot_short(I acc, Bytes w, I x) {
        acc = add_short(acc, {_mm256_maddubs_epi16(w.a, x.a), _mm256_maddubs_epi16(w.b, x.b)});
        return {in_place(acc.a), in_place(acc.b)};
    }
    PRONK_INLINE I widened(I x) {
        const __m256i ones = _mm256_set1_epi16(1);
        return {_mm256_madd_epi16(x.a, ones), _mm256_madd_epi16(x.b, ones)};
    }
    // The same times a factor of each row, which is in both halves of its word.
    PRONK_INLINE I widened(I x, I factors) { return {_mm256_madd_epi16(x.a, factors.a), _mm256_madd_epi16(x.b, factors.b)}; }
    PRONK_INLINE I in_both_halves(__m256i words) {
        const __m256i w = _mm256_permute4x64_epi64(words, 0xd8);
        return {_mm256_unpacklo_epi16(w, w), _mm256_unpackhi_epi16(w, w)};
    }
    PRONK_INLINE I factors_int8(const void* p) { return in_both_halves(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p))); }
    PRONK_INLINE I factors_nibbles(const void* p) {
        return in_both_halves(_mm256_and_si256(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), _mm256_set1_epi16(15)));
    }
#endif

    PRONK_INLINE Pairs load_pairs(const void* p) { return load_bytes(p); }
    PRONK_INLINE F first_floats(Pairs x) {
        return {_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16))};
    }
    PRONK_INLINE F second_floats(Pairs x) {
        const __m256i high = _mm256_set1_epi32((int)0xffff0000);
        return {_mm256_castsi256_ps(_mm256_and_si256(x.a, high)), _mm256_castsi256_ps(_mm256_and_si256(x.b, high))};
    }
    PRONK_INLINE void widen_pairs(const uint16_t* p, float* first, float* second) {  // 32 bfloat16
        const Pairs x = load_pairs(p);
        store(first, first_floats(x)), store(second, second_floats(x));
    }
    PRONK_INLINE __m256 dot_pairs(__m256 acc, __m256i w, __m256i x) {
        const __m256i high = _mm256_set1_epi32((int)0xffff0000);
        acc = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), acc);
        return in_place(_mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(w, high)), _mm256_castsi256_ps(_mm256_and_si256(x, high)), acc));
    }
    // acc[row] += w[row][0] x[0] + w[row][1] x[1]
    PRONK_INLINE F dot2(F acc, Pairs w, I x) { return {dot_pairs(acc.a, w.a, x.a), dot_pairs(acc.b, w.b, x.b)}; }

    PRONK_INLINE void store_f16(uint16_t* p, F x) {
        _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
        _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
    }
    PRONK_INLINE __m256i to_bf16(__m256 x) {  // to nearest even; NaN stays NaN
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i bias = _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff));
        const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    }
    PRONK_INLINE void store_bf16(uint16_t* p, F x) {
        const __m256i words = _mm256_packus_epi32(to_bf16(x.a), to_bf16(x.b));
        _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(words, 0xd8));
    }
};

}  // namespace
