// What the kernels share, written once over `Simd` and compiled for each instruction set: CMakeLists.txt names its header,
// PRONK_SIMD, and a namespace for it, PRONK_TARGET; PRONK_LIKE, whose kernels it takes but for products; PRONK_PRODUCTS, if any, whose
// products it takes but for those of pairs; and PRONK_TILES, where it multiplies pairs and int8 in tiles, and attends with them, too.
//
// Everything sits in an unnamed namespace but what the table of kernels points to: each instruction set must keep its own
// copy, for the linker would otherwise merge code made for different processors. Every sum runs in an order that knows
// nothing of how many tokens, threads or neighbours there are; the tile templates differ in how many outputs they hold,
// never in how one is summed.
#include PRONK_SIMD

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels.h"

namespace pronk::PRONK_LIKE {

// Defined in kernels_attention.cpp, kernels_sampling.cpp and kernels_rounding.cpp.
std::remove_pointer_t<decltype(Kernels::store_kv)> store_kv;
std::remove_pointer_t<decltype(Kernels::attention)> attention;
std::remove_pointer_t<decltype(Kernels::argmax)> argmax;
std::remove_pointer_t<decltype(Kernels::divide)> divide;
std::remove_pointer_t<decltype(Kernels::exponentials)> exponentials;
std::remove_pointer_t<decltype(Kernels::find)> find;
std::remove_pointer_t<decltype(Kernels::round_rows)> round_rows;

}  // namespace pronk::PRONK_LIKE

#ifdef PRONK_PRODUCTS
namespace pronk::PRONK_PRODUCTS {
std::remove_pointer_t<decltype(Kernels::matmul)> matmul;
std::remove_pointer_t<decltype(Kernels::first_factor)> first_factor;
}  // namespace pronk::PRONK_PRODUCTS
#endif

namespace pronk::PRONK_TARGET {

std::remove_pointer_t<decltype(Kernels::matmul)> matmul;  // kernels_matmul.cpp
std::remove_pointer_t<decltype(Kernels::first_factor)> first_factor;
std::remove_pointer_t<decltype(Kernels::store_kv)> store_kv;  // a set with tiles has these two of its own
std::remove_pointer_t<decltype(Kernels::attention)> attention;
void turn_blocks(const float* x, int count, int block, float* out);  // turn.h's, in place too: kernels.cpp

namespace {

using S = Simd;
using F = S::F;
using I = S::I;

constexpr int kVectors = kPanelRows / 16;  // vectors of 16 rows in a panel

inline int32_t word(const void* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return x;
}

inline float number(const void* p) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
}

inline F load_part(const float* p, int count) {  // what is not there reads as zero
    if (count >= 16) return S::load(p);
    float part[16] = {};
    std::memcpy(part, p, count * sizeof(float));
    return S::load(part);
}

inline void store_part(float* p, F x, int count) {
    if (count >= 16) return S::store(p, x);
    float part[16];
    S::store(part, x);
    std::memcpy(p, part, count * sizeof(float));
}

inline F exp(F x) {  // within 2 units in the last place; exactly 0 where that would be no normal number
    x = S::max(S::set(-150.0f), x);  // in this order NaN passes
    const F n = S::whole(S::mul(x, S::set(1.44269504f)));
    F r = S::fma(n, S::set(-0.693145752f), x);
    r = S::fma(n, S::set(-1.42860677e-6f), r);
    F p = S::set(1.0f / 720);
    p = S::fma(p, r, S::set(1.0f / 120));
    p = S::fma(p, r, S::set(1.0f / 24));
    p = S::fma(p, r, S::set(1.0f / 6));
    p = S::fma(p, r, S::set(0.5f));
    p = S::fma(p, r, S::set(1.0f));
    p = S::fma(p, r, S::set(1.0f));
    return S::times_power_of_two(p, n);
}

// -- register tiles: a few tokens times 16 to 64 rows of a panel ------------------------------------------------------
//
// An Op is how one step of k reads weights, and what it does with them: `vector` bytes hold 16 rows of a step, `step`
// columns are in it; activations take four bytes a step in every format. `streamed`: from memory, where tokens are few.

struct OpF32 {
    static constexpr int vector = 64, step = 1;
    static constexpr bool streamed = true;
    using Acc = F;
    using W = F;
    using X = F;
    PRONK_INLINE W weights(const uint8_t* p) { return S::load((const float*)p); }
    PRONK_INLINE X broadcast(const uint8_t* p) { return S::set(number(p)); }
    PRONK_INLINE Acc dot(Acc acc, W w, X x) { return S::fma(w, x, acc); }
};

struct OpF16 : OpF32 {
    static constexpr int vector = 32;
    PRONK_INLINE W weights(const uint8_t* p) { return S::load_f16(p); }
};

struct OpBF16 {
    static constexpr int vector = 64, step = 2;
    static constexpr bool streamed = true;
    using Acc = F;
    using W = S::Pairs;
    using X = I;
    PRONK_INLINE W weights(const uint8_t* p) { return S::load_pairs(p); }
    PRONK_INLINE X broadcast(const uint8_t* p) { return S::set_int(word(p)); }
    PRONK_INLINE Acc dot(Acc acc, W w, X x) { return S::dot2(acc, w, x); }
};

struct OpInt8 {
    static constexpr int vector = 64, step = 4;
    static constexpr bool streamed = true;
    using Acc = I;
    using W = S::Bytes;
    using X = I;
    PRONK_INLINE W weights(const uint8_t* p) { return S::load_bytes(p); }
    PRONK_INLINE X broadcast(const uint8_t* p) { return S::set_int(word(p)); }
    PRONK_INLINE Acc dot(Acc acc, W w, X x) { return S::dot4(acc, w, x); }
};

// How many vectors of rows a register tile for T tokens can have: accumulators, weights for all tokens, and a broadcast.
constexpr int tile_vectors(int tokens, int accumulators) {
    for (int r = kVectors; r > 1; r /= 2)
        if ((r * tokens * accumulators + (tokens > 1 ? r : 1)) * S::registers_per_vector + 1 <= S::registers) return r;
    return 1;
}

constexpr int tile_tokens(int accumulators) {
    int t = kTileTokens;
    while (t > 1 && (t * accumulators + 1) * S::registers_per_vector + 1 > S::registers) --t;
    return t;
}

// Whether there are registers for many sums; and how many tokens a tile of all rows of a panel may have: such a one reads whole
// lines, in their order.
constexpr bool kRoomy = S::registers / S::registers_per_vector >= 32;
constexpr int kWhole = kRoomy ? 3 : 2;

constexpr int kGroupsAtOnce = 4, kTokensAtOnce = 60;  // what of a panel is unpacked, and how many share it

// Tokens in tiles of as many as a tile may have, and less at last: add(number of tokens, the first).
template <int kMost, bool kThree = false, class Add>  // kThree: the last three are one tile
PRONK_INLINE void in_tiles(int tokens, const Add& add) {
    int t = 0;
    if constexpr (kMost > 4) {
        const auto fours = [](int rest) { return rest % 4 == 0 && rest / 4 <= (rest + kMost - 1) / kMost; };  // are no more tiles
        for (; t + kMost <= tokens && !fours(tokens - t); t += kMost) add(std::integral_constant<int, kMost>(), t);
    }
    constexpr int some = kMost < 4 ? kMost : 4;
    for (; t + some <= tokens; t += some) add(std::integral_constant<int, some>(), t);
    if constexpr (kThree && some > 3) {
        if (t + 3 == tokens) return add(std::integral_constant<int, 3>(), t);
    }
    if constexpr (some > 2) {
        for (; t + 2 <= tokens; t += 2) add(std::integral_constant<int, 2>(), t);
    }
    for (; t < tokens; ++t) add(std::integral_constant<int, 1>(), t);
}

constexpr int kAttentionRows = tile_tokens(1);  // query rows at once

// A decode step reads each weight once, from memory: ask for it this many bytes ahead. At 50 GB/s a core has 6 to 7.5 KB on their
// way while it waits for one line. Tiles of three tokens and more ask further; both leave room in a first-level cache of 32 KB.
constexpr int kPrefetch = 9216, kPrefetchOfTile = 12288;

// Where several tiles go over the same weights, each asks for a part of those that come next: memory would else wait while
// the last of them multiply.
struct Ahead {
    const uint8_t *at, *end;
    int lines;  // at once

