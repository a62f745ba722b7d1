// Part of kernels_attention.cpp: keys and values of 4 bits, turned (turn.h), in groups of 16 numbers: code * step + least.
//
// A step is a whole number of 7 bits and a least number one of 8, times a float of the key or value (and 8): with 4 bits a
// number that is 5 + 32 / D in all. (That turned numbers need fewer bits: QuaRot, arXiv 2404.00456.)

constexpr int kCode = 15, kStep = 127;  // the largest
constexpr float kLeastUnit = 8;         // 127 of it are enough: a group reaches 7 to 8 steps below 0, unless it is far from 0

// Where what groups share lies, behind `halves` rows of codes.
struct Shared {
    uint8_t *steps, *leasts;  // [groups][64]
    float* unit;              // [64]

    Shared(const uint8_t* codes, int halves, int groups)
        : steps(const_cast<uint8_t*>(codes) + halves * kKVBlock), leasts(steps + groups * kKVBlock),
          unit((float*)(leasts + groups * kKVBlock)) {}
};

constexpr int kGroupOf = traits(KVType::q4).group;
static_assert(kGroupOf == 16 && kGroupOf == kSumsOf, "a group is a vector");

inline int groups_of(int numbers) { return (numbers + kGroupOf - 1) / kGroupOf; }
inline Shared of_keys(const KVLayout& layout, const uint8_t* keys) {
    return Shared(keys, (layout.head_dim + 1) / 2, groups_of(layout.head_dim));
}
inline Shared of_values(const KVLayout& layout, const uint8_t* values) {
    return Shared(values, layout.padded_dim / 2, layout.padded_dim / kGroupOf);
}

// -- storing ----------------------------------------------------------------------------------------------------------

struct Coded {
    uint8_t codes[kGroupOf], step, least;
};

// x in units. Of grids that reach this many steps beyond the least number and short of it, 4 x 4 at once, the one with
// the least squared error, its step and least number fitted to the codes. No product is fused: codes are the same everywhere.
PRONK_ONCE Coded fitted(const float* x, int count) {
    static constexpr float below[16] = {-.5f, -.5f, -.5f, -.5f, -.1f, -.1f, -.1f, -.1f, .3f, .3f, .3f, .3f, .7f, .7f, .7f, .7f};
    static constexpr float above[16] = {-.5f, -.1f, .3f, .7f, -.5f, -.1f, .3f, .7f, -.5f, -.1f, .3f, .7f, -.5f, -.1f, .3f, .7f};
    float low = x[0], high = x[0];
    for (int i = 1; i < count; ++i) low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
    const F zero = S::zero(), twice = S::set(2), most = S::set(kCode), wholes = S::set(kStep), n = S::set((float)count);
    const F levels = S::add(most, S::add(S::load(below), S::load(above)));
    const F span = S::set(high - low), by = high - low > 1e-6f ? S::div(levels, span) : zero;
    const F begin = S::add(S::set(low), S::mul(S::load(below), S::div(span, levels)));
    F q_sum = zero, qq = zero, qx = zero, x_sum = zero;
    for (int i = 0; i < count; ++i) {
        const F v = S::set(x[i]), q = S::whole(S::min(S::max(S::mul(S::sub(v, begin), by), zero), most));
        q_sum = S::add(q_sum, q), qq = S::add(qq, S::mul(q, q));
        qx = S::add(qx, S::mul(q, v)), x_sum = S::add(x_sum, v);
    }
    const F spread = S::sub(S::mul(n, qq), S::mul(q_sum, q_sum));  // a whole number
    const F slope = S::div(S::sub(S::mul(n, qx), S::mul(q_sum, x_sum)), S::max(spread, S::set(1)));
    const F step = S::whole(S::min(S::max(slope, zero), wholes));
    const F foot = S::mul(S::div(S::sub(x_sum, S::mul(step, q_sum)), n), S::set(1 / kLeastUnit));
    const F number = S::whole(S::min(S::max(foot, S::sub(zero, wholes)), wholes)), least = S::mul(number, S::set(kLeastUnit));
    // Squares of x left out, which no grid changes.
    const F of_step = S::mul(step, S::sub(S::mul(step, qq), S::mul(twice, qx)));
    const F of_least = S::sub(S::add(S::mul(least, n), S::mul(S::mul(twice, step), q_sum)), S::mul(twice, x_sum));
    float errors[16], steps[16], numbers[16];
    S::store(errors, S::add(of_step, S::mul(least, of_least))), S::store(steps, step), S::store(numbers, number);
    int best = 0;
    for (int i = 1; i < 16; ++i)
        if (errors[i] < errors[best]) best = i;

    const F away = S::sub(load_part(x, count), S::set(numbers[best] * kLeastUnit));
    const F scaled = S::mul(away, S::set(steps[best] > 0 ? 1 / steps[best] : 0));
    Coded coded;
    S::store_int8((int8_t*)coded.codes, S::round(S::min(S::max(scaled, zero), most)));
    for (int i = count; i < kGroupOf; ++i) coded.codes[i] = 0;
    coded.step = (uint8_t)steps[best], coded.least = (uint8_t)(int8_t)numbers[best];
    return coded;
}

