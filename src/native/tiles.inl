// Register tiles: a few tokens times 16 to 64 rows of a panel. Part of kernels.inl.

// -- formats without groups: how one step of k reads weights, and what it does with them -----------------------------

// `vector` bytes hold 16 rows of a step, `step` columns are in it; activations take four bytes a step in every format.
struct OpF32 {
    static constexpr int vector = 64, step = 1;
    using Acc = F;
    using W = F;
    using X = F;
    PRONK_INLINE W weights(const uint8_t* p) { return S::load((const float*)p); }
    PRONK_INLINE X broadcast(const uint8_t* p) { return S::set(number(p)); }
    PRONK_INLINE Acc dot(Acc acc, W w, X x) { return S::fma(w, x, acc); }
};

struct OpF16 : OpF32 {
    static constexpr int vector = 32;
    PRONK_INLINE W weights(const uint8_t* p) { return S::load_f16(p); }
};

struct OpSigned8 : OpF32 {  // int8 keys and values
    static constexpr int vector = 16;
    PRONK_INLINE W weights(const uint8_t* p) { return S::load_int8(p); }
};

struct OpBF16 {
    static constexpr int vector = 64, step = 2;
    using Acc = F;
    using W = S::Pairs;
    using X = I;
    PRONK_INLINE W weights(const uint8_t* p) { return S::load_pairs(p); }
    PRONK_INLINE X broadcast(const uint8_t* p) { return S::set_int(word(p)); }
    PRONK_INLINE Acc dot(Acc acc, W w, X x) { return S::dot2(acc, w, x); }
};

struct OpInt8 {
    static constexpr int vector = 64, step = 4;
    using Acc = I;
    using W = S::Bytes;
    using X = I;
    PRONK_INLINE W weights(const uint8_t* p) { return S::load_bytes(p); }
    PRONK_INLINE X broadcast(const uint8_t* p) { return S::set_int(word(p)); }
    PRONK_INLINE Acc dot(Acc acc, W w, X x) { return S::dot4(acc, w, x); }
};

// How many vectors of rows a register tile for T tokens can have: accumulators, one vector each, and a broadcast.
constexpr int tile_vectors(int tokens, int accumulators) {
    for (int r = kVectors; r > 1; r /= 2)
        if ((r * tokens * accumulators + r) * S::registers_per_vector + 1 <= S::registers) return r;
    return 1;
}

constexpr int tile_tokens(int accumulators) {
    int t = kTileTokens;
    while (t > 1 && (t * accumulators + 1) * S::registers_per_vector + 1 > S::registers) --t;
    return t;
}

// A decode step reads each weight once, from memory: ask for it this many bytes ahead.
constexpr int kAhead = 3072;

// acc[t][r] += over `steps` steps; `w` points at the first of R vectors in a row of kVectors.
template <class Op, int R, int T>
PRONK_INLINE void accumulate(const uint8_t* w, const uint8_t* x, size_t stride, int steps, typename Op::Acc (&acc)[T][R]) {
    for (int s = 0; s < steps; ++s, w += kVectors * Op::vector, x += 4) {
        typename Op::W weights[R];
        if constexpr (T <= 2) {
            for (int line = 0; line < R * Op::vector; line += 64) __builtin_prefetch(w + kAhead + line);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) weights[r] = Op::weights(w + r * Op::vector);
#pragma GCC unroll 6
        for (int t = 0; t < T; ++t) {
            const typename Op::X broadcast = Op::broadcast(x + t * stride);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) acc[t][r] = Op::dot(acc[t][r], weights[r], broadcast);
        }
    }
}

template <class Op, int T, int R>
void tile(const Matrix& w, const uint8_t* panel, int first, const Rows& x, float* out) {
    typename Op::Acc acc[T][R];
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            if constexpr (std::is_same_v<Op, OpInt8>)
                acc[t][r] = S::set_int(-128 * x.sum[t]);  // weights are stored as w + 128
            else
                acc[t][r] = S::zero();
        }
    const int cols = padded_cols(w.format, w.cols);
    accumulate<Op, R, T>(panel + first * Op::vector, x.data, x.stride, cols / Op::step, acc);
    const float* scale = (const float*)(panel + (size_t)cols * kPanelRows) + first * 16;  // int8 only
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            if constexpr (std::is_same_v<Op, OpInt8>)
                S::store(out + t * kPanelRows + r * 16,
                         S::mul(S::mul(S::to_float(acc[t][r]), S::set(x.scale[t])), S::load(scale + r * 16)));
            else
                S::store(out + t * kPanelRows + r * 16, acc[t][r]);
        }
}

