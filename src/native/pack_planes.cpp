// Blocks of 2 to 6 bits into planes (planes.h), and back to floats. Sums and products are those of gguf_blocks.py.
#include "planes.h"

#include "pack.h"

namespace pronk {

namespace {

constexpr uint32_t in_each_byte(uint32_t mask) { return mask * 0x01010101u; }

// A block of each row of a tile, at its block of a panel.
void write_planes(const FormatTraits& format, const Tile& tile, uint8_t* block, const Taken (&rows)[kTileRows]) {
    const PlaneLayout layout(format);
    const auto put_bytes = [&](uint8_t* to, const auto& of) {
        for (int r = 0; r < tile.rows; ++r) to[tile.first + r] = static_cast<uint8_t>(of(rows[r]));
    };
    const auto put_halves = [&](uint8_t* to, const auto& of) {
        for (int r = 0; r < tile.rows; ++r) write<uint16_t>(to + (tile.first + r) * 2, of(rows[r]));
    };
    for (int g = 0; g < format.columns / kGroup; ++g) {
        uint8_t* group = block + g * layout.group;
        uint32_t steps[kSteps][kTileRows];
        for (int s = 0; s < kSteps; ++s)
            for (int r = 0; r < kTileRows; ++r) steps[s][r] = read<uint32_t>(rows[r].codes + g * kGroup + 4 * s);
        uint32_t lines[8][kTileRows] = {};
        for (int s = 0; s < kSteps; ++s) {
            const Pieces found = pieces(format.bits, s);
            for (int i = 0; i < found.count; ++i) {
                const Piece& piece = found.of[i];
                const uint32_t mask = in_each_byte((1 << piece.count) - 1);
                for (int r = 0; r < kTileRows; ++r) lines[piece.line][r] |= (steps[s][r] >> piece.to & mask) << piece.from;
            }
        }
        for (int line = 0; line < format.bits; ++line)
            std::memcpy(group + line * kLineBytes + tile.first * 4, lines[line], tile.rows * sizeof **lines);
        if (format.scales != Scales::part) continue;
        for (int h = 0; h < kGroup / format.part; ++h) {
            const int p = g * kGroup / format.part + h;
            if (shares_bytes(format)) {
                put_bytes(group + layout.scale(h), [=](const Taken& t) { return t.scales[p] | t.minima[p] << 4; });
                continue;
            }
            put_bytes(group + layout.scale(h), [=](const Taken& t) { return t.scales[p]; });
            if (format.minima) put_bytes(group + layout.minimum(format, h), [=](const Taken& t) { return t.minima[p]; });
        }
    }
    put_halves(block + layout.halves, [](const Taken& t) { return t.scale; });
    if (format.minima) put_halves(block + layout.minimum_half(), [](const Taken& t) { return t.minimum; });
}

bool pack_planes(const Matrix& matrix, const Tile& tile, Take* take, int bytes) {
    const FormatTraits& format = traits(matrix.format);
    Taken rows[kTileRows];
    bool good = true;
    for (int b = 0; b < matrix.cols / format.columns; ++b) {
        for (int r = 0; r < tile.rows; ++r) {
            take(tile.source + r * tile.stride + b * size_t(bytes), rows[r]);
            good &= f16_is_finite(rows[r].scale) && (!format.minima || f16_is_finite(rows[r].minimum));
        }
        write_planes(format, tile, tile.panel + b * static_cast<size_t>(format.bytes) * kPanelRows, rows);
    }
    return good;
}

// What parts of a row stand for.
struct Part {
    float scale, minimum;
};

Part part_of(const FormatTraits& format, uint16_t scale, uint16_t minimum, int whole_scale, int whole_minimum) {
    const bool whole = format.scales == Scales::part;
    return {whole ? f16_to_f32(scale) * whole_scale : f16_to_f32(scale),
            !format.minima ? 0 : whole ? f16_to_f32(minimum) * whole_minimum : f16_to_f32(minimum)};
}

float number_of(const FormatTraits& format, const Part& part, int code) {
    if (format.table) return part.scale * kIQ4[code];
    return format.minima ? part.scale * code + part.minimum : part.scale * (code - format.offset);
}

void read_planes(Format as, Take* take, const uint8_t* row, int at, int count, float* out) {
    const FormatTraits& format = traits(as);
    const SourceTraits& source = traits(static_cast<Source>(std::countr_zero(format.codes_of)));
    Taken taken;
    for (int i = 0; i < count; i += format.columns) {
        take(row + static_cast<size_t>(at + i) / format.columns * source.bytes, taken);
        for (int k = 0; k < format.columns; k += format.part) {
            const int p = k / format.part;
            const Part part = part_of(format, taken.scale, taken.minimum, taken.scales[p], taken.minima[p]);
            for (int j = k; j < k + format.part; ++j) out[i + j] = number_of(format, part, taken.codes[j]);
        }
    }
}

constexpr uint16_t negated(uint16_t half) { return half ^ 0x8000; }

// Eight groups of 32, whose scales and minima are six bits each.
void take_groups(const Q4K& block, Taken& taken) {
    for (int g = 0; g < kChunk / kGroup; ++g)
        taken.scales[g] = static_cast<int8_t>(block.scale(g)), taken.minima[g] = static_cast<int8_t>(block.minimum(g));
    taken.scale = read<uint16_t>(block.block), taken.minimum = negated(read<uint16_t>(block.block + 2));
}

// 16 bytes of nibbles: the low ones are the first 16 codes.
void take_nibbles(const uint8_t* from, uint8_t* codes) {
    for (int k = 0; k < 16; ++k) codes[k] = from[k] & 15, codes[16 + k] = from[k] >> 4;
}

void take_fifth_bits(uint32_t bits, uint8_t* codes) {
    for (int k = 0; k < kGroup; ++k) codes[k] |= (bits >> k & 1) << 4;
}

// Pairs of bits: 32 bytes hold 128 codes, 32 of one place after the other.
void take_pairs(const uint8_t* from, uint8_t* codes) {
    for (int k = 0; k < kChunk; ++k) codes[k] = from[k / 128 * 32 + k % 32] >> k % 128 / 32 * 2 & 3;
}

}  // namespace

void take_q6_k(const uint8_t* block, Taken& taken) {
    for (int n = 0; n < 2; ++n)
        for (int k = 0; k < 64; ++k) {
            const int low = block[64 * n + k], high = block[128 + 32 * n + k % 32] >> k / 32 * 2;
            taken.codes[128 * n + k] = (low & 15) | (high & 3) << 4;
            taken.codes[128 * n + 64 + k] = low >> 4 | (high >> 4 & 3) << 4;
        }
    std::memcpy(taken.scales, block + 192, 16);
    taken.scale = read<uint16_t>(block + 208);
}

void take_q5_k(const uint8_t* block, Taken& taken) {
    for (int k = 0; k < kChunk; ++k) {
        const int g = k / kGroup, low = block[48 + g / 2 * 32 + k % 32] >> g % 2 * 4;
        taken.codes[k] = (low & 15) | (block[16 + k % 32] >> g & 1) << 4;
    }
    take_groups({block}, taken);
}

void take_q4_k(const uint8_t* block, Taken& taken) {
    const Q4K of{block};
    for (int k = 0; k < kChunk; ++k) taken.codes[k] = of.codes(k / kGroup)[k % 32] >> k / kGroup % 2 * 4 & 15;
    take_groups(of, taken);
}

void take_q3_k(const uint8_t* block, Taken& taken) {
    take_pairs(block + 32, taken.codes);
    for (int k = 0; k < kChunk; ++k) taken.codes[k] |= (block[k % 32] >> k / 32 & 1) << 2;
    const uint8_t* six = block + 96;  // bits: four of each scale, and behind them two
    for (int p = 0; p < 16; ++p) {
        const int low = six[p % 8] >> p / 8 * 4 & 15, high = six[8 + p % 4] >> p / 4 * 2 & 3;
        taken.scales[p] = static_cast<int8_t>((low | high << 4) - 32);
    }
    taken.scale = read<uint16_t>(block + 108);
}

void take_q2_k(const uint8_t* block, Taken& taken) {
    take_pairs(block + 16, taken.codes);
    for (int p = 0; p < 16; ++p) taken.scales[p] = block[p] & 15, taken.minima[p] = block[p] >> 4;
    taken.scale = read<uint16_t>(block + 80), taken.minimum = negated(read<uint16_t>(block + 82));
}

void take_q5_0(const uint8_t* block, Taken& taken) {
    take_nibbles(block + 6, taken.codes);
    take_fifth_bits(read<uint32_t>(block + 2), taken.codes);
    taken.scale = read<uint16_t>(block);
}

void take_q5_1(const uint8_t* block, Taken& taken) {
    take_nibbles(block + 8, taken.codes);
    take_fifth_bits(read<uint32_t>(block + 4), taken.codes);
    taken.scale = read<uint16_t>(block), taken.minimum = read<uint16_t>(block + 2);
}

void take_iq4_nl(const uint8_t* block, Taken& taken) {
    take_nibbles(block + 2, taken.codes);
    taken.scale = read<uint16_t>(block);
}

void take_iq4_xs(const uint8_t* block, Taken& taken) {
    const int high = read<uint16_t>(block + 2);
    for (int g = 0; g < kChunk / kGroup; ++g) {
        take_nibbles(block + 8 + g * 16, taken.codes + g * kGroup);
        const int low = block[4 + g / 2] >> g % 2 * 4 & 15;
        taken.scales[g] = static_cast<int8_t>((low | (high >> 2 * g & 3) << 4) - 32);
    }
    taken.scale = read<uint16_t>(block);
}

#define PRONK_PLANES(type, bytes)                                                                    \
    void read_##type(const uint8_t* row, int at, int count, float* out) {                            \
        read_planes(Format::type, take_##type, row, at, count, out);                                 \
    }                                                                                                \
    bool pack_codes_##type(const Matrix& matrix, const Tile& tile) { return pack_planes(matrix, tile, take_##type, bytes); }
PRONK_PLANES(q6_k, 210)
PRONK_PLANES(q5_k, 176)
PRONK_PLANES(q3_k, 110)
PRONK_PLANES(q2_k, 84)
PRONK_PLANES(q5_0, 22)
PRONK_PLANES(q5_1, 24)
PRONK_PLANES(iq4_nl, 18)
PRONK_PLANES(iq4_xs, 136)
#undef PRONK_PLANES

bool pack_planes_q4_k(const Matrix& matrix, const Tile& tile) { return pack_planes(matrix, tile, take_q4_k, 144); }

void unpack_planes(const Matrix& matrix, const uint8_t* panel, size_t row, float* out) {
    const FormatTraits& format = traits(matrix.format);
    const PlaneLayout layout(format);
    for (int at = 0; at < matrix.cols; at += format.columns, panel += layout.block) {
        const auto scale = read<uint16_t>(panel + layout.halves + row * 2);
        const auto minimum = format.minima ? read<uint16_t>(panel + layout.minimum_half() + row * 2) : uint16_t{0};
        for (int k = 0; k < std::min(format.columns, matrix.cols - at); ++k) {
            const uint8_t* group = panel + k / kGroup * layout.group;
            const int s = k % kGroup / 4, h = k % kGroup / format.part;
            int code = 0, whole = 0, whole_minimum = 0;
            const Pieces found = pieces(format.bits, s);
            for (int i = 0; i < found.count; ++i) {
                const Piece& piece = found.of[i];
                const int byte = group[piece.line * kLineBytes + row * 4 + k % 4];
                code |= (byte >> piece.from & ((1 << piece.count) - 1)) << piece.to;
            }
            if (format.scales == Scales::part) {
                whole = static_cast<int8_t>(group[layout.scale(h) + row]);
                if (shares_bytes(format)) whole_minimum = (whole & 255) >> 4, whole &= 15;
                else if (format.minima) whole_minimum = static_cast<int8_t>(group[layout.minimum(format, h) + row]);
            }
            out[at + k] = number_of(format, part_of(format, scale, minimum, whole, whole_minimum), code);
        }
    }
}

}  // namespace pronk