// One vector [d], turned, a group after the other; gives its unit: NaN where what is turned is not finite.
template <class Put>
float code_turned(const float* x, int d, const Put& put) {
    Turned turned;
    float widest = 0, furthest = 0;
    bool finite = true;
    const auto each = [&](const auto& body) {
        for (int i = 0; i < d; i += kGroupOf) {
            const float* group = turned.part(x, i, d);
            body(i, group, d - i < kGroupOf ? d - i : kGroupOf);
        }
    };
    each([&](int, const float* group, int count) {
        float low = group[0], high = group[0];
        for (int i = 0; i < count; ++i) {
            finite &= std::isfinite(group[i]);
            low = group[i] < low ? group[i] : low, high = group[i] > high ? group[i] : high;
        }
        widest = high - low > widest ? high - low : widest;
        furthest = -low > furthest ? -low : furthest, furthest = high > furthest ? high : furthest;
    });
    // The widest of the grids that are tried must have a step, and what is furthest from 0 a number.
    const float a = widest * (1.1f / (kCode * kStep)), b = furthest * (1.1f / (kLeastUnit * kStep));
    const float unit = a > b ? a : b, inverse = 1 / unit;
    if (!finite || !std::isfinite(inverse)) {
        each([&](int at, const float*, int) { put(at, Coded{}); });
        return finite ? 0 : NAN;
    }
    each([&](int at, const float* group, int count) {
        float scaled[kGroupOf];
        for (int i = 0; i < count; ++i) scaled[i] = group[i] * inverse;
        put(at, fitted(scaled, count));
    });
    return unit;
}

template <>
void store_kv_as<KVType::q4>(const KVLayout& layout, uint8_t* block, int slot, const float* key, const float* value) {
    uint8_t* values = block + layout.keys_bytes;
    if (slot == 0) std::memset(values, 0, layout.values_bytes);
    const bool sound = fits(traits(KVType::q4).most, value, layout.head_dim);
    const Shared keys = of_keys(layout, block), rest = of_values(layout, values);
    const int d = layout.head_dim;
    const float unit = code_turned(key, d, [&](int at, const Coded& coded) {
        uint8_t* to = block + at / 2 * kKVBlock + slot;
        for (int i = 0; i < kGroupOf && at + i < d; i += 2) to[i / 2 * kKVBlock] = (uint8_t)(coded.codes[i] | coded.codes[i + 1] << 4);
        keys.steps[at / kGroupOf * kKVBlock + slot] = coded.step, keys.leasts[at / kGroupOf * kKVBlock + slot] = coded.least;
    });
    keys.unit[slot] = sound ? unit : NAN;
    rest.unit[slot] = 0;
    if (!sound) return;
    const int shift = slot % 2 * 4;
    rest.unit[slot] = code_turned(value, d, [&](int at, const Coded& coded) {
        uint8_t* to = values + ((size_t)(at / kPanelRows) * (kKVBlock / 2) + slot / 2) * kPanelRows + at % kPanelRows;
        for (int i = 0; i < kGroupOf; ++i) to[i] = (uint8_t)((to[i] & 240 >> shift) | coded.codes[i] << shift);
        rest.steps[at / kGroupOf * kKVBlock + slot] = coded.step, rest.leasts[at / kGroupOf * kKVBlock + slot] = coded.least;
    });
}

// -- attending --------------------------------------------------------------------------------------------------------

constexpr int kCodedTokens = tile_tokens(2);  // query rows at once: two sums each

// body(number of rows, the first) of T rows.
template <int T, class Body>
PRONK_INLINE void in_coded_tiles(const Body& body) {
    if constexpr (T <= kCodedTokens) body(std::integral_constant<int, T>(), 0);
    else in_tiles<kCodedTokens>(T, body);
}

inline void ask_for(const uint8_t* p, size_t bytes) {
    for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(p + line);
}