// -- formats with a scale for each 32 weights: exact integer sums within a group, floats across groups ----------------

template <Format kFormat, int T, int R>
void grouped_tile(const Matrix& w, const uint8_t* panel, int first, const Rows& x, float* out) {
    constexpr bool four_bits = kFormat != Format::q8;
    constexpr int weight_bytes = four_bits ? 16 * kPanelRows : 32 * kPanelRows;
    constexpr int group_bytes = weight_bytes + (kFormat == Format::q4 ? 4 : 2) * kPanelRows;
    constexpr int offset = kFormat == Format::q8 ? 128 : kFormat == Format::q4_0 ? 8 : 0;  // of the stored integers
    F acc[T][R];
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[t][r] = S::zero();
    const uint8_t* p = panel + first * 64;
    const int groups = (w.cols + kGroup - 1) / kGroup;
    for (int g = 0; g < groups; ++g, p += group_bytes) {
        I sum[T][R];
#pragma GCC unroll 6
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sum[t][r] = S::set_int(offset ? -offset * x.sum[t * groups + g] : 0);
        const uint8_t* xs = x.data + g * kGroup;
        const auto step = [&](int j) __attribute__((always_inline)) {  // four bytes of each row
            S::Bytes bytes[R];
            if constexpr (T <= 2) {
                for (int line = 0; line < R * 64; line += 64) __builtin_prefetch(p + kAhead + j * 256 + line);
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) bytes[r] = S::load_bytes(p + j * 256 + r * 64);
            if constexpr (four_bits) {
                S::Bytes low[R];
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) low[r] = S::low_nibbles(bytes[r]);
#pragma GCC unroll 6
                for (int t = 0; t < T; ++t) {
                    const I broadcast = S::set_int(word(xs + t * x.stride + 4 * j));
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) sum[t][r] = S::dot4(sum[t][r], low[r], broadcast);
                }
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) bytes[r] = S::high_nibbles(bytes[r]);
            }
#pragma GCC unroll 6
            for (int t = 0; t < T; ++t) {
                const I broadcast = S::set_int(word(xs + t * x.stride + (four_bits ? 16 : 0) + 4 * j));
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) sum[t][r] = S::dot4(sum[t][r], bytes[r], broadcast);
            }
        };
        constexpr int steps = four_bits ? 4 : 8;
        if constexpr (T <= 2) {
            // Not unrolled: processors foresee what a load will read by the stride of that one instruction, and many of
            // them with long strides are not foreseen. What few tokens read comes from memory.
#pragma GCC unroll 1
            for (int j = 0; j < steps; ++j) step(j);
        } else {
#pragma GCC unroll 8
            for (int j = 0; j < steps; ++j) step(j);
        }
        const uint8_t* scales = p - first * 64 + weight_bytes + first * 32;
        if constexpr (T <= 2) __builtin_prefetch(scales + kAhead), __builtin_prefetch(scales + kAhead + 64);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const F scale = S::load_f16(scales + r * 32);
#pragma GCC unroll 6
            for (int t = 0; t < T; ++t)
                acc[t][r] = S::fma(S::to_float(sum[t][r]), S::mul(scale, S::set(x.scale[t * groups + g])), acc[t][r]);
            if constexpr (kFormat == Format::q4) {
                const F minimum = S::load_f16(scales + 2 * kPanelRows + r * 32);
#pragma GCC unroll 6
                for (int t = 0; t < T; ++t) {
                    const F x_sum = S::set(x.scale[t * groups + g] * (float)x.sum[t * groups + g]);
                    acc[t][r] = S::fma(minimum, x_sum, acc[t][r]);
                }
            }
        }
    }
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) S::store(out + t * kPanelRows + r * 16, acc[t][r]);
}
