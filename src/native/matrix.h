// Weights as the kernels want them: panels of 64 rows, streamed once by a decode step and reused from cache by a prefill.
//
// y[t][n] = sum_k W[n][k] x[t][k]. Vector lanes hold rows n, so that k runs in sequence and a sum has one order however
// many tokens share the pass. N is padded to whole panels with zero rows, K to whole groups with zeros.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pronk {

constexpr int kPanelRows = 64;
constexpr int kGroup = 32;  // weights that share a scale in q8 and q4

//   format   a panel of K columns
//   f32      [K][64] float
//   f16      [K][64] half
//   bf16     [K/2][64][2] bfloat16
//   int8     [K/4][64][4] uint8 (w + 128), then float scale[64]
//   llm_int8 as int8; what it is multiplied with differs
//   q8       K/32 groups: [8][64][4] uint8 (w + 128), half scale[64]
//   q4       K/32 groups: [4][64][4] uint8, half scale[64], half minimum[64]; w = scale * nibble + minimum.
//            Byte (j, row, i) holds k = 4j + i in its low half and k = 16 + 4j + i in its high half.
//   q4_0     as q4, without minima: w = scale * (nibble - 8)
enum class Format : int { f32, f16, bf16, int8, llm_int8, q8, q4, q4_0 };

inline bool has_row_scales(Format format) { return format == Format::int8 || format == Format::llm_int8; }

constexpr int kLineBytes = 4 * kPanelRows;  // from one word of a row to the next in int8, q8 and q4
constexpr int kQ8GroupBytes = kPanelRows * (kGroup + 2);
constexpr int kQ4CodeBytes = kPanelRows * kGroup / 2;

const char* format_name(Format format);
bool format_from_name(const char* name, Format& format);

// K as stored: a multiple of 32 for the integer formats, of 2 for bf16.
int padded_cols(Format format, int cols);
size_t panel_bytes(Format format, int cols);

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

// What rows are packed from, little-endian. Blocks are GGUF's; int8_row is a float scale and then an int8 for each weight.
enum class Source : int { f32, f16, bf16, q4_0, q4_1, q4_k, q8_0, int8_row };

// Where row r of a source goes: into row offset + (r / run) * stride + r % run of the matrix.
// Plain: run = stride = 1. SwiGLU pairs lie as 32 gate rows beside 32 up rows: run 32, stride 64, offset 0 or 32.
struct Placement {
    int offset = 0, run = 1, stride = 1;
    int64_t row(int64_t r) const { return offset + r / run * stride + r % run; }
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
