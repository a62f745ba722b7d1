#include <algorithm>

#include "turn.h"

namespace pronk {

namespace {

float half(const uint8_t* p) { return f16_to_f32(read<uint16_t>(p)); }

// Byte k of a row of codes in words of four.
int byte(const uint8_t* codes, size_t row, int k) { return codes[k / 4 * kLineBytes + row * 4 + k % 4]; }

}  // namespace

void unpack_f32(const Matrix& matrix, const uint8_t* panel, size_t row, float* out) {
    for (int k = 0; k < matrix.cols; ++k) out[k] = read<float>(panel + (k * size_t{kPanelRows} + row) * 4);
}

void unpack_f16(const Matrix& matrix, const uint8_t* panel, size_t row, float* out) {
    for (int k = 0; k < matrix.cols; ++k) out[k] = half(panel + (k * size_t{kPanelRows} + row) * 2);
}

void unpack_bf16(const Matrix& matrix, const uint8_t* panel, size_t row, float* out) {
    for (int k = 0; k < matrix.cols; ++k)
        out[k] = bf16_to_f32(read<uint16_t>(panel + ((k / 2 * size_t{kPanelRows} + row) * 2 + k % 2) * 2));
}

void unpack_int8(const Matrix& matrix, const uint8_t* panel, size_t row, float* out) {
    const size_t scales = static_cast<size_t>(traits(matrix.format).padded(matrix.cols)) * kPanelRows;
    const float scale = read<float>(panel + scales + row * 4);
    for (int k = 0; k < matrix.cols; ++k) out[k] = scale * (byte(panel, row, k) - 128);
    if (is_turned(matrix.format)) turn(out, matrix.cols, turned_together(matrix.cols));
}

void unpack_row(const Matrix& matrix, int64_t row, float* out) {
    traits(matrix.format).unpack(matrix, matrix.panel(static_cast<int>(row / kPanelRows)), row % kPanelRows, out);
}

}  // namespace pronk
