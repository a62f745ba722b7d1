// Fast Hadamard transforms of the blocks of a row, as formats/turn.py has them: what is large in a few numbers is spread
// over all of a block, which rounds to whole numbers with less loss. A turned row of activations times a turned row of
// weights is the same product. Sums and differences have one order in every instruction set, and so one result.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "source.h"

namespace pronk {

constexpr int kMostTurned = kChunk;  // numbers of a block: packing turns a chunk at a time

// All that follows is a file's own: it is compiled for many instruction sets.

// Numbers of a block: the largest power of two, up to kMostTurned, that divides the row.
static inline int turned_together(int cols) { return std::min(cols & -cols, kMostTurned); }

static inline void turn_stage(const float* __restrict from, float* __restrict to, int half) {
    for (int i = 0; i < half; ++i) {
        const float a = from[i], b = from[i + half];
        to[2 * i] = a + b, to[2 * i + 1] = a - b;
    }
}

// Whole blocks. Turned twice, a row is itself again, but for rounding.
static inline void turn(float* x, int count, int block) {
    float other[kMostTurned];
    const float scale = 1 / std::sqrt(static_cast<float>(block));
    for (const float* end = x + count; x != end; x += block) {
        float *from = x, *to = other;
        for (int stages = block; stages > 1; stages /= 2) turn_stage(from, to, block / 2), std::swap(from, to);
        for (int i = 0; i < block; ++i) x[i] = from[i] * scale;
    }
}

}  // namespace pronk
