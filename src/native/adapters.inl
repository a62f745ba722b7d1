// What adapters add to products: u = A x, and y += B u (adapter.h). Part of kernels_matmul.cpp.

constexpr int kAdapterPrefetch = 3072;  // bytes: factors are small, and are read beside weights that are asked for already

// -- the first factor: u [T][ranks] of panels of 16 ranks -----------------------------------------------------------------

// Sums side by side of what has no rounding, where a tile has few: one would wait for the other's end.
template <class Op, int T>
constexpr int kChains = std::is_same_v<typename Op::Acc, I> ? (T == 1 ? 4 : T == 2 ? 2 : 1) : 1;

// acc[t] += `steps` steps of a panel.
template <class Op, int T>
PRONK_INLINE void accumulate_ranks(const uint8_t* w, const uint8_t* x, size_t stride, int steps, typename Op::Acc (&acc)[T]) {
    constexpr int chains = kChains<Op, T>;
    typename Op::Acc sums[chains][T];
    for (int t = 0; t < T; ++t) sums[0][t] = acc[t];
    if constexpr (chains > 1)
        for (int c = 1; c < chains; ++c)
            for (int t = 0; t < T; ++t) sums[c][t] = S::set_int(0);
    const auto step = [&](int c) __attribute__((always_inline)) {
        const typename Op::W weights = Op::weights(w);
        if constexpr (T <= 2) __builtin_prefetch(w + kAdapterPrefetch);
#pragma GCC unroll 6
        for (int t = 0; t < T; ++t) sums[c][t] = Op::dot(sums[c][t], weights, Op::broadcast(x + t * stride));
        w += Op::vector, x += 4;
    };
    for (; steps >= chains; steps -= chains)
#pragma GCC unroll 4
        for (int c = 0; c < chains; ++c) step(c);
    for (; steps > 0; --steps) step(0);
    for (int t = 0; t < T; ++t) {
        acc[t] = sums[0][t];
        if constexpr (chains > 1)
            for (int c = 1; c < chains; ++c) acc[t] = S::add_int(acc[t], sums[c][t]);
    }
}

// As the format's matrices have it: [K] columns of 16 rows, and then their scales; or those of a group behind it.
template <Format kFormat, class Op, int T>
void ranks_tile(const uint8_t* panel, const Rows& x, int cols, float* y) {
    constexpr const FormatTraits& format = traits(kFormat);
    if constexpr (format.scales == Scales::group) {
        F sum[T];
        for (int t = 0; t < T; ++t) sum[t] = S::zero();
        for (int g = 0; g < x.groups; ++g, panel += format.bytes * kRankRows) {
            I acc[T];
            for (int t = 0; t < T; ++t) acc[t] = S::set_int(-format.offset * x.sum[t * x.groups + g]);
            accumulate_ranks<Op, T>(panel, x.data + g * kGroup, x.stride, kSteps, acc);
            const F scale = S::load_f16(panel + kGroup * kRankRows);
            for (int t = 0; t < T; ++t) sum[t] = S::fma(S::to_float(acc[t]), S::mul(scale, S::set(x.scale[t * x.groups + g])), sum[t]);
        }
        for (int t = 0; t < T; ++t) S::store(y + t * kRankRows, sum[t]);
    } else {
        const int padded = format.padded(cols);
        typename Op::Acc acc[T];
        for (int t = 0; t < T; ++t) {
            if constexpr (format.scales == Scales::row) acc[t] = S::set_int(-format.offset * x.sum[t]);
            else acc[t] = S::zero();
        }
        accumulate_ranks<Op, T>(panel, x.data, x.stride, padded / Op::step, acc);
        for (int t = 0; t < T; ++t) {
            if constexpr (format.scales == Scales::row) {
                const F scale = S::load((const float*)(panel + (size_t)padded * kRankRows));
                S::store(y + t * kRankRows, S::mul(S::mul(S::to_float(acc[t]), S::set(x.scale[t])), scale));
            } else {
                S::store(y + t * kRankRows, acc[t]);
            }
        }
    }
}

