// AMX's instructions (Intel's architectures manual, volume 1, chapter 18). At a step one multiplies up to 16 tokens with 16 rows of a
// panel, 64 bytes of each, and a panel is what it wants as it is: a line has four bytes of each of 64 rows, and 16 lines are four
// tiles side by side.
//
// Of bfloat16 it sums the products of the first numbers of a step's 16 pairs, those of the second ones, adds both, and adds that to
// what was there. So who multiplies pairs with AMX does so for any number of tokens. A last step is filled up with zeros, which
// change no sum.
#pragma once

namespace pronk::PRONK_TARGET {

namespace {

constexpr int kAmxRows = 16, kAmxBytes = 64;  // of a tile
constexpr int kAmxLines = kAmxBytes / 4;      // of a panel

// Instructions as text: of GCC 12's intrinsics a load does not say what memory it reads, nor a shape all of it, and the compiler drops
// what was stored there.
// Sums are tiles 0 to 3, x 4 and 5, weights 6 and 7.
struct Amx {
    struct alignas(64) Shape {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    };

    // Of `first` tokens times 64 rows, or of these and `second` ones times 32.
    PRONK_INLINE void shape(int first, int second) {
        Shape shape;
        for (int tile = 0; tile < 8; ++tile) {
            const bool of_second = second && (tile == 2 || tile == 3 || tile == 5);
            shape.bytes[tile] = kAmxBytes;
            shape.rows[tile] = static_cast<uint8_t>(tile > 5 ? kAmxLines : of_second ? second : first);
        }
        asm volatile("ldtilecfg %0" ::"m"(shape));
    }
    PRONK_INLINE void release() { asm volatile("tilerelease"); }  // else the system saves 8 KB more of the thread

    template <int kTile>
    PRONK_INLINE void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(kTile)); }
    template <int kTile>
    PRONK_INLINE void load(const void* p, size_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
    }
    template <int kTile>
    PRONK_INLINE void store(void* p, size_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
    }
    PRONK_INLINE void zero_all() { zero<0>(), zero<1>(), zero<2>(), zero<3>(); }
    // sums += x times weights. Bytes of x are signed, those of weights are not.
    template <bool kPairs, int kSums, int kX, int kWeights>
    PRONK_INLINE void dot() {
        if constexpr (kPairs) asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kX), "i"(kWeights));
        else asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kX), "i"(kWeights));
    }
    // All 64 rows of a panel at one step of up to 16 tokens, which are `stride` bytes apart.
    template <bool kPairs>
    PRONK_INLINE void add_whole(const uint8_t* w, const uint8_t* x, size_t stride) {
        load<4>(x, stride);
        load<6>(w, kLineBytes), dot<kPairs, 0, 4, 6>(), load<7>(w + 64, kLineBytes), dot<kPairs, 1, 4, 7>();
        load<6>(w + 128, kLineBytes), dot<kPairs, 2, 4, 6>(), load<7>(w + 192, kLineBytes), dot<kPairs, 3, 4, 7>();
    }
    PRONK_INLINE void store_whole(float* to, size_t stride) {  // in bytes
        store<0>(to, stride), store<1>(to + 16, stride), store<2>(to + 32, stride), store<3>(to + 48, stride);
    }
};

}  // namespace

}  // namespace pronk::PRONK_TARGET