// Sums of a query's groups, times what a least number is a multiple of: q [D] -> sums [D/16]
[[maybe_unused]] void sum_groups(const float* q, int d, float* sums) {
    for (int i = 0; i < d; i += kGroupOf) sums[i / kGroupOf] = kLeastUnit * S::sum(load_part(q + i, d - i));
}

// Scores of T queries, `stride` apart, with the 64 keys of a block.
template <int T>
PRONK_ONCE void score_codes(const KVLayout& layout, const uint8_t* keys, const float* q, int stride, const float* sums, int sums_stride, float* scores) {
    constexpr int R = tile_vectors(T, 2);
    const Shared shared = of_keys(layout, keys);
    const int d = layout.head_dim;
    for (int v = 0; v < kVectors; v += R) {
        F total[T][R];
        for (int t = 0; t < T; ++t)
            for (int r = 0; r < R; ++r) total[t][r] = S::zero();
        for (int at = 0; at < d; at += kGroupOf) {
            F acc[T][R];
#pragma GCC unroll 6
            for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) acc[t][r] = S::zero();
            const int end = d - at < kGroupOf ? d : at + kGroupOf;
            for (int i = at; i < end; i += 2) {
                F low[R], high[R];
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) S::nibbles(keys + i / 2 * kKVBlock + (v + r) * 16, low[r], high[r]);
#pragma GCC unroll 6
                for (int t = 0; t < T; ++t) {
                    const F first = S::set(q[t * stride + i]), second = S::set(q[t * stride + i + 1]);
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) acc[t][r] = S::fma(high[r], second, S::fma(low[r], first, acc[t][r]));
                }
            }
            const int group = at / kGroupOf;
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const F step = S::load_int8(shared.steps + group * kKVBlock + (v + r) * 16);
                const F least = S::load_int8(shared.leasts + group * kKVBlock + (v + r) * 16);
#pragma GCC unroll 6
                for (int t = 0; t < T; ++t)
                    total[t][r] = S::fma(least, S::set(sums[t * sums_stride + group]), S::fma(step, acc[t][r], total[t][r]));
            }
        }
        for (int r = 0; r < R; ++r) {
            const F unit = S::load(shared.unit + (v + r) * 16);
            for (int t = 0; t < T; ++t) S::store(scores + t * kSpan + (v + r) * 16, S::mul(total[t][r], unit));
        }
    }
}

// 16 dimensions, a group, of what T rows of weights [kSpan], each times its value's unit, give of a span's values.
template <int T>
PRONK_ONCE void weigh_codes(const KVLayout& layout, const AttentionTask& task, const int32_t* table, int keys, int group, const float* weights,
                 float* factors, float* out, int stride) {
    const int blocks = (keys + kKVBlock - 1) / kKVBlock;
    F low_sum[T], high_sum[T], least[T];
    for (int t = 0; t < T; ++t) low_sum[t] = high_sum[t] = least[t] = S::zero();
    for (int b = 0; b < blocks; ++b) {
        const uint8_t* values = task.kv + table[b] * task.block_stride + layout.keys_bytes;
        const Shared shared = of_values(layout, values);
        for (int i = 0; i < kKVBlock; i += 16) {
            const F steps = S::load_int8(shared.steps + group * kKVBlock + i), leasts = S::load_int8(shared.leasts + group * kKVBlock + i);
            for (int t = 0; t < T; ++t) {
                const F weight = S::load(weights + t * kSpan + b * kKVBlock + i);
                S::store(factors + t * kSpan + i, S::mul(weight, steps));
                least[t] = S::fma(weight, leasts, least[t]);
            }
        }
        const uint8_t* codes = values + (size_t)(group / kVectors) * (kKVBlock / 2 * kPanelRows) + group % kVectors * 16;
        const int seen = keys - b * kKVBlock < kKVBlock ? keys - b * kKVBlock : kKVBlock;
        for (int i = 0; i < seen; i += 2) {
            F low, high;
            S::nibbles(codes + i / 2 * kPanelRows, low, high);
#pragma GCC unroll 6
            for (int t = 0; t < T; ++t) {
                low_sum[t] = S::fma(low, S::set(factors[t * kSpan + i]), low_sum[t]);
                high_sum[t] = S::fma(high, S::set(factors[t * kSpan + i + 1]), high_sum[t]);
            }
        }
    }
    for (int t = 0; t < T; ++t)
        S::store(out + t * stride, S::add(S::add(low_sum[t], high_sum[t]), S::set(kLeastUnit * S::sum(least[t]))));
}
