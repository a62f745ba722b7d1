// Products of groups of 32 columns: codes that are bytes, in a panel or unpacked from one, times what x brings. Part of
// kernels_matmul.cpp; planes.inl says which groups, and in which order. What is summed in which order is the same for any tile.

// What x brings to the products of a group, of which parts may have scales of their own. Of: what planes.inl says of the format.
template <class Of>
struct Brought {
    const Rows& x;
    int group;

    // What sums begin with, for codes are around their middle.
    template <int kPart>
    __attribute__((always_inline)) I start(int t) const {
        const int at = t * x.groups + group;
        if constexpr (!Of::middle) return S::set_int(0);
        else if constexpr (Of::parts == 2) return S::begin(x.half_sums[2 * at + kPart], -Of::middle);
        else if constexpr (Of::wide) return S::set_int(-Of::middle * x.sum[at]);
        else return S::begin(x.words[at], -Of::middle);
    }
    __attribute__((always_inline)) F scale(int t) const { return S::set(x.scale[t * x.groups + group]); }
    // What minima are multiplied with.
    template <int kPart>
    __attribute__((always_inline)) F sum(int t) const {
        const int at = t * x.groups + group;
        if constexpr (Of::parts == 2) return S::set(x.scale[at] * (float)S::total(x.half_sums[2 * at + kPart]));
        else return S::set(x.scaled_sum[at]);
    }
};

// The same of some groups and tokens, side by side, for tiles that have few registers.
template <class Of>
struct LookedUp {
    int32_t starts[Of::parts][kGroupsAtOnce][kTokensAtOnce];
    float sums[Of::parts][kGroupsAtOnce][kTokensAtOnce], scales[kGroupsAtOnce][kTokensAtOnce];

    LookedUp(const Rows& x, int from, int to, int tokens) {
        for (int t = 0; t < tokens; ++t)
            for (int g = 0; g < to - from; ++g) {
                const int at = t * x.groups + from + g;
                scales[g][t] = x.scale[at];
                for (int part = 0; part < Of::parts; ++part) {
                    const int32_t words = Of::parts == 2 ? x.half_sums[2 * at + part] : x.words[at];
                    if constexpr (Of::middle) starts[part][g][t] = Of::wide ? -Of::middle * x.sum[at] : S::times(words, -Of::middle);
                    if constexpr (Of::minima) sums[part][g][t] = Of::parts == 2 ? x.scale[at] * (float)S::total(words) : x.scaled_sum[at];
                }
            }
    }

    struct Group {
        const LookedUp& all;
        int group, first;  // the first token

        template <int kPart>
        __attribute__((always_inline)) I start(int t) const {
            return S::set_int(Of::middle ? all.starts[kPart][group][first + t] : 0);
        }
        __attribute__((always_inline)) F scale(int t) const { return S::set(all.scales[group][first + t]); }
        template <int kPart>
        __attribute__((always_inline)) F sum(int t) const { return S::set(all.sums[kPart][group][first + t]); }
    };
    __attribute__((always_inline)) Group of(int group, int first) const { return {*this, group, first}; }
};

// Where sums of floats are meanwhile: in registers, or in y [T][64], where there are none left for them.
template <int T, int R>
struct InRegisters {
    F (&acc)[T][R];
    __attribute__((always_inline)) F get(int t, int r) const { return acc[t][r]; }
    __attribute__((always_inline)) void put(int t, int r, F sum) const { acc[t][r] = sum; }
};
struct InMemory {
    float* y;
    __attribute__((always_inline)) F get(int t, int r) const { return S::load(y + t * kPanelRows + r * 16); }
    __attribute__((always_inline)) void put(int t, int r, F sum) const { S::store(y + t * kPanelRows + r * 16, sum); }
};

// total += one group of weights times that of x, whose bytes are at xs.
template <class Of, int T, int R, class Weights, class X, class Total>
PRONK_INLINE void add_group(const Weights& weights, const X& x, const uint8_t* xs, size_t stride, const Total& total) {
    constexpr int steps = kSteps / Of::parts;
    [[maybe_unused]] I joined[T][R];
    const auto part = [&]<int kPart>(std::integral_constant<int, kPart>) __attribute__((always_inline)) {
        I sum[T][R];
#pragma GCC unroll 6
        for (int t = 0; t < T; ++t) {
            const I start = x.template start<kPart>(t);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sum[t][r] = start;
        }
        constexpr int period = Weights::period < steps ? Weights::period : steps, periods = steps / period;
        const auto step = [&]<int kStep>(std::integral_constant<int, kStep>, size_t at) __attribute__((always_inline)) {
            S::Bytes w[R];
            for (int r = 0; r < R; ++r) weights.template ask<kStep>(r, at);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) w[r] = weights.template codes<kStep>(r, at);
#pragma GCC unroll 6
            for (int t = 0; t < T; ++t) {
                const I broadcast = S::set_int(word(xs + t * stride + 4 * (kStep + at * period)));
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    if constexpr (Of::wide) sum[t][r] = S::dot4(sum[t][r], w[r], broadcast);
                    else sum[t][r] = S::dot_short(sum[t][r], w[r], broadcast);
                }
            }
        };
        const auto some = [&](size_t at) __attribute__((always_inline)) {
            [&]<int... kStep>(std::integer_sequence<int, kStep...>) __attribute__((always_inline)) {
                if constexpr (periods == 1) (step(std::integral_constant<int, kPart * steps + kStep>(), 0), ...);
                else (step(std::integral_constant<int, kStep>(), kPart * periods + at), ...);
            }(std::make_integer_sequence<int, period>());
        };
        if constexpr (T <= kWhole) {
            // Not unrolled: processors foresee what a load will read by the stride of that one instruction, and many of them with
            // long strides are not foreseen. What few tokens read comes from memory.
#pragma GCC unroll 1
            for (size_t at = 0; at < periods; ++at) some(at);
        } else {
#pragma GCC unroll 8
            for (size_t at = 0; at < periods; ++at) some(at);
        }
        if constexpr (Of::joined) {
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const I factors = weights.factors(kPart, r);
#pragma GCC unroll 6
                for (int t = 0; t < T; ++t) {
                    const I of_part = S::widened(sum[t][r], factors);
                    joined[t][r] = kPart == 0 ? of_part : S::add_int(joined[t][r], of_part);
                }
            }
            return;
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const F scale = weights.scale(kPart, r);
            [[maybe_unused]] F minimum;
            if constexpr (Of::minima) minimum = weights.minimum(kPart, r, scale);
