// What an instruction set must offer; one table of functions for each, chosen once at run time (isa.cpp).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "matrix.h"

namespace pronk {

// What a matrix is multiplied with: T rows of K numbers, in the form its format wants.
enum class Form : int {
    f32,       // float
    bf16,      // bfloat16, rounded to nearest even
    int8,      // int8 with one scale a token: for int8
    q8,        // int8 with a scale for each 32: for q8 and q4
    llm_int8,  // as int8, with zeros for outliers, which stand beside as floats
};

constexpr int kForms = 5;

Form form_of(Format format);

// Which activations LLM.int8() computes apart: those over `threshold`, and of each token the `count` largest, ties
// included, zeros never.
struct OutlierRule {
    float threshold = 6;
    int count = 6;
};

constexpr float kInPlace[4] = {1, 0x1p-8f, 0x1p-16f, 0x1p-24f};

// One form of the T rows. Rows are `stride` bytes apart; K is padded with zeros.
struct Rows {
    Form form = Form::f32;
    uint8_t* data = nullptr;
    size_t stride = 0;
    float* scale = nullptr;  // int8, llm_int8: [T]; q8: [T][K/32]
    int32_t* sum = nullptr;  // sums of the integers, shaped as `scale`
    int groups = 0;          // K/32 for q8, 1 for all others
    int padded = 0;          // K in whole groups of 32
    OutlierRule rule;
    // llm_int8: each token's outliers by ascending k, as they came one token after the other: it is few of many that are
    // read again and again, and so they lie side by side.
    float* outlier_x = nullptr;    // x / 256^(k mod 4): the factor of a weight that is left in its place in a word of four
    float* outlier_sum = nullptr;  // [T], of x
    int32_t* outlier_k = nullptr;
    int32_t *outlier_begin = nullptr, *outlier_count = nullptr;  // [T]
    std::atomic<int32_t>* outliers_used = nullptr;               // by all tokens so far
    float* found_x = nullptr;                                    // [padded], of one thread, while a token's are chosen
    int32_t* found_k = nullptr;

    Rows at(int t) const {
        Rows r = *this;
        r.data += t * stride;
        if (scale) r.scale += static_cast<size_t>(t) * groups, r.sum += static_cast<size_t>(t) * groups;
        if (outlier_x) r.outlier_begin += t, r.outlier_count += t, r.outlier_sum += t;
        return r;
    }
};

// What becomes of a product.
enum class Then : int {
    store,   // out[t][n] = y
    add,     // out[t][n] += y
    swiglu,  // out[t][m] = silu(gate) * up, of panels of 32 gate rows beside 32 up rows
    pairs,   // out[t][n] = y[2t][n] + y[2t + 1][n]: rows that come in two parts
};

struct Output {
    float* data;
    size_t stride;  // floats between tokens
    Then then;
    int cols;  // n under this are written
};

enum class KVType : int { f32, f16, bf16, int8 };

constexpr int kKVBlock = 64;   // tokens in a block of the KV cache
constexpr int kTileTokens = 6;  // the most that a register tile holds, in any instruction set
constexpr int kSpan = 256;     // keys whose scores are taken together, aligned to absolute positions

// Keys and values of one head in one block, laid out as panels whose "rows" are keys, and head dimensions:
//   keys    f32, f16 [D][64]; bf16 [D/2][64][2]; int8 [D][64], float scale[64]
//   values  for each 64 of D: f32, f16 [64][64]; bf16 [32][64][2]; int8 [64][64]; then, int8 only, float scale[64]
struct KVLayout {
    KVType type;
    int head_dim, padded_dim;         // the latter a multiple of 64: values come in panels
    size_t element;                   // bytes of a number
    size_t keys_bytes, values_bytes;  // of one head in one block; multiples of 64
};

KVLayout kv_layout(KVType type, int head_dim);

// Attention of a few query rows over one head's keys: row i sees keys [0, limit[i]).
struct AttentionTask {
    const float* const* q;    // [rows] pointers to D floats, rotated
    float* const* out;        // [rows] pointers to D floats
    const int32_t* limit;     // [rows], ascending
    int rows;                 // at most Kernels::attention_rows
    const uint8_t* kv;        // block 0 of this layer and head: its keys, then its values
    size_t block_stride;      // bytes
    const int32_t* blocks;    // block table of the sequence
    float scale;              // 1 / sqrt(D)
    float* scratch;           // attention_scratch(D) floats, 64-byte aligned
};

struct Kernels {
    const char* name;
    int attention_rows;

    // Panels [begin, end), counted in half panels of 32 rows, times `tokens` rows.
    void (*matmul)(const Matrix& w, const Rows& x, int tokens, int begin, int end, const Output& out);

    // x / sqrt(mean(x^2) + eps) * weight, [K]; sums in one order.
    void (*rmsnorm)(const float* x, const float* weight, float eps, int size, float* out);

    // One row of floats [K] into row t of `rows`; K is padded with zeros.
    void (*convert)(const float* x, int size, const Rows& rows, int t);

    // Rotate pairs (i, i + D/2) of each of `heads` vectors of D.
    void (*rope)(float* x, int heads, int head_dim, const float* cos, const float* sin);

    // Store one token's key and value of one head at `slot` (0..63) of a block; slot 0 also clears the block's values,
    // since what an unused slot holds is multiplied with zero and must be finite.
    void (*store_kv)(const KVLayout& layout, uint8_t* block, int slot, const float* key, const float* value);

    void (*attention)(const KVLayout& layout, const AttentionTask& task);

    // The first of the largest; -1 where that is infinite, or any is NaN.
    int32_t (*argmax)(const float* x, int count);
};

size_t attention_scratch(int head_dim);  // floats

// The table for PRONK_ISA, or the best this processor can run. Throws std::runtime_error naming what can be chosen.
const Kernels& kernels();
const Kernels* kernels_named(const char* name);  // null where unknown, or where this processor cannot run it

const Kernels* kernels_portable();
#if defined(PRONK_X86)
const Kernels* kernels_avx2();
const Kernels* kernels_avx2_vnni();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512_vnni();
const Kernels* kernels_avx512_bf16();
#elif defined(PRONK_ARM)
const Kernels* kernels_neon();
const Kernels* kernels_neon_dotprod();
const Kernels* kernels_neon_i8mm();
#endif

}  // namespace pronk
