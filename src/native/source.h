// Rows as files have them: floats, int8 with a scale a row, and GGUF's blocks. source.cpp reads them as formats.h says.
#pragma once

#include <cstring>

#include "half.h"
#include "matrix.h"

namespace pronk {

constexpr int kChunk = 256;  // columns read at once: whole blocks of every type

// Files align nothing.
template <class T>
T read(const uint8_t* p) {
    T x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// A block of Q4_K: eight groups of 32, whose scales and minima are six bits times a float16.
struct Q4K {
    const uint8_t* block;
    int scale(int group) const { return six_bits(group, block + 4); }
    int minimum(int group) const { return six_bits(group, block + 8); }
    float d() const { return f16_to_f32(read<uint16_t>(block)); }
    float dmin() const { return f16_to_f32(read<uint16_t>(block + 2)); }
    const uint8_t* codes(int group) const { return block + 16 + group / 2 * 32; }  // high halves where group is odd

private:
    int six_bits(int group, const uint8_t* p) const {
        if (group < 4) return p[group] & 63;
        const int low = block[12 + group - 4] >> (p == block + 4 ? 0 : 4) & 15;
        return low | (p[group - 4] >> 2 & 48);
    }
};

}  // namespace pronk