template <Format kFormat, class Op>
void first_factor_as(const Matrix& a, const Rows& x, int tokens, float* u, size_t stride) {
    for (int panel = 0; panel < a.panels; ++panel, u += kRankRows) {
        const uint8_t* data = a.panel(panel);
        const int ranks = a.rows - panel * kRankRows;
        in_tiles<tile_tokens(1)>(tokens, [&]<int T>(std::integral_constant<int, T>, int t) {
            alignas(64) float y[T * kRankRows];
            const Rows rows = x.at(t);
            ranks_tile<kFormat, Op, T>(data, rows, a.cols, y);
            if constexpr (traits(traits(kFormat).activations).outliers)
                add_outliers<1, kRankRows>(data, (const float*)(data + (size_t)rows.padded * kRankRows), 0, rows, T, y);
            for (int i = 0; i < T; ++i) store_part(u + (t + i) * stride, S::load(y + i * kRankRows), ranks);
        });
    }
}

// -- the second factor --------------------------------------------------------------------------------------------------

// y [T][64], of which 32 are the half panel's, += b u.
template <class Op, int T>
void add_low_rank(const uint8_t* b, int rank, const float* u, size_t stride, float* y) {
    constexpr int R = tile_vectors(T, 1) < kVectors / 2 ? tile_vectors(T, 1) : kVectors / 2;
    for (int v = 0; v < kVectors / 2; v += R) {
        F acc[T][R];
#pragma GCC unroll 6
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) acc[t][r] = S::load(y + t * kPanelRows + (v + r) * 16);
        const uint8_t* p = b + v * Op::vector;
        for (int k = 0; k < rank; ++k, p += kVectors / 2 * Op::vector) {
            F w[R];
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) w[r] = Op::weights(p + r * Op::vector);
#pragma GCC unroll 6
            for (int t = 0; t < T; ++t) {
                const F x = S::set(u[t * stride + k]);
#pragma GCC unroll 2
                for (int r = 0; r < R; ++r) acc[t][r] = S::fma(w[r], x, acc[t][r]);
            }
        }
#pragma GCC unroll 6
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) S::store(y + t * kPanelRows + (v + r) * 16, acc[t][r]);
    }
}

// What bytes are multiplied with: RankCodes as they are, ...
struct HighAndLow {
    static constexpr int accumulators = 2;
    struct Sum { I high, low; };
    using W = S::Bytes;
    PRONK_INLINE Sum begin(const float* u) {
        return {S::set_int(word(u + offsetof(RankCodes, high) / 4)), S::set_int(word(u + offsetof(RankCodes, low) / 4))};
    }
    PRONK_INLINE W weights(const uint8_t* p) { return S::load_bytes(p); }
    PRONK_INLINE Sum add(Sum sum, W w, I high, I low) { return {S::dot4(sum.high, w, high), S::dot4(sum.low, w, low)}; }
    PRONK_INLINE F total(Sum sum) { return S::fma(S::to_float(sum.high), S::set(256), S::to_float(sum.low)); }
};

// ... or as words. V is S; see wide.inl.
template <class V>
struct EvenAndOdd {
    static constexpr int accumulators = 1;
    using Sum = I;
    struct W { I even, odd; };
    PRONK_INLINE Sum begin(const float* u) { return S::set_int(word(u + offsetof(RankCodes, low) / 4)); }
    PRONK_INLINE W weights(const uint8_t* p) {
        const S::Bytes bytes = S::load_bytes(p);
        return {V::even_words(bytes), V::odd_words(bytes)};
    }
    PRONK_INLINE Sum add(Sum sum, W w, I even, I odd) { return V::dot_words(V::dot_words(sum, w.even, even), w.odd, odd); }
    PRONK_INLINE F total(Sum sum) { return S::to_float(sum); }
};

// The same of bytes, in whole numbers, whose sum is exact.
template <class Op, int T>
void add_low_rank_of_bytes(const uint8_t* b, int rank, const float* u, size_t stride, float* y) {
    constexpr int most = tile_vectors(T, Op::accumulators), R = most < kVectors / 2 ? most : kVectors / 2;
    const int words = (rank + 3) / 4;
    for (int v = 0; v < kVectors / 2; v += R) {
        typename Op::Sum sum[T][R];
#pragma GCC unroll 6
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) sum[t][r] = Op::begin(u + t * stride);
        const uint8_t* p = b + kPanelRows + v * OpInt8::vector;
        const float* x = u + sizeof(RankCodes) / 4;
        for (int k = 0; k < words; ++k, p += kVectors / 2 * OpInt8::vector, ++x) {
            typename Op::W w[R];
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) w[r] = Op::weights(p + r * OpInt8::vector);
#pragma GCC unroll 6
            for (int t = 0; t < T; ++t) {
                const I first = S::set_int(word(x + t * stride)), second = S::set_int(word(x + t * stride + words));
#pragma GCC unroll 2
                for (int r = 0; r < R; ++r) sum[t][r] = Op::add(sum[t][r], w[r], first, second);
            }
        }
        for (int r = 0; r < R; ++r) {
            const F scale = S::load_f16(b + (v + r) * 32);
#pragma GCC unroll 6
            for (int t = 0; t < T; ++t) {
                float* to = y + t * kPanelRows + (v + r) * 16;
                S::store(to, S::fma(S::mul(Op::total(sum[t][r]), S::set(u[t * stride])), scale, S::load(to)));
            }
        }
    }
}