#pragma GCC unroll 6
            for (int t = 0; t < T; ++t) {
                I whole = sum[t][r];
                if constexpr (!Of::wide) whole = S::widened(whole);
                F all = S::fma(S::to_float(whole), S::mul(scale, x.scale(t)), total.get(t, r));
                if constexpr (Of::minima) all = S::fma(minimum, x.template sum<kPart>(t), all);
                total.put(t, r, all);
            }
        }
    };
    part(std::integral_constant<int, 0>());
    if constexpr (Of::parts == 2) part(std::integral_constant<int, 1>());
    if constexpr (Of::joined) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const F scale = weights.scale(r);
            [[maybe_unused]] F minima[2];
            if constexpr (Of::minima) minima[0] = weights.minimum(0, r, scale), minima[1] = weights.minimum(1, r, scale);
#pragma GCC unroll 6
            for (int t = 0; t < T; ++t) {
                F all = S::fma(S::to_float(joined[t][r]), S::mul(scale, x.scale(t)), total.get(t, r));
                if constexpr (Of::minima) all = S::fma(minima[1], x.template sum<1>(t), S::fma(minima[0], x.template sum<0>(t), all));
                total.put(t, r, all);
            }
        }
    }
}

template <class Of, int T, int R, class Weights>
PRONK_INLINE void add_group_of(const Weights& weights, const Rows& x, int g, F (&acc)[T][R]) {
    add_group<Of, T, R>(weights, Brought<Of>{x, g}, x.data + g * kGroup, x.stride, InRegisters<T, R>{acc});
}

// Tokens of a tile whose sums of floats are in memory: products of VPMADDUBSW, which another instruction adds up, need registers of
// their own.
constexpr int kTokensInMemory = tile_tokens(1) - (S::sums_narrow ? 1 : 0);

// Groups [from, to) of some tokens are added to y [tokens][64]. kMost: tokens of a tile. ask<R>(t, g, v): for what comes next, by the tile
// of tokens from t on, before it multiplies R vectors from v on of group g.
template <class Of, int kMost, class WeightsOf, class Ask>
PRONK_INLINE void add_groups(const WeightsOf& weights_of, const Ask& ask, int from, int to, int first, int vectors, const Rows& x, int tokens, float* y) {
    const LookedUp<Of> brought(x, from, to, tokens);
    in_tiles<kMost>(tokens, [&]<int T>(std::integral_constant<int, T>, int t) {
        constexpr int R = tile_vectors(T, 1) < kVectors / 2 ? tile_vectors(T, 1) : kVectors / 2;
        for (int g = from; g < to; ++g)
            for (int v = first; v < first + vectors; v += R) {
                ask.template operator()<R>(t, g, v);
                add_group<Of, T, R>(weights_of(g, v * 16), brought.of(g - from, t), x.data + t * x.stride + g * kGroup, x.stride,
                                    InMemory{y + t * kPanelRows + v * 16});
            }
    });
}

// The same where there are registers for sums of floats.
template <class Of, int kMost, class WeightsOf, class Ask>
void add_groups_in_registers(const WeightsOf& weights_of, const Ask& ask, int from, int to, int first, int vectors, const Rows& x, int tokens, float* y) {
    in_tiles<kMost>(tokens, [&]<int T>(std::integral_constant<int, T>, int t) {
        constexpr int R = tile_vectors(T, 2) < kVectors / 2 ? tile_vectors(T, 2) : kVectors / 2;
        for (int v = first; v < first + vectors; v += R) {
            const InMemory all{y + t * kPanelRows + v * 16};
            F acc[T][R];
#pragma GCC unroll 6
            for (int i = 0; i < T; ++i)
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) acc[i][r] = all.get(i, r);
            for (int g = from; g < to; ++g) {
                ask.template operator()<R>(t, g, v);
                add_group_of<Of>(weights_of(g, v * 16), x.at(t), g, acc);
            }
#pragma GCC unroll 6
            for (int i = 0; i < T; ++i)
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) all.put(i, r, acc[i][r]);
        }
    });
}
