#include <algorithm>

#include "source.h"

namespace pronk {

void unpack_row(const Matrix& matrix, int64_t row, float* out) {
    const uint8_t* panel = matrix.data + row / kPanelRows * matrix.panel_bytes;
    const size_t r = row % kPanelRows;
    const int cols = matrix.cols;
    const auto half = [&](const uint8_t* p) { return f16_to_f32(read<uint16_t>(p + r * 2)); };
    switch (matrix.format) {
        case Format::f32:
            for (int k = 0; k < cols; ++k) out[k] = read<float>(panel + (k * size_t{kPanelRows} + r) * 4);
            break;
        case Format::f16:
            for (int k = 0; k < cols; ++k) out[k] = half(panel + k * size_t{kPanelRows} * 2);
            break;
        case Format::bf16:
            for (int k = 0; k < cols; ++k)
                out[k] = bf16_to_f32(read<uint16_t>(panel + ((k / 2 * size_t{kPanelRows} + r) * 2 + k % 2) * 2));
            break;
        case Format::int8:
        case Format::llm_int8: {
            const size_t scales = static_cast<size_t>(padded_cols(matrix.format, cols)) * kPanelRows;
            const float scale = read<float>(panel + scales + r * 4);
            for (int k = 0; k < cols; ++k) out[k] = scale * (panel[k / 4 * kLineBytes + r * 4 + k % 4] - 128);
            break;
        }
        case Format::q8:
            for (int at = 0; at < cols; at += kGroup, panel += kQ8GroupBytes) {
                const float scale = half(panel + kPanelRows * kGroup);
                for (int k = 0; k < std::min(kGroup, cols - at); ++k)
                    out[at + k] = scale * (panel[k / 4 * kLineBytes + r * 4 + k % 4] - 128);
            }
            break;
        case Format::q4:
        case Format::q4_0: {
            const bool has_minimum = matrix.format == Format::q4;
            for (int at = 0; at < cols; at += kGroup, panel += kQ4CodeBytes + kPanelRows * (has_minimum ? 4 : 2)) {
                const float scale = half(panel + kQ4CodeBytes);
                const float minimum = has_minimum ? half(panel + kQ4CodeBytes + kPanelRows * 2) : -8 * scale;
                for (int k = 0; k < std::min(kGroup, cols - at); ++k) {
                    const uint8_t codes = panel[k % 16 / 4 * kLineBytes + r * 4 + k % 4];
                    out[at + k] = scale * (k < 16 ? codes & 15 : codes >> 4) + minimum;
                }
            }
            break;
        }
    }
}

}  // namespace pronk