    Ahead(const uint8_t* next, size_t bytes, int times) : at(next), end(next + bytes), lines(static_cast<int>(bytes / 64 / times) + 1) {}
    __attribute__((always_inline)) void ask() {
        for (int i = 0; i < lines && at < end; ++i, at += 64) __builtin_prefetch(at);
    }
};

// What a tile of R vectors asks for while it goes over a part of a panel, kWords words of each row at a step: its passes ask for the
// lines behind the part in their order, for memory is slower in any other, or for those that half of a panel lies in.
template <int kWords, int R>
struct Asked {
    static constexpr int lines = kWords * R;
    static_assert(lines <= kVectors / 2);
    const uint8_t* at;
    int step;

    Asked(const uint8_t* part, int steps, int v, int vectors) {
        const bool whole = vectors == kVectors;
        step = whole ? lines * 64 : kLineBytes;
        at = part + kPrefetch + (whole ? v * kWords * steps * 64 : v / 2 * 128 + v % 2 * (lines == 1 ? 64 : steps * step));
    }
    __attribute__((always_inline)) void next() {
#pragma GCC unroll 2
        for (int i = 0; i < lines; ++i) __builtin_prefetch(at + i * 64);
        at += step;
    }
};

// In its place for tiles after the first, or where codes are in the cache already: a look at each step costs prompts a thirtieth.
struct NothingAsked {
    void next() {}
};

// acc[t][r] += over `steps` steps; `w` points at the first of R vectors in a row of kVectors.
template <class Op, int R, int T, int kAsking = 2>  // kAsking: tokens of the largest tile that asks for what it will read
PRONK_INLINE void accumulate(const uint8_t* w, const uint8_t* x, size_t stride, int steps, typename Op::Acc (&acc)[T][R]) {
    for (int s = 0; s < steps; ++s, w += kVectors * Op::vector, x += 4) {
        typename Op::W weights[R];
        if constexpr (T <= kAsking && Op::streamed) {
            constexpr int distance = T <= 2 ? kPrefetch : kPrefetchOfTile;
            for (int line = 0; line < R * Op::vector; line += 64) __builtin_prefetch(w + distance + line);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) weights[r] = Op::weights(w + r * Op::vector);
#pragma GCC unroll 6
        for (int t = 0; t < T; ++t) {
            const typename Op::X broadcast = Op::broadcast(x + t * stride);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) acc[t][r] = Op::dot(acc[t][r], weights[r], broadcast);
        }
    }
}

}  // namespace

}  // namespace pronk::PRONK_TARGET
