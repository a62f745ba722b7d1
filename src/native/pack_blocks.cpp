// Blocks that a format holds as they are: their codes go into panels without becoming floats.

#include "pack.h"

namespace pronk {

bool pack_codes_q8_0(const Matrix& matrix, const Tile& tile) {
    bool good = true;
    for (int group = 0; group < matrix.cols / kGroup; ++group) {
        uint8_t codes[kTileRows][kGroup];
        uint16_t scales[kTileRows];
        for (int r = 0; r < tile.rows; ++r) {
            const uint8_t* block = tile.source + r * tile.stride + group * size_t{34};
            scales[r] = read<uint16_t>(block);
            good &= f16_is_finite(scales[r]);
            for (int k = 0; k < kGroup; ++k) codes[r][k] = block[2 + k] ^ 128;
        }
        write_q8(tile, group, codes[0], sizeof codes[0], scales, sizeof *scales);
    }
    return good;
}

namespace {

// Four-bit blocks: take(row, group, codes, minimum) gives the scale of a row's group.
template <class Take>
bool pack_four_bits(const Matrix& matrix, const Tile& tile, const Take& take) {
    const FormatTraits& format = traits(matrix.format);
    bool good = true;
    for (int group = 0; group < matrix.cols / kGroup; ++group) {
        uint8_t codes[kTileRows][kGroup / 2];
        uint16_t scales[kTileRows], minima[kTileRows];
        for (int r = 0; r < tile.rows; ++r) {
            scales[r] = take(tile.source + r * tile.stride, group, codes[r], minima[r]);
            good &= f16_is_finite(scales[r]) && (!format.minima || f16_is_finite(minima[r]));
        }
        write_four_bits(format, tile, group, codes, scales, minima);
    }
    return good;
}

}  // namespace

// The codes of Q4_0 and Q4_1 lie as a group's do.
bool pack_codes_q4_0(const Matrix& matrix, const Tile& tile) {
    return pack_four_bits(matrix, tile, [](const uint8_t* row, int group, uint8_t* codes, uint16_t& minimum) {
        const uint8_t* block = row + group * size_t{18};
        const uint16_t scale = read<uint16_t>(block);
        minimum = f32_to_f16(-8 * f16_to_f32(scale));
        std::memcpy(codes, block + 2, kGroup / 2);
        return scale;
    });
}

bool pack_codes_q4_1(const Matrix& matrix, const Tile& tile) {
    return pack_four_bits(matrix, tile, [](const uint8_t* row, int group, uint8_t* codes, uint16_t& minimum) {
        const uint8_t* block = row + group * size_t{20};
        minimum = read<uint16_t>(block + 2);
        std::memcpy(codes, block + 4, kGroup / 2);
        return read<uint16_t>(block);
    });
}

bool pack_codes_q4_k(const Matrix& matrix, const Tile& tile) {
    if (traits(matrix.format).scales == Scales::part) return pack_planes_q4_k(matrix, tile);
    return pack_four_bits(matrix, tile, [](const uint8_t* row, int group, uint8_t* codes, uint16_t& minimum) {
        const Q4K block{row + group / 8 * size_t{144}};
        const int part = group % 8, shift = part % 2 * 4;
        const uint8_t* from = block.codes(part);
        for (int k = 0; k < kGroup / 2; ++k) codes[k] = (from[k] >> shift & 15) | (from[k + 16] >> shift & 15) << 4;
        minimum = f32_to_f16(-(block.dmin() * block.minimum(part)));
        return f32_to_f16(block.d() * block.scale(part));
    });
}

bool pack_codes_int8(const Matrix& matrix, const Tile& tile) {
    float scales[kTileRows];
    bool good = true;
    for (int r = 0; r < tile.rows; ++r) {
        scales[r] = read<float>(tile.source + r * tile.stride);
        good &= absolute_maximum(scales + r, 1) < traits(matrix.format).limit;
    }
    const int padded = traits(matrix.format).padded(matrix.cols);
    scatter<float>(tile, static_cast<size_t>(padded) * kPanelRows, scales, sizeof *scales, 1);
    for (int at = 0; at < padded; at += kChunk) {
        const int count = std::min(kChunk, matrix.cols - at), stored = std::min(kChunk, padded - at);
        uint8_t codes[kTileRows][kChunk];
        for (int r = 0; r < tile.rows; ++r) {
            const uint8_t* row = tile.source + r * tile.stride + sizeof(float) + at;
            for (int k = 0; k < count; ++k) codes[r][k] = row[k] ^ 128;
            std::fill(codes[r] + count, codes[r] + stored, 128);
        }
        scatter<uint32_t>(tile, static_cast<size_t>(at) * kPanelRows, codes, sizeof codes[0], stored / 4);
    }
    return good;
}

}  // namespace pronk
