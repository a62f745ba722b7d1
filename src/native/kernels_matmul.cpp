// Products of every format: register tiles, and what becomes of what they give. See kernels.inl.
#include "kernels.inl"
#include "amx.h"
#include "planes.h"

namespace pronk::PRONK_TARGET {

#ifdef PRONK_PRODUCTS
namespace other = PRONK_PRODUCTS;
#else
namespace other = PRONK_TARGET;
#endif

namespace {

// -- formats without groups -------------------------------------------------------------------------------------------

template <Format kFormat, class Op>
struct PlainTiles {
    using Multiplies = Op;
    template <int T, int R>
    static void tile(const Matrix& w, const uint8_t* panel, int first, const Rows& x, float* out) {
        constexpr const FormatTraits& format = traits(kFormat);
        constexpr bool row_scales = format.scales == Scales::row;
        typename Op::Acc acc[T][R];
#pragma GCC unroll 6
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                if constexpr (row_scales)
                    acc[t][r] = S::set_int(-format.offset * x.sum[t]);  // weights are stored as w + 128
                else
                    acc[t][r] = S::zero();
            }
        const int cols = (w.cols + format.columns - 1) / format.columns * format.columns;
        accumulate<Op, R, T, kTileTokens>(panel + first * Op::vector, x.data, x.stride, cols / Op::step, acc);
        const float* scale = (const float*)(panel + (size_t)cols * kPanelRows) + first * 16;
#pragma GCC unroll 6
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                if constexpr (row_scales)
                    S::store(out + t * kPanelRows + r * 16,
                             S::mul(S::mul(S::to_float(acc[t][r]), S::set(x.scale[t])), S::load(scale + r * 16)));
                else
                    S::store(out + t * kPanelRows + r * 16, acc[t][r]);
            }
    }
};

// -- formats in planes, and what is widened -----------------------------------------------------------------------------

#include "wide.inl"
#include "narrow.inl"
#include "groups.inl"
#include "planes.inl"

#include "amx.inl"

// -- LLM.int8() --------------------------------------------------------------------------------------------------------

// y [T][64] += outliers times their columns, by ascending k. Like the integers, floats are summed over w + 128; what
// that adds is taken back, and the error is that of weights in float32: about 2^-16 of a step for each outlier.
template <int kCount, int kRows = kPanelRows>
void add_outliers(const uint8_t* panel, const float* scale, int first, const Rows& x, int tokens, float* y) {
    for (int t = 0; t < tokens; ++t, y += kRows) {
        const float* outlier_x = x.outlier_x + x.outlier_begin[t];
        const int32_t* outlier_k = x.outlier_k + x.outlier_begin[t];
        const int count = x.outlier_count[t];
        if (count == 0) continue;
        F acc[kCount];
        const F taken_back = S::set(-traits(Format::llm_int8).offset * x.outlier_sum[t]);
        for (int v = 0; v < kCount; ++v) acc[v] = taken_back;
        for (int i = 0; i < count; ++i) {
            const uint32_t k = outlier_k[i];  // unsigned, and its quotient is a shift
            const uint8_t* words = panel + (size_t)(k / 4) * (4 * kRows) + first * 64;
#pragma GCC unroll 4
            for (int v = 0; v < kCount; ++v) acc[v] = S::fma_byte(words + v * 64, k % 4, outlier_x[i], acc[v]);
        }
#pragma GCC unroll 4
        for (int v = 0; v < kCount; ++v) {
            float* part = y + (first + v) * 16;
            S::store(part, S::fma(acc[v], S::load(scale + (first + v) * 16), S::load(part)));
        }
    }
}

// -- adapters ---------------------------------------------------------------------------------------------------------

#include "adapters.inl"

// -- products ---------------------------------------------------------------------------------------------------------

F silu(F x) { return S::div(x, S::add(S::set(1.0f), exp(S::sub(S::zero(), x)))); }

// 16 numbers of row `row` from column n on, of which those under `cols` exist.
template <Epilogue kEpilogue>
PRONK_INLINE void put_vector(float* row, int n, int cols, F value) {
    if (n + 16 <= cols) {
        if constexpr (kEpilogue == Epilogue::add) value = S::add(S::load(row + n), value);
        return S::store(row + n, value);
    }
    float part[16];
    S::store(part, value);
    for (int i = 0; n + i < cols; ++i) row[n + i] = kEpilogue == Epilogue::add ? row[n + i] + part[i] : part[i];
}

// Where token t's products go.
PRONK_INLINE float* row_of(const Output& out, int t) { return out.data + (out.epilogue == Epilogue::pairs ? t / 2 : t) * out.stride; }

