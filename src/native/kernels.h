// What an instruction set must offer; one table of functions for each, chosen once at run time (isa.cpp).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kv_types.h"
#include "matrix.h"
#include "rounding.h"

namespace pronk {

// Which activations LLM.int8() computes apart: those over `threshold`, and of each token the `count` largest, ties
// included, zeros never.
struct OutlierRule {
    float threshold = 6;
    int count = 6;
};

// Four numbers of a row, and which of its words they are.
struct Spilled {
    int32_t word, at;
};

constexpr float kInPlace[4] = {1, 0x1p-8f, 0x1p-16f, 0x1p-24f};

// What a matrix is multiplied with: T rows of K numbers, in one format. Rows are `stride` bytes apart; K is padded with zeros.
struct Rows {
    ActivationFormat format = ActivationFormat::f32;
    uint8_t* data = nullptr;
    size_t stride = 0;
    float* scale = nullptr;  // [T][groups], where the format has scales
    int32_t* sum = nullptr;  // [T][groups], of the integers
    // Where each 32 have a scale. Sums of 16 and of 32, as an instruction set has them (Simd::sums), and scale times sum.
    int32_t *half_sums = nullptr, *words = nullptr;  // [T][2 groups], [T][groups]
    float* scaled_sum = nullptr;                     // [T][groups]
    int groups = 0;          // K/32 where each 32 have a scale, or else 1
    int padded = 0;          // K in whole groups of 32
    float* turned = nullptr;  // [padded], of one thread: the row that was converted last, before it was rounded
    // Where an instruction set sums bytes in 16 bits (Kernels::sums_narrow), and tokens are kLeastNarrow or more: the integers without those
    // whose products would not fit, and these, which are zeros there. See narrow.inl.
    uint8_t* narrow = nullptr;         // [T], `stride` apart
    Spilled* spilled = nullptr;        // [T][most_spilled()]
    int32_t* spilled_count = nullptr;  // [T]
    OutlierRule rule;
    // Each token's outliers by ascending k, as they came one token after the other: it is few of many that are
    // read again and again, and so they lie side by side.
    float* outlier_x = nullptr;    // x / 256^(k mod 4): the factor of a weight that is left in its place in a word of four
    float* outlier_sum = nullptr;  // [T], of x
    int32_t* outlier_k = nullptr;
    int32_t *outlier_begin = nullptr, *outlier_count = nullptr;  // [T]
    std::atomic<int32_t>* outliers_used = nullptr;               // by all tokens so far
    float* found_x = nullptr;                                    // [padded], of one thread, while a token's are chosen
    int32_t* found_k = nullptr;

    size_t most_spilled() const { return static_cast<size_t>(padded) / 2; }  // two halves of every word

    Rows at(int t) const {
        Rows r = *this;
        r.data += t * stride;
        if (narrow) r.narrow += t * stride, r.spilled += t * most_spilled(), r.spilled_count += t;
        if (scale) r.scale += static_cast<size_t>(t) * groups, r.sum += static_cast<size_t>(t) * groups;
        if (words) r.half_sums += static_cast<size_t>(t) * 2 * groups, r.words += static_cast<size_t>(t) * groups, r.scaled_sum += static_cast<size_t>(t) * groups;
        if (outlier_x) r.outlier_begin += t, r.outlier_count += t, r.outlier_sum += t;
        return r;
    }
};

// What becomes of a product.
enum class Epilogue : int {
    store,   // out[t][n] = y
    add,     // out[t][n] += y
    swiglu,  // out[t][m] = silu(gate) * up, of panels of 32 gate rows beside 32 up rows
    pairs,   // out[t][n] = y[2t][n] + y[2t + 1][n]: rows that come in two parts
};

// How an adapter's second factor is stored. In bytes a row has a scale, and u is rounded to 16 bits (RankCodes).
enum class SecondFactor : int { f32, f16, bytes };

// The second factor of an adapter beside one matrix: y[n] += sum_r b[n][r] u[r], r ascending (adapter.h).
struct LowRank {
    const uint8_t* b = nullptr;  // of each half panel [rank][32]; none: the adapter changes nothing of this matrix
    SecondFactor type = SecondFactor::f32;
    int first[2] = {}, rank[2] = {};  // what the even and the odd half panels take of u, or of its codes: gate and up rows differ

