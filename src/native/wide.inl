// Products of several tokens where an instruction set multiplies a format only as wider numbers: bytes as words, or bfloat16
// as floats. Part of kernels_matmul.cpp.
//
// x is widened once for all rows of a panel, some columns at a time; weights in registers, by each tile. What is summed in
// which order is the same as where both are widened for each product.

// A step of weights makes two vectors, which x has kApart bytes apart. V is S; a parameter, so that nobody asks who has none.
template <class V, int kApart>
struct OpBytes {
    static constexpr int vector = 64, step = 4;
    static constexpr bool streamed = false;
    struct Both { I even, odd; };
    using Acc = I;
    using W = Both;
    using X = Both;
    PRONK_INLINE W weights(const uint8_t* p) {
        const S::Bytes bytes = S::load_bytes(p);
        return {V::even_words(bytes), V::odd_words(bytes)};
    }
    PRONK_INLINE X broadcast(const uint8_t* p) { return {S::set_int(word(p)), S::set_int(word(p + kApart))}; }
    PRONK_INLINE I dot(I acc, W w, X x) { return V::dot_words(V::dot_words(acc, w.even, x.even), w.odd, x.odd); }
};

template <class V, int kApart>
struct OpPairs {
    static constexpr int vector = 64, step = 2;
    static constexpr bool streamed = false;
    struct Both { F first, second; };
    using Acc = F;
    using W = Both;
    using X = Both;
    PRONK_INLINE W weights(const uint8_t* p) {
        const S::Pairs pairs = S::load_pairs(p);
        return {V::first_floats(pairs), V::second_floats(pairs)};
    }
    PRONK_INLINE X broadcast(const uint8_t* p) { return {S::set(number(p)), S::set(number(p + kApart))}; }
    PRONK_INLINE F dot(F acc, W w, X x) { return S::fma(w.second, x.second, S::fma(w.first, x.first, acc)); }
};

template <class V, int kColumns>
struct WideBytes {
    using Op = OpBytes<V, kColumns>;
    using Number = int16_t;
    static constexpr int columns = kColumns, bytes = 1, least = 2;  // at once; of a number before; tokens that are worth it
    static void numbers(const uint8_t* x, int count, Number* out) {
        for (int at = 0; at < count; at += 32) V::widen_bytes(x + at, out + at / 2, out + (kColumns + at) / 2);
    }
};

template <class V, int kColumns>
struct WidePairs {
    using Op = OpPairs<V, kColumns * 2>;
    using Number = float;
    static constexpr int columns = kColumns, bytes = 2, least = 4;
    static void numbers(const uint8_t* x, int count, Number* out) {
        for (int at = 0; at < count; at += 32) V::widen_pairs((const uint16_t*)x + at, out + at / 2, out + (kColumns + at) / 2);
    }
};

template <class Op, class Ask, int T, int R>
PRONK_INLINE void accumulate_wide(const uint8_t* w, const uint8_t* x, size_t stride, int steps, Ask asked, typename Op::Acc (&sums)[T][R]) {
    for (int step = 0; step < steps; ++step, w += kLineBytes, x += 4) {
        asked.next();
        accumulate<Op, R, T>(w, x, stride, 1, sums);
    }
}

constexpr int kWideTokens = 5;  // of a tile: two vectors of weights are in registers

template <Format kFormat>
struct WideOf;
template <Format kFormat>
    requires(traits(kFormat).scales == Scales::row && S::widens_bytes)
struct WideOf<kFormat> : std::type_identity<WideBytes<S, 64>> {};
template <Format kFormat>  // bf16, whose weights lie in pairs of columns
    requires(traits(kFormat).columns == 2 && S::widens_pairs)
struct WideOf<kFormat> : std::type_identity<WidePairs<S, 64>> {};
template <Format kFormat>
concept Widens = requires { typename WideOf<kFormat>::type; };

