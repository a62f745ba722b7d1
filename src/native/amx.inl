// Products in AMX's tiles (amx.h). Part of kernels_matmul.cpp.
//
// 32 tokens are two tiles, multiplied with 32 rows, so that four instructions share four tiles; of 16 and fewer one tile is multiplied
// with 64. Sums of bytes are exact; bfloat16 has AMX's order for any number of tokens. Asking for what comes next made all of it
// slower, from memory too.

constexpr int kAmxTokens = 2 * kAmxRows;  // at once

// What AMX multiplies: fewer tokens of bytes are as fast without.
template <Format kFormat>
constexpr bool kAmx = S::tiles && (traits(kFormat).columns == 2 || traits(kFormat).scales == Scales::row);
template <Format kFormat>
constexpr int kLeastAmx = traits(kFormat).columns == 2 ? 1 : 3;

// A panel of kRows rows and what it is multiplied with, step by step. Zeros fill up the last one.
template <int kRows>
struct AmxOperands {
    static constexpr size_t line = 4 * kRows;
    const uint8_t *weights, *x;
    size_t stride;
    int steps, rest;  // whole ones; lines of the last
    alignas(64) uint8_t last_weights[kAmxLines * line], last_x[kAmxTokens][kAmxBytes];

    AmxOperands(const uint8_t* panel, int lines, const Rows& rows)
        : weights(panel), x(rows.data), stride(rows.stride), steps(lines / kAmxLines), rest(lines % kAmxLines) {
        if (!rest) return;
        std::memset(last_weights, 0, sizeof last_weights);
        std::memcpy(last_weights, weights + steps * kAmxLines * line, rest * line);
    }

    void begin(int token, int count) {
        if (!rest) return;
        std::memset(last_x, 0, sizeof last_x);
        for (int t = 0; t < count; ++t) std::memcpy(last_x[t], x + (token + t) * stride + steps * kAmxBytes, rest * 4);
    }

    // add(weights of a step, x of the tokens from `token` on, bytes between these)
    template <class Add>
    __attribute__((always_inline)) void each(int token, const Add& add) const {
        const uint8_t *w = weights, *at = x + token * stride;
        for (int s = 0; s < steps; ++s, w += kAmxLines * line, at += kAmxBytes) add(w, at, stride);
        if (rest) add(last_weights, last_x[0], sizeof last_x[0]);
    }
};

// y [tokens][y_stride] of `vectors` from `first` on: sums of bytes are whole numbers in the place of floats.
template <bool kPairs, int kRows>
void amx_sums(const uint8_t* panel, int lines, int first, int vectors, const Rows& rows, int tokens, float* y, size_t y_stride) {
    AmxOperands<kRows> operands(panel, lines, rows);
    constexpr size_t line = AmxOperands<kRows>::line;
    const size_t bytes = y_stride * sizeof(float);
    for (int t = 0, count; t < tokens; t += count) {
        count = tokens - t < kAmxTokens ? tokens - t : kAmxTokens;
        const int few = count < kAmxRows ? count : kAmxRows, more = count - few;
        operands.begin(t, count);
        Amx::shape(few, more);
        for (int v = first, step; v < first + vectors; v += step) {
            float *to = y + t * y_stride + v * 16, *below = to + kAmxRows * y_stride;
            const bool two = first + vectors - v > 1;
            step = two ? 2 : 1;
            Amx::zero_all();
            if (more) {
                operands.each(t, [&](const uint8_t* w, const uint8_t* x, size_t stride) __attribute__((always_inline)) {
                    Amx::load<4>(x, stride), Amx::load<6>(w + v * 64, line), Amx::dot<kPairs, 0, 4, 6>();
                    Amx::load<5>(x + kAmxRows * stride, stride), Amx::dot<kPairs, 2, 5, 6>();
                    if (two) Amx::load<7>(w + v * 64 + 64, line), Amx::dot<kPairs, 1, 4, 7>(), Amx::dot<kPairs, 3, 5, 7>();
                });
                Amx::store<0>(to, bytes), Amx::store<2>(below, bytes);
                if (two) Amx::store<1>(to + 16, bytes), Amx::store<3>(below + 16, bytes);
            } else if (first + vectors - v == kVectors) {
                step = kVectors;
                operands.each(t, Amx::add_whole<kPairs>);
                Amx::store_whole(to, bytes);
            } else {
                operands.each(t, [&](const uint8_t* w, const uint8_t* x, size_t stride) __attribute__((always_inline)) {
                    Amx::load<4>(x, stride), Amx::load<6>(w + v * 64, line), Amx::dot<kPairs, 0, 4, 6>();
                    if (two) Amx::load<7>(w + v * 64 + 64, line), Amx::dot<kPairs, 1, 4, 7>();
                });
                Amx::store<0>(to, bytes);
                if (two) Amx::store<1>(to + 16, bytes);
            }
        }
    }
    Amx::release();
}

// y [tokens][64] of some rows of a panel.
template <Format kFormat>
void amx_of_panel(const uint8_t* panel, int cols, int first, int vectors, const Rows& x, int tokens, float* y) {
    constexpr const FormatTraits& format = traits(kFormat);
    constexpr bool pairs = format.columns == 2;
    const int padded = format.padded(cols);
    amx_sums<pairs, kPanelRows>(panel, padded / format.columns * format.bytes / 4, first, vectors, x, tokens, y, kPanelRows);
    if constexpr (pairs) return;
    const float* scale = (const float*)(panel + (size_t)padded * kPanelRows);
    for (int v = first; v < first + vectors; ++v) {
        const F of_rows = S::load(scale + v * 16);
        for (int t = 0; t < tokens; ++t) {
            float* to = y + t * kPanelRows + v * 16;
            const I sum = S::add_int(S::load_int((const int32_t*)to), S::set_int(-format.offset * x.sum[t]));
            S::store(to, S::mul(S::mul(S::to_float(sum), S::set(x.scale[t])), of_rows));
        }
    }
}

// An adapter's first factor of pairs, for its sums must have the order of all others.
template <Format kFormat>
void amx_first_factor(const Matrix& a, const Rows& x, int tokens, float* u, size_t stride) {
    alignas(64) float y[kAmxTokens * kRankRows];
    const int lines = traits(kFormat).padded(a.cols) / 2;
    for (int panel = 0; panel < a.panels; ++panel, u += kRankRows)
        for (int t = 0, count; t < tokens; t += count) {
            count = tokens - t < kAmxTokens ? tokens - t : kAmxTokens;
            amx_sums<true, kRankRows>(a.panel(panel), lines, 0, 1, x.at(t), count, y, kRankRows);
            for (int i = 0; i < count; ++i) store_part(u + (t + i) * stride, S::load(y + i * kRankRows), a.rows - panel * kRankRows);
        }
}