    // Of bytes [32] scales in float16, and b + 128 as [rank / 4][32][4].
    size_t half_bytes(int odd) const {
        constexpr size_t rows = kPanelRows / 2;
        if (type == SecondFactor::bytes) return rank[odd] ? rows * (2 + (rank[odd] + 3) / 4 * size_t{4}) : 0;
        return rows * rank[odd] * (type == SecondFactor::f16 ? 2 : 4);
    }
};

// What a second factor in bytes is multiplied with: numbers of u in 16 bits, as int8 of their high and of their low halves.
// They lie among the floats of u: this, then [rank / 4][4] high ones, then as many low ones; or, where bytes are multiplied
// as words, [rank / 4][2] of even ranks, then as many of odd ones, all 16 bits of each.
struct RankCodes {
    float scale;
    int32_t high, low;  // what sums begin with, for b is stored as b + 128

    static constexpr int words(int rank) { return sizeof(RankCodes) / 4 + 2 * ((rank + 3) / 4); }
};

// What adapters add to a product, before its epilogue.
struct Adapted {
    const LowRank* const* of = nullptr;  // by adapter
    int product = 0;                     // which of an adapter's LowRanks
    const int32_t* adapters = nullptr;   // [T], -1: none; null: no token has any
    const float* u = nullptr;            // [T]
    size_t stride = 0;                   // floats between tokens of u
};

struct Output {
    float* data;
    size_t stride;  // floats between tokens
    Epilogue epilogue;
    int cols;  // n under this are written
    Adapted adapted = {};

    Output at(int t) const {
        Output out = *this;
        out.data += t * stride;
        if (adapted.adapters) out.adapted.adapters += t, out.adapted.u += t * adapted.stride;
        return out;
    }
};

constexpr int kLeastNarrow = 3;  // tokens; two wait for memory, which what goes apart leaves idle
constexpr int kTileTokens = 6;  // the most that a register tile holds, in any instruction set
constexpr int kSpan = 256;     // keys whose scores are taken together, aligned to absolute positions

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
    float* const* scores = nullptr;  // [rows] where limit[i] of them go before the softmax, or null; or none: nobody looks
};

constexpr int64_t kOne = int64_t{1} << 38;  // the weight of the likeliest token
constexpr int kWeightBlock = 512;

struct Kernels {
    const char* name;
    int attention_rows;
    bool rank_words;  // RankCodes are to be words
    int tile_tokens;  // of which a long pass is cut into whole ones
    bool sums_narrow;  // Rows::narrow is wanted of kLeastNarrow tokens and more

    // Panels [begin, end), counted in half panels of 32 rows, times `tokens` rows.
    void (*matmul)(const Matrix& w, const Rows& x, int tokens, int begin, int end, const Output& out);

    // u [tokens][a.rows] = x times a matrix in panels of kRankRows; tokens of u are `stride` floats apart.
    void (*first_factor)(const Matrix& a, const Rows& x, int tokens, float* u, size_t stride);

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

    // (x - less) / by
    void (*divide)(const float* x, int count, float less, float by, float* out);

    // kOne * e^(x - largest), and sums of these in whole numbers, one for each kWeightBlock. Bits as engine/filters.py has.
    void (*exponentials)(const float* x, int count, float largest, float* out, int64_t* sums);

    // Where x is at least so much, ascending; gives how many there are. Nothing is NaN.
    int (*find)(const float* x, int count, float least, int32_t* places);

    // Weights to a block type, each error made up for by the columns behind it. No weight is infinite, or NaN.
    void (*round_rows)(const Rounding& task);
};

size_t attention_scratch(int head_dim);  // floats

// The table for PRONK_ISA, or the best this processor can run. Throws std::runtime_error naming what can be chosen.
const Kernels& kernels();
const Kernels* kernels_at(int index);           // of those that this processor can run, best first; null beyond the last
const Kernels* kernels_named(const char* name);  // one of these, or null

}  // namespace pronk
