// Weights as the kernels want them: panels of 64 rows, streamed once by a decode step and reused from cache by a prefill.
//
// y[t][n] = sum_k W[n][k] x[t][k]. Vector lanes hold rows n, so that k runs in sequence and a sum has one order however
// many tokens share the pass. N is padded to whole panels with zero rows, K to whole groups with zeros.
#pragma once

#include "formats.h"

namespace pronk {

constexpr int kLineBytes = 4 * kPanelRows;  // from one word of a row to the next in int8, q8 and q4

struct Matrix {
    Format format = Format::f32;
    int rows = 0;  // N
    int cols = 0;  // K
    int panels = 0;
    size_t panel_bytes = 0;
    uint8_t* data = nullptr;  // panels * panel_bytes, 64-byte aligned
    const float* bias = nullptr;  // [panels * 64] or none

    const uint8_t* panel(int index) const { return data + index * panel_bytes; }
    size_t nbytes() const { return panels * panel_bytes; }
};

constexpr int kRankRows = 16;  // of a panel of an adapter's first factor, which is laid out like one of 64: a rank is seldom more

// Without memory.
inline Matrix matrix_of(Format format, int rows, int cols) {
    return {format, rows, cols, (rows + kPanelRows - 1) / kPanelRows, kPanelRows * traits(format).row_bytes(cols)};
}

// Where row r of a source goes: into row offset + (r / together) * stride + r % together of the matrix.
// Plain: together = stride = 1. SwiGLU pairs lie as 32 gate rows beside 32 up rows: together 32, stride 64, offset 0 or 32.
struct Placement {
    int offset = 0, together = 1, stride = 1;
    int64_t row(int64_t r) const { return offset + r / together * stride + r % together; }
};

// Packs source rows [begin, end); different rows may be packed by different threads.
// `src` is row `begin` of the source, `src_stride` bytes a row. False: a scale is not finite or does not fit its type.
bool pack_rows(const Matrix& matrix, const uint8_t* src, size_t src_stride, Source source, int64_t begin, int64_t end,
               Placement placement);

// Zero rows that no source fills: their weights are zero in every format.
void pack_zero_rows(const Matrix& matrix, int64_t begin, int64_t end);

// The numbers of one packed row, [K].
void unpack_row(const Matrix& matrix, int64_t row, float* out);

}  // namespace pronk