// What a tile gave, [T][64] of which `vectors` from `first` on are new, goes where it belongs. Its first token is `begin`.
template <Epilogue kEpilogue>
void epilogue_as(const Matrix& w, const float* y, int begin, int tokens, int panel, int first, int vectors, const Output& out) {
    const float* bias = w.bias ? w.bias + panel * kPanelRows : nullptr;
    const auto value = [&](int v) {
        const F sum = S::load(y + v * 16);
        return bias ? S::add(sum, S::load(bias + v * 16)) : sum;
    };
    for (int t = begin; t < begin + tokens; ++t, y += kPanelRows) {
        float* row = row_of(out, t);
        if constexpr (kEpilogue == Epilogue::swiglu) {
            for (int v = 0; v < kVectors / 2; ++v)
                put_vector<kEpilogue>(row, panel * kPanelRows / 2 + v * 16, out.cols,
                                  S::mul(silu(value(v)), value(v + kVectors / 2)));
        } else if (kEpilogue == Epilogue::pairs && t % 2) {
            for (int v = first; v < first + vectors; ++v)
                put_vector<Epilogue::add>(row, panel * kPanelRows + v * 16, out.cols, S::load(y + v * 16));
        } else {
            for (int v = first; v < first + vectors; ++v)
                put_vector<kEpilogue>(row, panel * kPanelRows + v * 16, out.cols, value(v));
        }
    }
}

void epilogue(const Matrix& w, const float* y, int begin, int tokens, int panel, int first, int vectors, const Output& out) {
    switch (out.epilogue) {
        case Epilogue::store: return epilogue_as<Epilogue::store>(w, y, begin, tokens, panel, first, vectors, out);
        case Epilogue::add: return epilogue_as<Epilogue::add>(w, y, begin, tokens, panel, first, vectors, out);
        case Epilogue::swiglu: return epilogue_as<Epilogue::swiglu>(w, y, begin, tokens, panel, first, vectors, out);
        case Epilogue::pairs: return epilogue_as<Epilogue::pairs>(w, y, begin, tokens, panel, first, vectors, out);
    }
}

// Which register tiles multiply by a format that is not in planes.
template <Format kFormat>
struct TilesOf : std::type_identity<PlainTiles<kFormat, OpInt8>> {};
template <>
struct TilesOf<Format::f32> : std::type_identity<PlainTiles<Format::f32, OpF32>> {};
template <>
struct TilesOf<Format::f16> : std::type_identity<PlainTiles<Format::f16, OpF16>> {};
template <>
struct TilesOf<Format::bf16> : std::type_identity<PlainTiles<Format::bf16, OpBF16>> {};

template <class Tiles, int T>
void vectors_of_panel(const Matrix& w, const uint8_t* panel, int first, int vectors, const Rows& x, float* out) {
    constexpr int R = tile_vectors(T, 1);
    if constexpr (T == 1 && R > 1) {
        if (vectors == 1) return Tiles::template tile<T, 1>(w, panel, first, x, out + first * 16);
    }
    if constexpr (R == 4) {
        if (vectors == 2) return Tiles::template tile<T, 2>(w, panel, first, x, out + first * 16);
    }
    for (int v = first; v < first + vectors; v += R) Tiles::template tile<T, R>(w, panel, v, x, out + v * 16);
}

template <Format kFormat>
[[maybe_unused]] constexpr bool kNarrows = S::sums_narrow && traits(kFormat).scales == Scales::row;

// y [tokens][64] of some rows of a panel, each number as the format's kernels sum it up.
template <Format kFormat>
constexpr int kAtOnce = kAmx<kFormat> ? 2 * kAmxTokens : traits(kFormat).planes || Widens<kFormat> ? kTokensAtOnce : tile_tokens(1);

template <Format kFormat>
void times_panel(const Matrix& w, int panel, int first, int vectors, const Rows& x, int tokens, bool last, float* y) {
    const uint8_t* data = w.panel(panel);
    if constexpr (kAmx<kFormat>) {
        amx_of_panel<kFormat>(data, w.cols, first, vectors, x, tokens, y);
    } else if constexpr (traits(kFormat).planes) {
        planes_of_panel<kFormat>(data, w.cols, last ? w.panel_bytes : 0, first, vectors, x, tokens, y);
    } else {
        using Tiles = typename TilesOf<kFormat>::type;
        if constexpr (kNarrows<kFormat>) {
            if (tokens >= kLeastNarrow && x.narrow && mostly_fit(x, tokens)) return narrow_of_panel<S>(data, traits(kFormat).padded(w.cols), first, vectors, x, tokens, y);
        }
        if constexpr (Widens<kFormat>) {
            using Wide = typename WideOf<kFormat>::type;
            if (tokens >= Wide::least) return wide_of_panel<Wide>(data, traits(kFormat).padded(w.cols), first, vectors, x, tokens, y);
        }
        constexpr int largest = tile_tokens(1);
        const int tiles = (tokens + largest - 1) / largest, most = (tokens + tiles - 1) / tiles;
        for (int t = 0; t < tokens; t += most)
            [&]<int... kLess>(std::integer_sequence<int, kLess...>) __attribute__((always_inline)) {
                const int count = tokens - t < most ? tokens - t : most;
                const auto as = [&]<int T>(std::integral_constant<int, T>) {
                    vectors_of_panel<Tiles, T>(w, data, first, vectors, x.at(t), y + t * kPanelRows);
                    return true;
                };
                (void)((count == kLess + 1 && as(std::integral_constant<int, kLess + 1>())) || ...);
            }(std::make_integer_sequence<int, largest>());
    }
}

