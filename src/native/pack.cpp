// Weights into panels. The numerics are those of quantize.py, to the bit.
//
// No intrinsics: this is compiled once, for the oldest processors, and its inner loops are written for the vectorizer.
// They take no branches, and what is summed is summed in one order on every processor.

#include <vector>

#include "pack.h"
#include "q4_fit.h"
#include "turn.h"

namespace pronk {

namespace {

// -- floats -> codes ------------------------------------------------------------------------------------------------

// To the nearest whole number, ties to even; |x| < 2^22.
float nearest(float x) {
    constexpr float magic = 0x1.8p23f;
    return x + magic - magic;
}

float clamp(float x, float low, float high) {
    x = x < low ? low : x;
    return x < high ? x : high;
}

// w / scale as unsigned bytes around 128.
void encode_bytes(const float* x, int count, float scale, uint8_t* out) {
    if (scale == 0) {
        std::memset(out, 128, count);
        return;
    }
    for (int i = 0; i < count; ++i)
        out[i] = static_cast<uint8_t>(static_cast<int32_t>(nearest(clamp(x[i] / scale, -127, 127))) + 128);
}

// The least float16 that is not under x >= 0.
uint16_t f16_not_under(float x) {
    const uint16_t half = f32_to_f16(x);
    return f16_to_f32(half) < x ? half + 1 : half;
}

}  // namespace

bool pack_f32(const Tile& tile, const Chunk& chunk) {
    scatter<float>(tile, static_cast<size_t>(chunk.at) * kPanelRows * sizeof(float), chunk.x, sizeof chunk.x[0], chunk.count);
    return true;
}

bool pack_f16(const Tile& tile, const Chunk& chunk) {
    uint16_t out[kTileRows][kChunk];
    for (int r = 0; r < tile.rows; ++r)
        for (int i = 0; i < chunk.count; ++i) out[r][i] = f32_to_f16(chunk.x[r][i]);
    scatter<uint16_t>(tile, static_cast<size_t>(chunk.at) * kPanelRows * 2, out, sizeof out[0], chunk.count);
    return true;
}

bool pack_bf16(const Tile& tile, const Chunk& chunk) {
    uint16_t out[kTileRows][kChunk];
    for (int r = 0; r < tile.rows; ++r)
        for (int i = 0; i < chunk.count; ++i) out[r][i] = f32_to_bf16(chunk.x[r][i]);
    scatter<uint32_t>(tile, static_cast<size_t>(chunk.at) * kPanelRows * 2, out, sizeof out[0], chunk.count / 2);
    return true;
}

bool pack_int8(const Tile& tile, const Chunk& chunk) {
    uint8_t out[kTileRows][kChunk];
    for (int r = 0; r < tile.rows; ++r) encode_bytes(chunk.x[r], chunk.count, chunk.scales[r], out[r]);
    scatter<uint32_t>(tile, static_cast<size_t>(chunk.at) * kPanelRows, out, sizeof out[0], chunk.count / 4);
    return true;
}

bool pack_q8(const Tile& tile, const Chunk& chunk) {
    uint8_t out[kTileRows][kChunk];
    uint16_t scales[kTileRows][kGroups];
    const int groups = chunk.count / kGroup;
    bool good = true;
    for (int r = 0; r < tile.rows; ++r) {
        const float* x = chunk.x[r];
        float most[kGroups] = {};
        for (int g = 0; g < groups; ++g) most[g] = absolute_maximum(x + g * kGroup, kGroup);
        for (int g = 0; g < kGroups; ++g) scales[r][g] = f16_not_under(most[g] / 127);
        for (int g = 0; g < groups; ++g) {
            good &= f16_is_finite(scales[r][g]);
            encode_bytes(x + g * kGroup, kGroup, f16_to_f32(scales[r][g]), out[r] + g * kGroup);
        }
    }
    for (int g = 0; g < groups; ++g)
        write_q8(tile, chunk.at / kGroup + g, out[0] + g * kGroup, sizeof out[0], scales[0] + g, sizeof scales[0]);
    return good;
}

bool pack_q4(const Tile& tile, const Chunk& chunk) {
    bool good = true;
    for (int g = 0; g < chunk.count / kGroup; ++g) {
        uint8_t codes[kTileRows][kGroup / 2];
        uint16_t scales[kTileRows], minima[kTileRows];
        for (int first = 0; first < tile.rows; first += kLanes) {
            Lanes lanes[kGroup], inverse, minimum;
            for (int k = 0; k < kGroup; ++k)
                for (int i = 0; i < kLanes; ++i) lanes[k][i] = chunk.x[first + i][g * kGroup + k];
            const Fits fits = fit(lanes);
            for (int i = 0; i < kLanes; ++i) {
                scales[first + i] = f32_to_f16(fits.scale[i]);
                minima[first + i] = f32_to_f16(fits.minimum[i]);
                good &= f16_is_finite(scales[first + i]) && f16_is_finite(minima[first + i]);
                const float scale = f16_to_f32(scales[first + i]);
                inverse[i] = scale > 0 ? 1 / scale : 0;
                minimum[i] = f16_to_f32(minima[first + i]);
            }
            if (!good) return false;
            for (int k = 0; k < kGroup / 2; ++k) {
                const Lanes low = codes_of((lanes[k] - minimum) * inverse);
                const Lanes packed = low + 16.f * codes_of((lanes[k + 16] - minimum) * inverse);
                for (int i = 0; i < kLanes; ++i) codes[first + i][k] = static_cast<int32_t>(packed[i]);
            }
        }
        write_four_bits(traits(Format::q4), tile, chunk.at / kGroup + g, codes, scales, minima);
    }
    return good;
}

// As ggml's reference: the weight furthest from zero becomes -8.
bool pack_q4_0(const Tile& tile, const Chunk& chunk) {
    bool good = true;
    for (int g = 0; g < chunk.count / kGroup; ++g) {
        uint8_t codes[kTileRows][kGroup / 2];
        uint16_t scales[kTileRows];
        for (int r = 0; r < tile.rows; ++r) {
            const float* group = chunk.x[r] + g * kGroup;
            const float most = absolute_maximum(group, kGroup);
            float extreme = 0;
            for (int k = kGroup; k-- > 0;) extreme = group[k] == most || group[k] == -most ? group[k] : extreme;
            const float scale = extreme / -8;
            scales[r] = f32_to_f16(scale);
            good &= f16_is_finite(scales[r]);
            const float inverse = scales[r] & 0x7fff ? 1 / scale : 0;
            uint8_t code[kGroup];
            for (int k = 0; k < kGroup; ++k) code[k] = std::min(static_cast<int32_t>(group[k] * inverse + 8.5f), 15);
            for (int k = 0; k < kGroup / 2; ++k) codes[r][k] = code[k] | code[k + 16] << 4;
        }
        write_four_bits(traits(Format::q4_0), tile, chunk.at / kGroup + g, codes, scales, nullptr);
    }
    return good;
}

// -- tiles ----------------------------------------------------------------------------------------------------------

namespace {

// Columns [at, at + count) of a row as the matrix has them.
void read_columns(const Matrix& matrix, const Tile& tile, Source source, int row, int at, int count, float* x) {
    traits(source).read(tile.source + row * tile.stride, at, count, x);
    if (is_turned(matrix.format) != traits(source).turned) turn(x, count, turned_together(matrix.cols));
}

bool row_scales(const Matrix& matrix, const Tile& tile, Source source, float (&scales)[kTileRows]) {
    float x[kChunk];
    for (int r = 0; r < tile.rows; ++r) {
        float most = 0;
        for (int at = 0; at < matrix.cols; at += kChunk) {
            const int count = std::min(kChunk, matrix.cols - at);
            read_columns(matrix, tile, source, r, at, count, x);
            const float here = absolute_maximum(x, count);
            if (!(here < traits(matrix.format).limit)) return false;
            most = std::max(most, here);
        }
        scales[r] = most / 127;
    }
    scatter<float>(tile, static_cast<size_t>(traits(matrix.format).padded(matrix.cols)) * kPanelRows, scales, 4, 1);
    return true;
}

bool pack_tile(const Matrix& matrix, const Tile& tile, Source source) {
    const FormatTraits& format = traits(matrix.format);
    if (format.holds_codes_of(source)) return traits(source).pack_codes(matrix, tile);
    if (!format.pack) return false;
    float scales[kTileRows] = {};
    if (format.scales == Scales::row && !row_scales(matrix, tile, source, scales)) return false;
    Chunk chunk;
    chunk.scales = scales;
    if (tile.rows < kTileRows) std::memset(chunk.x, 0, sizeof chunk.x);
    const int padded = format.padded(matrix.cols);
    for (chunk.at = 0; chunk.at < padded; chunk.at += kChunk) {
        const int count = std::min(kChunk, matrix.cols - chunk.at);
        chunk.count = std::min(kChunk, padded - chunk.at);
        for (int r = 0; r < tile.rows; ++r) {
            float* x = chunk.x[r];
            read_columns(matrix, tile, source, r, chunk.at, count, x);
            if (!(absolute_maximum(x, count) < format.limit)) return false;
            // What pads a row must not change the grid of its last group, which a minimum lays between any two numbers.
            std::fill(x + count, x + chunk.count, format.minima ? x[count - 1] : 0);
        }
        if (!format.pack(tile, chunk)) return false;
    }
    return true;
}

}  // namespace

bool pack_rows(const Matrix& matrix, const uint8_t* src, size_t src_stride, Source source, int64_t begin, int64_t end,
               Placement placement) {
    for (int64_t r = begin; r < end;) {
        const int64_t row = placement.row(r);
        const int first = static_cast<int>(row % kPanelRows), room = kTileRows - first % kTileRows;
        int rows = 1;
        while (rows < room && r + rows < end && placement.row(r + rows) == row + rows) ++rows;
        const Tile tile{src + (r - begin) * src_stride, src_stride, rows,
                        matrix.data + row / kPanelRows * matrix.panel_bytes, first};
        if (!pack_tile(matrix, tile, source)) return false;
        r += rows;
    }
    return true;
}

void pack_zero_rows(const Matrix& matrix, int64_t begin, int64_t end) {
    const FormatTraits& format = traits(matrix.format);
    const Source source = format.pack ? Source::f32 : static_cast<Source>(std::countr_zero(format.codes_of));
    const std::vector<uint8_t> zeros(matrix.cols * sizeof(float));  // which are zeros as blocks, too
    pack_rows(matrix, zeros.data(), 0, source, begin, end, Placement{});
}

}  // namespace pronk
