// The kernels, written once over `Simd` and compiled for each instruction set.
//
// Everything sits in an unnamed namespace: each translation unit must keep its own copy, for the linker would otherwise
// merge code made for different processors. Every sum runs in an order that knows nothing of how many tokens, threads
// or neighbours there are; the tile templates below differ in how many outputs they hold, never in how one is summed.

#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels.h"

namespace {

using namespace pronk;
using S = Simd;
using F = S::F;
using I = S::I;

constexpr int kVectors = kPanelRows / 16;  // vectors of 16 rows in a panel

int32_t word(const void* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return x;
}

float number(const void* p) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
}

#include "rows.inl"

#include "tiles.inl"

// -- products ------------------------------------------------------------------------------------------------------

F exp(F x) {  // within 2 units in the last place; exactly 0 where that would be no normal number
    x = S::max(S::set(-150.0f), x);  // in this order NaN passes
    const F n = S::whole(S::mul(x, S::set(1.44269504f)));
    F r = S::fma(n, S::set(-0.693145752f), x);
    r = S::fma(n, S::set(-1.42860677e-6f), r);
    F p = S::set(1.0f / 720);
    p = S::fma(p, r, S::set(1.0f / 120));
    p = S::fma(p, r, S::set(1.0f / 24));
    p = S::fma(p, r, S::set(1.0f / 6));
    p = S::fma(p, r, S::set(0.5f));
    p = S::fma(p, r, S::set(1.0f));
    p = S::fma(p, r, S::set(1.0f));
    return S::times_power_of_two(p, n);
}

F silu(F x) { return S::div(x, S::add(S::set(1.0f), exp(S::sub(S::zero(), x)))); }

// 16 numbers of row `row` from column n on, of which those under `cols` exist.
template <Then kThen>
PRONK_INLINE void put_vector(float* row, int n, int cols, F value) {
    if (n + 16 <= cols) {
        if constexpr (kThen == Then::add) value = S::add(S::load(row + n), value);
        return S::store(row + n, value);
    }
    float part[16];
    S::store(part, value);
    for (int i = 0; n + i < cols; ++i) row[n + i] = kThen == Then::add ? row[n + i] + part[i] : part[i];
}

// Where token t's products go.
PRONK_INLINE float* row_of(const Output& out, int t) { return out.data + (out.then == Then::pairs ? t / 2 : t) * out.stride; }

// What a tile gave, [T][64] of which `vectors` from `first` on are new, goes where it belongs. Its first token is `begin`.
template <Then kThen>
void finish_as(const Matrix& w, const float* y, int begin, int tokens, int panel, int first, int vectors, const Output& out) {
    const float* bias = w.bias ? w.bias + panel * kPanelRows : nullptr;
    const auto value = [&](int v) {
        const F sum = S::load(y + v * 16);
        return bias ? S::add(sum, S::load(bias + v * 16)) : sum;
    };
    for (int t = begin; t < begin + tokens; ++t, y += kPanelRows) {
        float* row = row_of(out, t);
        if constexpr (kThen == Then::swiglu) {
            for (int v = 0; v < kVectors / 2; ++v)
                put_vector<kThen>(row, panel * kPanelRows / 2 + v * 16, out.cols,
                                  S::mul(silu(value(v)), value(v + kVectors / 2)));
        } else if (kThen == Then::pairs && t % 2) {
            for (int v = first; v < first + vectors; ++v)
                put_vector<Then::add>(row, panel * kPanelRows + v * 16, out.cols, S::load(y + v * 16));
        } else {
            for (int v = first; v < first + vectors; ++v)
                put_vector<kThen>(row, panel * kPanelRows + v * 16, out.cols, value(v));
        }
    }
}

void finish(const Matrix& w, const float* y, int begin, int tokens, int panel, int first, int vectors, const Output& out) {
    switch (out.then) {
        case Then::store: return finish_as<Then::store>(w, y, begin, tokens, panel, first, vectors, out);
        case Then::add: return finish_as<Then::add>(w, y, begin, tokens, panel, first, vectors, out);
        case Then::swiglu: return finish_as<Then::swiglu>(w, y, begin, tokens, panel, first, vectors, out);
        case Then::pairs: return finish_as<Then::pairs>(w, y, begin, tokens, panel, first, vectors, out);
    }
}

template <Format kFormat, int T, int R>
PRONK_INLINE void one_tile(const Matrix& w, const uint8_t* panel, int first, const Rows& x, float* out) {
    if constexpr (kFormat == Format::f32) tile<OpF32, T, R>(w, panel, first, x, out);
    if constexpr (kFormat == Format::f16) tile<OpF16, T, R>(w, panel, first, x, out);
    if constexpr (kFormat == Format::bf16) tile<OpBF16, T, R>(w, panel, first, x, out);
    if constexpr (kFormat == Format::int8) tile<OpInt8, T, R>(w, panel, first, x, out);
    if constexpr (kFormat == Format::q8 || kFormat == Format::q4 || kFormat == Format::q4_0)
        grouped_tile<kFormat, T, R>(w, panel, first, x, out);
}

constexpr int accumulators(Format format) {
    return format == Format::q8 || format == Format::q4 || format == Format::q4_0 ? 2 : 1;
}

