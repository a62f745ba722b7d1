// Products of kLeastNarrow tokens and more in int8 where an instruction set sums bytes in 16 bits alone (VPMADDUBSW). Part of kernels_matmul.cpp.
//
// Weights are w + 128, so that four products, two of each of two words, fit in 16 bits where what x has over 0 among them is 128 at
// most, and what it has under 0 too. Most are so, for rows are turned, or without their outliers. Words that are not are zeros in
// Rows::narrow, and multiplied apart, each alone: kernels.cpp (narrow_row) chooses them. All sums are exact, so bits are those of
// any other way.

constexpr int kNarrowTokens = 6, kNarrowColumns = 128;  // of a tile; at once

// Whether so little goes apart that the rest is worth it: there are rows of which all does, such as what rounding leaves of others.
PRONK_INLINE bool mostly_fit(const Rows& x, int tokens) {
    int64_t words = 0;
    for (int t = 0; t < tokens; ++t) words += x.spilled_count[t];
    return 10 * words <= static_cast<int64_t>(tokens) * x.padded;  // 0.4 of them
}

// sums += `columns` columns, two words at a time.
template <class V, class Ask, int T, int R>
PRONK_INLINE void accumulate_narrow(const uint8_t* w, const uint8_t* x, size_t stride, int columns, Ask asked, I (&sums)[T][R]) {
#pragma GCC unroll 1
    for (int k = 0; k < columns; k += 8, w += 2 * kLineBytes, x += 8) {
        asked.next();
        S::Bytes first[R], second[R];
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) first[r] = S::load_bytes(w + r * 64), second[r] = S::load_bytes(w + kLineBytes + r * 64);
#pragma GCC unroll 6
        for (int t = 0; t < T; ++t) {
            const I a = S::set_int(word(x + t * stride)), b = S::set_int(word(x + t * stride + 4));
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) sums[t][r] = V::dot_narrow(sums[t][r], first[r], a, second[r], b);
        }
    }
}

// acc[row] += the words of one token that were left out, each times 16 kCount rows.
template <class V, int kCount>
void add_spilled(const uint8_t* w, const Spilled* spilled, int count, I* acc) {
    I sums[kCount];
    for (int v = 0; v < kCount; ++v) sums[v] = acc[v];
    for (int i = 0; i < count; ++i) {
        const uint8_t* line = w + static_cast<size_t>(spilled[i].at) * kLineBytes;
        const I x = S::set_int(spilled[i].word);
#pragma GCC unroll 4
        for (int v = 0; v < kCount; ++v) sums[v] = V::dot_narrow(sums[v], S::load_bytes(line + v * 64), x);
    }
    for (int v = 0; v < kCount; ++v) acc[v] = sums[v];
}

// y [tokens][64] of some rows of a panel. V is S; a parameter, so that nobody asks who has none.
template <class V>
void narrow_of_panel(const uint8_t* panel, int cols, int first, int vectors, const Rows& x, int tokens, float* y) {
    I acc[kTokensAtOnce][kVectors];
    for (int t = 0; t < tokens; ++t)
        for (int v = 0; v < vectors; ++v) acc[t][v] = S::set_int(-traits(Format::int8).offset * x.sum[t]);
    const uint8_t* rows = panel + first * 64;
    for (int from = 0, count; from < cols; from += count) {
        count = cols - from < kNarrowColumns ? cols - from : kNarrowColumns;
        const uint8_t* part = rows + static_cast<size_t>(from) * kPanelRows;
        in_tiles<kNarrowTokens, true>(tokens, [&]<int T>(std::integral_constant<int, T>, int t) {
            constexpr int R = T <= 2 ? 2 : 1;
            for (int v = 0; v < vectors; v += R) {
                I sums[T][R];
#pragma GCC unroll 6
                for (int i = 0; i < T; ++i)
#pragma GCC unroll 2
                    for (int r = 0; r < R; ++r) sums[i][r] = acc[t + i][v + r];
                const auto with = [&](auto asked) __attribute__((always_inline)) {
                    accumulate_narrow<V>(part + v * 64, x.narrow + t * x.stride + from, x.stride, count, asked, sums);
                };
                if (t || R > 1) with(NothingAsked());  // the first tile has three tokens or more
                else with(Asked<2, 1>(part, count / 8, v, vectors));
#pragma GCC unroll 6
                for (int i = 0; i < T; ++i)
#pragma GCC unroll 2
                    for (int r = 0; r < R; ++r) acc[t + i][v + r] = sums[i][r];
            }
        });
    }
    const float* scale = (const float*)(panel + (size_t)cols * kPanelRows) + first * 16;
    for (int t = 0; t < tokens; ++t) {
        const Spilled* spilled = x.spilled + t * x.most_spilled();
        if (vectors == kVectors) add_spilled<V, kVectors>(rows, spilled, x.spilled_count[t], acc[t]);
        else add_spilled<V, kVectors / 2>(rows, spilled, x.spilled_count[t], acc[t]);
        for (int v = 0; v < vectors; ++v)
            S::store(y + t * kPanelRows + (first + v) * 16,
                     S::mul(S::mul(S::to_float(acc[t][v]), S::set(x.scale[t])), S::load(scale + v * 16)));
    }
}
