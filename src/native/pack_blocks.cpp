// Blocks that a format holds as they are: their codes go into panels without becoming floats.

#include "pack.h"

namespace pronk {

namespace {

bool pack_q8_0(const Tile& tile, int group) {
    uint8_t codes[kTileRows][kGroup];
    uint16_t scales[kTileRows];
    bool good = true;
    for (int r = 0; r < tile.rows; ++r) {
        const uint8_t* block = tile.source + r * tile.stride + group * size_t{34};
        scales[r] = read<uint16_t>(block);
        good &= f16_is_finite(scales[r]);
        for (int k = 0; k < kGroup; ++k) codes[r][k] = block[2 + k] ^ 128;
    }
    scatter<uint32_t>(tile, static_cast<size_t>(group) * kQ8GroupBytes, codes, sizeof codes[0], kGroup / 4);
    scatter<uint16_t>(tile, static_cast<size_t>(group) * kQ8GroupBytes + kPanelRows * kGroup, scales, sizeof *scales, 1);
    return good;
}

// Four-bit blocks: the codes of Q4_0 and Q4_1 lie as a group's do.
bool pack_nibbles(const Tile& tile, Source source, Format format, int group) {
    uint8_t codes[kTileRows][kGroup / 2];
    uint16_t scales[kTileRows], minima[kTileRows];
    bool good = true;
    for (int r = 0; r < tile.rows; ++r) {
        const uint8_t* row = tile.source + r * tile.stride;
        if (source == Source::q4_k) {
            const Q4K block{row + group / 8 * size_t{144}};
            const int part = group % 8, shift = part % 2 * 4;
            const uint8_t* from = block.codes(part);
            for (int k = 0; k < kGroup / 2; ++k)
                codes[r][k] = (from[k] >> shift & 15) | (from[k + 16] >> shift & 15) << 4;
            scales[r] = f32_to_f16(block.d() * block.scale(part));
            minima[r] = f32_to_f16(-(block.dmin() * block.minimum(part)));
        } else {
            const bool has_minimum = source == Source::q4_1;
            const uint8_t* block = row + group * size_t{has_minimum ? 20u : 18u};
            scales[r] = read<uint16_t>(block);
            minima[r] = has_minimum ? read<uint16_t>(block + 2) : f32_to_f16(-8 * f16_to_f32(scales[r]));
            std::memcpy(codes[r], block + (has_minimum ? 4 : 2), kGroup / 2);
        }
        good &= f16_is_finite(scales[r]) && (format == Format::q4_0 || f16_is_finite(minima[r]));
    }
    write_q4(tile, group, codes, scales, format == Format::q4 ? minima : nullptr);
    return good;
}

bool pack_int8_row(const Matrix& matrix, const Tile& tile) {
    float scales[kTileRows];
    bool good = true;
    for (int r = 0; r < tile.rows; ++r) {
        scales[r] = read<float>(tile.source + r * tile.stride);
        good &= absolute_maximum(scales + r, 1) < limit(matrix.format);
    }
    const int padded = padded_cols(matrix.format, matrix.cols);
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

}  // namespace

bool is_direct(Source source, Format format) {
    switch (source) {
        case Source::int8_row: return has_row_scales(format);
        case Source::q8_0: return format == Format::q8;
        case Source::q4_0: return format == Format::q4 || format == Format::q4_0;
        case Source::q4_1:
        case Source::q4_k: return format == Format::q4;
        default: return false;
    }
}

bool pack_direct(const Matrix& matrix, const Tile& tile, Source source) {
    if (source == Source::int8_row) return pack_int8_row(matrix, tile);
    bool good = true;
    for (int group = 0; group < padded_cols(matrix.format, matrix.cols) / kGroup; ++group)
        good &= source == Source::q8_0 ? pack_q8_0(tile, group) : pack_nibbles(tile, source, matrix.format, group);
    return good;
}

}  // namespace pronk
