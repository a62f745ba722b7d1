// Rows of weights rounded to one of GGUF's block types; see kernels_rounding.cpp, and pronk/calibrate/gptq.py for why.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pronk {

// What a block type can hold: pronk/calibrate/grids.py has the table.
struct Rule {
    int block;         // weights of a block
    int group;         // weights with a scale of their own, a divisor of `block`
    int low, high;     // codes
    bool minimum;      // weight = scale * code + minimum, rather than scale * code
    bool numbers;      // scale = d * n and minimum = -dmin * m, with n in [least, most] and m in [0, most]; or else float16
    int least, most;
    bool curved;       // codes are numbers of kCurve alone
};

constexpr int8_t kCurve[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};  // IQ4_NL's
constexpr int kMostGroup = 32, kMostBlock = 256;
constexpr int kRoundedTogether = 16;  // rows, side by side

struct Rounding {
    Rule rule;
    const float* weights;  // [rows][columns], whole blocks
    const float* upper;    // [columns][columns], U of H^-1 = U^T U; or null: inputs are all alike
    int rows, columns;
    int8_t* codes;   // [rows][columns]
    float *d, *dmin;  // [rows][blocks], numbers that float16 has; where a type has no n, the scale itself, and the minimum
    int16_t *n, *m;  // [rows][groups]; 1 where a type has none
    float* scratch;  // rounding_scratch(columns), 64-byte aligned
};

constexpr size_t rounding_scratch(int columns) {
    return (static_cast<size_t>(columns) + kMostGroup) * kRoundedTogether + static_cast<size_t>(columns);
}

}  // namespace pronk