// y [tokens][64] of some rows of a panel.
template <class Wide>
void wide_of_panel(const uint8_t* panel, int cols, int first, int vectors, const Rows& x, int tokens, float* y) {
    constexpr bool row_scales = std::is_same_v<typename Wide::Number, int16_t>;
    using Op = typename Wide::Op;
    using Acc = typename Op::Acc;
    alignas(64) typename Wide::Number numbers[kTokensAtOnce][Wide::columns];
    Acc acc[kTokensAtOnce * kVectors];
    for (int t = 0; t < tokens; ++t)
        for (int v = first; v < first + vectors; ++v) {
            if constexpr (row_scales) acc[t * kVectors + v] = S::set_int(-traits(Format::int8).offset * x.sum[t]);
            else acc[t * kVectors + v] = S::zero();
        }
    for (int from = 0, count; from < cols; from += count) {
        count = cols - from < Wide::columns ? cols - from : Wide::columns;
        const uint8_t* part = panel + (size_t)from * Wide::bytes * kPanelRows;
        for (int t = 0; t < tokens; ++t) Wide::numbers(x.data + t * x.stride + from * Wide::bytes, count, numbers[t]);
        in_tiles<kWideTokens, true>(tokens, [&]<int T>(std::integral_constant<int, T>, int t) {
            constexpr int R = tile_vectors(T, 1) < kVectors / 2 ? tile_vectors(T, 1) : kVectors / 2;
            for (int v = first; v < first + vectors; v += R) {
                Acc sums[T][R];
#pragma GCC unroll 6
                for (int i = 0; i < T; ++i)
#pragma GCC unroll 2
                    for (int r = 0; r < R; ++r) sums[i][r] = acc[(t + i) * kVectors + v + r];
                const int steps = count / Op::step;
                const auto with = [&](auto asked) __attribute__((always_inline)) {
                    accumulate_wide<Op>(part + v * 64, (const uint8_t*)numbers[t], sizeof numbers[0], steps, asked, sums);
                };
                if (t) with(NothingAsked());
                else with(Asked<1, R>(part, steps, v, vectors));
#pragma GCC unroll 6
                for (int i = 0; i < T; ++i)
#pragma GCC unroll 2
                    for (int r = 0; r < R; ++r) acc[(t + i) * kVectors + v + r] = sums[i][r];
            }
        });
    }
    const float* scale = (const float*)(panel + (size_t)cols * kPanelRows);
    for (int t = 0; t < tokens; ++t)
        for (int v = first; v < first + vectors; ++v) {
            const Acc sum = acc[t * kVectors + v];
            if constexpr (row_scales)
                S::store(y + t * kPanelRows + v * 16, S::mul(S::mul(S::to_float(sum), S::set(x.scale[t])), S::load(scale + v * 16)));
            else S::store(y + t * kPanelRows + v * 16, sum);
        }
}

// y [tokens][64] += groups [from, to) of codes that are bytes, each group with a scale; sums of floats stay in y, for there are no
// registers left for them. codes(g) gives [8][64][4] bytes, scale(g, row) those of 16 rows. kAhead: codes come from memory.
template <class V, bool kAhead, class Codes, class Scale>
void add_words(const Codes& codes, const Scale& scale, int from, int to, int first, int vectors, int middle, const Rows& x, int tokens, float* y) {
    using Wide = WideBytes<V, kGroup>;
    alignas(64) typename Wide::Number numbers[kGroupsAtOnce][kTokensAtOnce][kGroup];
    int32_t begin[kGroupsAtOnce][kTokensAtOnce];
    float scales[kGroupsAtOnce][kTokensAtOnce];
    for (int t = 0; t < tokens; ++t)
        for (int g = from; g < to; ++g) {
            Wide::numbers(x.data + t * x.stride + g * kGroup, kGroup, numbers[g - from][t]);
            begin[g - from][t] = -middle * x.sum[t * x.groups + g];
            scales[g - from][t] = x.scale[t * x.groups + g];
        }
    in_tiles<kWideTokens, true>(tokens, [&]<int T>(std::integral_constant<int, T>, int t) {
        constexpr int R = tile_vectors(T, 1) < kVectors / 2 ? tile_vectors(T, 1) : kVectors / 2;
        const bool ahead = kAhead && t == 0;
        for (int at = 0; at < to - from; ++at) {
            const uint8_t* group = codes(from + at);
            for (int v = first; v < first + vectors; v += R) {
                I sums[T][R];
#pragma GCC unroll 6
                for (int i = 0; i < T; ++i)
#pragma GCC unroll 2
                    for (int r = 0; r < R; ++r) sums[i][r] = S::set_int(begin[at][t + i]);
                constexpr int steps = kGroup / Wide::Op::step;
                const auto with = [&](auto asked) __attribute__((always_inline)) {
                    accumulate_wide<typename Wide::Op>(group + v * 64, (const uint8_t*)numbers[at][t], sizeof numbers[0][0], steps, asked, sums);
                };
                if (ahead) with(Asked<1, R>(group, steps, v, vectors));
                else with(NothingAsked());
#pragma GCC unroll 2
                for (int r = 0; r < R; ++r) {
                    const F of_rows = scale(from + at, (v + r) * 16);
#pragma GCC unroll 6
                    for (int i = 0; i < T; ++i) {
                        float* to_y = y + (t + i) * kPanelRows + (v + r) * 16;
                        S::store(to_y, S::fma(S::to_float(sums[i][r]), S::mul(of_rows, S::set(scales[at][t + i])), S::load(to_y)));
                    }
                }
            }
            if (ahead) __builtin_prefetch(group + kGroup * kPanelRows + kPrefetch), __builtin_prefetch(group + kGroup * kPanelRows + kPrefetch + 64);
        }
    });
}