// In register tiles of as many tokens as there are, or else of two and of one: they are bound by reading b from cache.
template <int kMost, class Tile>
PRONK_INLINE void in_adapter_tiles(int tokens, const Tile& tile) {
    for (int t = 0, count; t < tokens; t += count) {
        count = tokens - t >= kMost ? kMost : tokens - t >= 2 ? 2 : 1;
        if (count == kMost) tile(std::integral_constant<int, kMost>(), t);
        else if (count == 2) tile(std::integral_constant<int, 2>(), t);
        else tile(std::integral_constant<int, 1>(), t);
    }
}

void add_second_factor(const LowRank& of, int odd, const uint8_t* b, int tokens, const float* u, size_t stride, float* y) {
    const int rank = of.rank[odd];
    if (of.type == SecondFactor::bytes)
        return in_adapter_tiles<tile_tokens(2)>(tokens, [&]<int T>(std::integral_constant<int, T>, int t) {
            if constexpr (S::widens_bytes)
                add_low_rank_of_bytes<EvenAndOdd<S>, T>(b, rank, u + t * stride, stride, y + t * kPanelRows);
            else
                add_low_rank_of_bytes<HighAndLow, T>(b, rank, u + t * stride, stride, y + t * kPanelRows);
        });
    in_adapter_tiles<tile_tokens(1)>(tokens, [&]<int T>(std::integral_constant<int, T>, int t) {
        const auto add = of.type == SecondFactor::f16 ? add_low_rank<OpF16, T> : add_low_rank<OpF32, T>;
        add(b, rank, u + t * stride, stride, y + t * kPanelRows);
    });
}

// What adapters add to tokens [begin, begin + tokens), whose products with `vectors` of a panel are in y [T][64].
// One copy for all formats: little of a product's time is spent here.
__attribute__((noinline)) void add_adapters(const Adapted& adapted, int begin, int tokens, int panel, int first, int vectors, float* y) {
    for (int t = 0, stop; t < tokens; t = stop) {
        const int adapter = adapted.adapters[begin + t];
        for (stop = t + 1; stop < tokens && adapted.adapters[begin + stop] == adapter;) ++stop;
        if (adapter < 0) continue;
        const LowRank& of = adapted.of[adapter][adapted.product];
        if (!of.b) continue;
        for (int v = first; v < first + vectors; v += kVectors / 2) {
            const int odd = v / (kVectors / 2);
            if (of.rank[odd] == 0) continue;
            const uint8_t* b = of.b + panel * (of.half_bytes(0) + of.half_bytes(1)) + odd * of.half_bytes(0);
            const float* u = adapted.u + (begin + t) * adapted.stride + of.first[odd];
            add_second_factor(of, odd, b, stop - t, u, adapted.stride, y + t * kPanelRows + v * 16);
        }
    }
}

// What the first of them will read of them, a few lines that come too late where they are asked for when they are needed.
PRONK_INLINE void ask_for_adapters(const Adapted& adapted, int token, int panel, int first, int vectors) {
    const int adapter = adapted.adapters[token];
    if (adapter < 0) return;
    const LowRank& of = adapted.of[adapter][adapted.product];
    if (!of.b) return;
    const size_t even = of.half_bytes(0), odd = of.half_bytes(1);
    const uint8_t* b = of.b + panel * (even + odd);
    const uint8_t *begin = b + (first ? even : 0), *end = b + even + (first + vectors > kVectors / 2 ? odd : 0);
    for (const uint8_t* line = begin; line < end && line < begin + kAdapterPrefetch; line += 64) __builtin_prefetch(line);
}
