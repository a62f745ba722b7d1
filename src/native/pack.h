// A tile of weights on its way into a panel: what pack.cpp makes of floats and pack_blocks.cpp of a file's blocks.
#pragma once

#include <algorithm>

#include "source.h"

namespace pronk {

constexpr int kTileRows = 16;             // rows packed together, so that whole 64-byte lines are written
constexpr int kGroups = kChunk / kGroup;  // of a chunk

// Source rows whose packed rows lie side by side in 16 rows of a panel.
struct Tile {
    const uint8_t* source;
    size_t stride;
    int rows;
    uint8_t* panel;
    int first;  // row of the panel
};

// Columns [at, at + count) of a tile; the first-level cache holds it. What K is padded with is in it.
struct Chunk {
    int at, count;
    const float* scales;  // of rows, where the format has such
    alignas(64) float x[kTileRows][kChunk];
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

PackCodes pack_planes_q4_k;  // as the file has it; not with its scales rounded

// A group of codes, each row's 32 bytes, with its scale.
inline void write_q8(const Tile& tile, int group, const uint8_t* codes, size_t code_bytes, const uint16_t* scales,
                     size_t scale_bytes) {
    const size_t offset = static_cast<size_t>(group) * traits(Format::q8).bytes * kPanelRows;
    scatter<uint32_t>(tile, offset, codes, code_bytes, kGroup / 4);
    scatter<uint16_t>(tile, offset + kPanelRows * kGroup, scales, scale_bytes, 1);
}

// A group of codes, each row's 16 bytes of which the low halves come first, into their plane (planes.h), with its scale, and
// its minimum where the format has any.
inline void write_four_bits(const FormatTraits& format, const Tile& tile, int group,
                            const uint8_t (&codes)[kTileRows][kGroup / 2], const uint16_t* scales, const uint16_t* minima) {
    constexpr size_t code_bytes = kGroup / 2 * kPanelRows;
    const size_t offset = static_cast<size_t>(group) * format.bytes * kPanelRows;
    constexpr uint32_t low = 0x0f0f0f0f;
    uint32_t lines[kTileRows][4];
    for (int r = 0; r < tile.rows; ++r)
        for (int line = 0; line < 2; ++line) {
            const auto even = read<uint32_t>(codes[r] + 8 * line), odd = read<uint32_t>(codes[r] + 8 * line + 4);
            lines[r][line] = (even & low) | (odd & low) << 4;
            lines[r][line + 2] = (even >> 4 & low) | (odd & ~low);
        }
    scatter<uint32_t>(tile, offset, lines, sizeof lines[0], 4);
    scatter<uint16_t>(tile, offset + code_bytes, scales, sizeof *scales, 1);
    if (format.minima) scatter<uint16_t>(tile, offset + code_bytes + kPanelRows * 2, minima, sizeof *minima, 1);
}

}  // namespace pronk
