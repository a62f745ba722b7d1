// A tile of weights on its way into a panel: what pack.cpp makes of floats and pack_blocks.cpp of a file's blocks.
#pragma once

#include <algorithm>
#include <limits>

#include "source.h"

namespace pronk {

constexpr int kTileRows = 16;             // rows packed together, so that whole 64-byte lines are written
constexpr int kGroups = kChunk / kGroup;  // of a chunk; the first-level cache holds 16 rows of it

using Floats = float[kTileRows][kChunk];

// Source rows whose packed rows lie side by side in 16 rows of a panel.
struct Tile {
    const uint8_t* source;
    size_t stride;
    int rows;
    uint8_t* panel;
    int first;  // row of the panel
};

template <class T>
void write(uint8_t* p, T x) {
    std::memcpy(p, &x, sizeof x);
}

// Words of every row, `row_bytes` apart, to where the panel has them: one line of 64 rows a word.
template <class Word>
void scatter(const Tile& tile, size_t offset, const void* words, size_t row_bytes, int count) {
    const auto* from = static_cast<const uint8_t*>(words);
    uint8_t* to = tile.panel + offset + tile.first * sizeof(Word);
    const auto copy = [=](int rows) {
        for (int i = 0; i < count; ++i)
            for (int r = 0; r < rows; ++r)
                write(to + (i * kPanelRows + r) * sizeof(Word), read<Word>(from + r * row_bytes + i * sizeof(Word)));
    };
    tile.rows == kTileRows ? copy(kTileRows) : copy(tile.rows);  // the usual case unrolled
}

// NaN where any is.
inline float absolute_maximum(const float* x, int count) {
    int32_t most = 0;  // of the bits, which are ordered as the numbers are, NaN above all
    for (int i = 0; i < count; ++i) most = std::max(most, std::bit_cast<int32_t>(x[i]) & 0x7fffffff);
    return std::bit_cast<float>(most);
}

// The least number too large for a format; scales have limits of their own.
inline float limit(Format format) {
    switch (format) {
        case Format::f16: return 65520;  // half a step over the greatest
        case Format::bf16: return 0x1.ffp127f;
        default: return std::numeric_limits<float>::infinity();
    }
}

inline void write_q4(const Tile& tile, int group, const uint8_t (&codes)[kTileRows][kGroup / 2], const uint16_t* scales,
                     const uint16_t* minima) {
    const size_t offset = static_cast<size_t>(group) * (kQ4CodeBytes + kPanelRows * (minima ? 4 : 2));
    scatter<uint32_t>(tile, offset, codes, sizeof codes[0], kGroup / 8);
    scatter<uint16_t>(tile, offset + kQ4CodeBytes, scales, sizeof *scales, 1);
    if (minima) scatter<uint16_t>(tile, offset + kQ4CodeBytes + kPanelRows * 2, minima, sizeof *minima, 1);
}

// Whether the format holds the source's codes as they are, and the packing of these.
bool is_direct(Source source, Format format);
bool pack_direct(const Matrix& matrix, const Tile& tile, Source source);

}  // namespace pronk
