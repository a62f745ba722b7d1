// q4's scale and minimum for a group of floats: of 16 ways to lay the grid 0..15 over the group, each put right by
// least squares, the one that leaves the least squared error. The numerics are those of quantize.py, to the bit.
#pragma once

#include "matrix.h"

namespace pronk {

// A group a lane. Vectors of 16 bytes are what every processor has; GCC and Clang know them without intrinsics.
constexpr int kLanes = 4;
constexpr float kShrink[] = {0, -0.25f, 0.35f, 0.7f};  // steps cut from either end of the grid

using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));

// w = scale * code + minimum
struct Fits {
    Lanes scale, minimum;
};

// The nearest of 0..15, ties to even.
inline Lanes codes_of(Lanes x) {
    constexpr float magic = 0x1.8p23f;
    x = x < 0.f ? Lanes{} : x;
    x = x < 15.f ? x : Lanes{} + 15.f;
    return x + magic - magic;
}

inline Fits fit(const Lanes (&x)[kGroup]) {
    Lanes low = x[0], most = x[0], u[kGroup], sum_u = {};  // u: x, as 0..15 from least to most
    for (int k = 1; k < kGroup; ++k) {
        low = x[k] < low ? x[k] : low;
        most = x[k] > most ? x[k] : most;
    }
    const Lanes step = (most - low) / 15.f;
    const Lanes inverse = step < 0x1p-30f ? Lanes{} : 1.f / step;  // flat, for a scale in float16
    for (int k = 0; k < kGroup; ++k) {
        u[k] = (x[k] - low) * inverse;
        sum_u += u[k];
    }

    Fits best = {};
    Lanes best_gain = {};
    for (const float bottom : kShrink)
        for (const float top : kShrink) {
            const float a = 15 / (15 - bottom - top), b = -bottom * a;
            Lanes sum = {}, sum_squares = {}, sum_products = {};
            for (int k = 0; k < kGroup; ++k) {
                const Lanes codes = codes_of(u[k] * a + b);
                sum += codes;
                sum_squares += codes * codes;
                sum_products += codes * u[k];
            }
            const Lanes variance = float{kGroup} * sum_squares - sum * sum;
            const Lanes covariance = float{kGroup} * sum_products - sum * sum_u;
            const Lanes scale = covariance / variance, gain = scale * covariance;  // NaN where the group is flat
            const Lanes minimum = (sum_u - scale * sum) / float{kGroup};
            const auto better = gain > best_gain;
            best_gain = better ? gain : best_gain;
            best.scale = better ? scale : best.scale;
            best.minimum = better ? minimum : best.minimum;
        }
    best.scale *= step;
    best.minimum = best.minimum * step + low;
    return best;
}

}  // namespace pronk