template <Format kFormat>
void matmul_as(const Matrix& w, const Rows& x, int tokens, int begin, int end, const Output& out) {
    if constexpr (kAmx<kFormat>)
        if (tokens < kLeastAmx<kFormat>) return other::matmul(w, x, tokens, begin, end, out);
    alignas(64) float y[kAtOnce<kFormat> * kPanelRows];
    const int pieces = (tokens + kAtOnce<kFormat> - 1) / kAtOnce<kFormat>;  // of one size, as blocks are
    constexpr int tile = kAmx<kFormat> ? kAmxRows : kTileTokens;
    const int even = (tokens + pieces * tile - 1) / (pieces * tile) * tile;
    const int piece = even < kAtOnce<kFormat> ? even : kAtOnce<kFormat>;
    while (begin < end) {
        const int panel = begin / 2, first = begin % 2 * (kVectors / 2);
        int vectors = begin % 2 == 0 && begin + 1 < end ? kVectors : kVectors / 2;
        begin += vectors / (kVectors / 2);
        for (int t = 0; t < tokens; t += piece) {
            const int count = tokens - t < piece ? tokens - t : piece;
            const Rows rows = x.at(t);
            const int n = out.epilogue == Epilogue::swiglu ? panel * kPanelRows / 2 : panel * kPanelRows + first * 16;
            for (int i = 0; i < count; ++i)  // by the time of writing they are there
                for (int v = 0; v < vectors * 16 && n + v < out.cols; v += 16) __builtin_prefetch(row_of(out, t + i) + n + v, 1);
            // Of an adapter's first factor, of as few rows as its rank, nothing is read but these.
            const bool alone = (!traits(kFormat).planes || traits(kFormat).bits == 8) && count == 1 && out.epilogue == Epilogue::store &&
                               w.rows - panel * kPanelRows - first * 16 <= 16;
            if (out.adapted.adapters) ask_for_adapters(out.adapted, t, panel, first, vectors);
            times_panel<kFormat>(w, panel, first, alone ? 1 : vectors, rows, count, t + count == tokens, y);
            if constexpr (traits(traits(kFormat).activations).outliers) {
                const uint8_t* data = w.panel(panel);
                const float* scale = (const float*)(data + (size_t)rows.padded * kPanelRows);
                if (vectors == kVectors) add_outliers<kVectors>(data, scale, first, rows, count, y);
                else add_outliers<kVectors / 2>(data, scale, first, rows, count, y);
            }
            if (out.adapted.adapters) add_adapters(out.adapted, t, count, panel, first, vectors, y);
            epilogue(w, y, t, count, panel, first, vectors, out);
        }
    }
}

#ifdef PRONK_PRODUCTS
template <Format kFormat>
constexpr bool kOwn = traits(kFormat).columns == 2 || kAmx<kFormat>;  // pairs, and what AMX multiplies
#else
template <Format kFormat>
constexpr bool kOwn = true;
#endif

template <Format kFormat>
constexpr decltype(Kernels::matmul) matmul_of() {
    if constexpr (kOwn<kFormat>) return matmul_as<kFormat>;
    else return other::matmul;
}

// Of codes of fewer bits there is none: see finest_beside() in adapter.cpp.
template <Format kFormat>
constexpr decltype(Kernels::first_factor) first_factor_of() {
    if constexpr (traits(kFormat).bits != 8) return nullptr;
    else if constexpr (kAmx<kFormat> && traits(kFormat).columns == 2) return amx_first_factor<kFormat>;
    else if constexpr (kOwn<kFormat> && !kAmx<kFormat>) return first_factor_as<kFormat, typename TilesOf<kFormat>::type::Multiplies>;
    else return other::first_factor;
}

template <class Indices>
struct OfEveryFormat;
template <int... kIndex>
struct OfEveryFormat<std::integer_sequence<int, kIndex...>> {
    static constexpr decltype(Kernels::matmul) matmul[] = {matmul_of<static_cast<Format>(kIndex)>()...};
    static constexpr decltype(Kernels::first_factor) first_factor[] = {first_factor_of<static_cast<Format>(kIndex)>()...};
};

}  // namespace

void matmul(const Matrix& w, const Rows& x, int tokens, int begin, int end, const Output& out) {
    using All = OfEveryFormat<std::make_integer_sequence<int, count_of(kFormats)>>;
    All::matmul[static_cast<int>(w.format)](w, x, tokens, begin, end, out);
}

void first_factor(const Matrix& a, const Rows& x, int tokens, float* u, size_t stride) {
    using All = OfEveryFormat<std::make_integer_sequence<int, count_of(kFormats)>>;
    All::first_factor[static_cast<int>(a.format)](a, x, tokens, u, stride);
}

}  // namespace pronk::PRONK_TARGET