template <Format kFormat, int T>
void vectors_of_panel(const Matrix& w, const uint8_t* panel, int first, int vectors, const Rows& x, float* out) {
    constexpr int R = tile_vectors(T, accumulators(kFormat));
    if constexpr (R == 4) {
        if (vectors == 2) return one_tile<kFormat, T, 2>(w, panel, first, x, out + first * 16);
    }
    for (int v = first; v < first + vectors; v += R) one_tile<kFormat, T, R>(w, panel, v, x, out + v * 16);
}

// What has int8's panels and tiles besides.
constexpr Format tiles_of(Format format) { return format == Format::llm_int8 ? Format::int8 : format; }

template <Format kFormat>
void matmul_as(const Matrix& w, const Rows& x, int tokens, int begin, int end, const Output& out) {
    constexpr int most = tile_tokens(accumulators(kFormat));
    constexpr Format kTiles = tiles_of(kFormat);
    alignas(64) float y[most * kPanelRows];
    while (begin < end) {
        const int panel = begin / 2, first = begin % 2 * (kVectors / 2);
        const int vectors = begin % 2 == 0 && begin + 1 < end ? kVectors : kVectors / 2;
        begin += vectors / (kVectors / 2);
        const uint8_t* data = w.panel(panel);
        for (int t = 0; t < tokens; t += most) {
            const int count = tokens - t < most ? tokens - t : most;
            const Rows rows = x.at(t);
            const int n = out.then == Then::swiglu ? panel * kPanelRows / 2 : panel * kPanelRows + first * 16;
            for (int i = 0; i < count; ++i)  // by the time of writing they are there
                for (int v = 0; v < vectors * 16 && n + v < out.cols; v += 16) __builtin_prefetch(row_of(out, t + i) + n + v, 1);
            switch (count) {
                case 1: vectors_of_panel<kTiles, 1>(w, data, first, vectors, rows, y); break;
                case 2: if constexpr (most >= 2) vectors_of_panel<kTiles, 2>(w, data, first, vectors, rows, y); break;
                case 3: if constexpr (most >= 3) vectors_of_panel<kTiles, 3>(w, data, first, vectors, rows, y); break;
                case 4: if constexpr (most >= 4) vectors_of_panel<kTiles, 4>(w, data, first, vectors, rows, y); break;
                case 5: if constexpr (most >= 5) vectors_of_panel<kTiles, 5>(w, data, first, vectors, rows, y); break;
                default: if constexpr (most >= 6) vectors_of_panel<kTiles, 6>(w, data, first, vectors, rows, y);
            }
            if constexpr (kFormat == Format::llm_int8) {
                const float* scale = (const float*)(data + (size_t)rows.padded * kPanelRows);
                if (vectors == kVectors) add_outliers<kVectors>(data, scale, first, rows, count, y);
                else add_outliers<kVectors / 2>(data, scale, first, rows, count, y);
            }
            finish(w, y, t, count, panel, first, vectors, out);
        }
    }
}

void matmul(const Matrix& w, const Rows& x, int tokens, int begin, int end, const Output& out) {
    switch (w.format) {
        case Format::f32: return matmul_as<Format::f32>(w, x, tokens, begin, end, out);
        case Format::f16: return matmul_as<Format::f16>(w, x, tokens, begin, end, out);
        case Format::bf16: return matmul_as<Format::bf16>(w, x, tokens, begin, end, out);
        case Format::int8: return matmul_as<Format::int8>(w, x, tokens, begin, end, out);
        case Format::llm_int8: return matmul_as<Format::llm_int8>(w, x, tokens, begin, end, out);
        case Format::q8: return matmul_as<Format::q8>(w, x, tokens, begin, end, out);
        case Format::q4: return matmul_as<Format::q4>(w, x, tokens, begin, end, out);
        case Format::q4_0: return matmul_as<Format::q4_0>(w, x, tokens, begin, end, out);
    }
}

#include "attention.inl"

// Plain loops, which the compiler turns into vectors.
int32_t argmax(const float* x, int count) {
    constexpr int kLanes = 16, kBlock = 512;
    float largest = -INFINITY;
    int at = 0;
    bool nan = false;
    for (int begin = 0; begin < count; begin += kBlock) {
        const int size = count - begin < kBlock ? count - begin : kBlock, whole = size / kLanes * kLanes;
        float most[kLanes];
        int32_t nans[kLanes] = {};
        for (float& lane : most) lane = -INFINITY;
        for (int i = 0; i < whole; i += kLanes)
            for (int lane = 0; lane < kLanes; ++lane) {
                const float value = x[begin + i + lane];
                most[lane] = value > most[lane] ? value : most[lane];
                nans[lane] |= value != value;
            }
        for (int i = whole; i < size; ++i) {
            most[0] = x[begin + i] > most[0] ? x[begin + i] : most[0];
            nans[0] |= x[begin + i] != x[begin + i];
        }
        float here = most[0];
        for (int lane = 0; lane < kLanes; ++lane) here = most[lane] > here ? most[lane] : here, nan |= nans[lane] != 0;
        if (here > largest) largest = here, at = begin;
    }
    if (nan || !std::isfinite(largest)) return -1;
    while (x[at] != largest) ++at;
    return at;
}

}  // namespace

#define PRONK_KERNELS(function, text)                                                                            \
    const pronk::Kernels* pronk::function() {                                                                    \
        static constexpr Kernels table{text, kRows, matmul, rmsnorm, convert, rope, store_kv, attention, argmax};\
        return &table;                                                                                           \
    }
