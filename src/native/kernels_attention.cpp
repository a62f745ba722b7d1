// Attention over paged keys and values (arXiv 2205.14135, 2309.06180): a few query rows against spans of 256 keys.
//
// Spans lie at absolute positions and are merged in order, and a key that a row may not see adds an exact zero: so a
// row's result does not depend on which other rows share the pass, nor on where a chunk began. See kernels.inl.
#include "kernels.inl"
#include "amx.h"
#include "turn.h"

namespace pronk::PRONK_TARGET {

namespace {

// What a type of keys and values is multiplied with, and how 16 of its numbers are stored.
template <KVType>
struct KVOp;

template <>
struct KVOp<KVType::f32> : OpF32 {
    PRONK_INLINE void store(uint8_t* p, F x) { S::store((float*)p, x); }
};

template <>
struct KVOp<KVType::f16> : OpF16 {
    PRONK_INLINE void store(uint8_t* p, F x) { S::store_f16((uint16_t*)p, x); }
};

template <>
struct KVOp<KVType::bf16> : OpBF16 {
    PRONK_INLINE void store(uint8_t* p, F x) { S::store_bf16((uint16_t*)p, x); }
};

template <>
struct KVOp<KVType::q4> : OpF32 {};  // queries stay floats; the rest is in kv_codes.inl

template <>
struct KVOp<KVType::int8> : OpF32 {
    [[maybe_unused]] static constexpr int vector = 16;
    PRONK_INLINE W weights(const uint8_t* p) { return S::load_int8(p); }
    PRONK_INLINE void store(uint8_t* p, F x) { S::store_int8((int8_t*)p, S::round(x)); }
};

#include "kv_store.inl"
#include "kv_codes.inl"

// -- attending --------------------------------------------------------------------------------------------------------

// Whether an Op multiplies two numbers a step, in bfloat16; and whether T rows meet them as floats: of each 64 numbers the first
// of all pairs lie together then, and the second ones.
template <class Op>
constexpr bool kPairs = Op::step == 2;
template <class Op, int T>
constexpr bool kWidened = kPairs<Op> && S::widens_pairs && T > 1;
template <class Op, int T>
constexpr int kPacked = kWidened<Op, T> ? 1 : Op::step;  // numbers in four bytes of an operand

template <class Op>
constexpr bool kAmx = S::tiles && kPairs<Op>;

// Query rows or probabilities as an Op multiplies them; `count` is even for pairs.
template <class Op, int T, class V = S>
void to_operand(const float* x, int count, float* out) {
    if constexpr (kWidened<Op, T>) {
        alignas(64) uint16_t pairs[32];
        for (int i = 0; i < count; i += 32) {
            for (int half = 0; half < 32; half += 16) V::store_bf16(pairs + half, i + half < count ? load_part(x + i + half, count - i - half) : V::zero());
            float* to = out + i / kPanelRows * kPanelRows + i % kPanelRows / 2;
            V::widen_pairs(pairs, to, to + kPanelRows / 2);
        }
    } else if constexpr (kPairs<Op>) {
        for (int i = 0; i < count; i += 16) S::store_bf16((uint16_t*)out + i, load_part(x + i, count - i));
    } else if (x != out) {
        std::memcpy(out, x, count * sizeof(float));
    }
}

// One number of each pair of weights, as a float.
template <class V, bool kSecond>
struct OpOfPairs : OpF32 {
    static constexpr bool streamed = !kSecond;
    PRONK_INLINE F weights(const uint8_t* p) {
        if constexpr (kSecond) return V::second_floats(V::load_pairs(p));
        else return V::first_floats(V::load_pairs(p));
    }
};

// acc += `steps` steps of a panel, at most 64 numbers, from the first of R vectors on, times operands.
template <class Op, int R, int T>
PRONK_INLINE void accumulate_operands(const uint8_t* w, const float* x, size_t stride, int steps, F (&acc)[T][R]) {
    if constexpr (kWidened<Op, T>) {
        for (int step = 0; step < steps; ++step, w += kVectors * Op::vector, ++x) {
            accumulate<OpOfPairs<S, false>, R, T>(w, (const uint8_t*)x, stride * sizeof(float), 1, acc);
            accumulate<OpOfPairs<S, true>, R, T>(w, (const uint8_t*)(x + kPanelRows / 2), stride * sizeof(float), 1, acc);
        }
    } else {
        accumulate<Op, R, T>(w, (const uint8_t*)x, stride * sizeof(float), steps, acc);
    }
}

// Where a processor has tiles, an Op of pairs. Scores of 64 keys, kSpan floats between rows; q [dp / 64][rows][64].
template <class Op>
void score_pairs(const uint8_t* keys, const float* q, int rows, int d, float* scores) {
    constexpr size_t stride = kPanelRows * sizeof(float);
    Amx::zero_all();
    for (int i = 0; i < d; i += kAmxRows * 2) {
        const uint8_t* x = (const uint8_t*)(q + i / kPanelRows * kPanelRows * rows) + i % kPanelRows * 2;
        const uint8_t* w = keys + (size_t)i / 2 * kLineBytes;
        if (i + kAmxRows * 2 <= d) {
            Amx::add_whole<true>(w, x, stride);
            continue;
        }
        const int lines = (d - i + 1) / 2;
        alignas(64) uint8_t last_keys[kAmxLines * kLineBytes] = {}, last_x[kAmxRows][kAmxBytes] = {};
        std::memcpy(last_keys, w, lines * kLineBytes);
        for (int t = 0; t < rows; ++t) std::memcpy(last_x[t], x + t * stride, lines * 4);
        Amx::add_whole<true>(last_keys, last_x[0], kAmxBytes);
    }
    Amx::store_whole(scores, kSpan * sizeof(float));
}

// Sums of 64 dimensions of values, `stride` floats between rows. Values that no key has yet are finite, and their weights zeros.
template <class Op>
void weigh_pairs(const AttentionTask& task, const int32_t* table, size_t offset, int keys, const float* weights, float* sums, int stride) {
    Amx::zero_all();
    for (int key = 0; key < keys; key += kAmxRows * 2) {
        const uint8_t* panel = task.kv + table[key / kKVBlock] * task.block_stride + offset;
        Amx::add_whole<true>(panel + key % kKVBlock / 2 * kLineBytes, (const uint8_t*)(weights + key / 2), kSpan * sizeof(float));
    }
    Amx::store_whole(sums, stride * sizeof(float));
}

template <KVType kType, int T>
void attend(const KVLayout& layout, const AttentionTask& task) {
    using Op = KVOp<kType>;
    constexpr const KVTraits& type = traits(kType);
    constexpr int R = tile_vectors(T, 1);
    const int d = layout.head_dim, dp = layout.padded_dim;
    const size_t group_bytes = (size_t)kKVBlock / Op::step * kVectors * Op::vector;  // of values: 64 of D
    float* scores = task.scratch;                      // [T][kSpan]
    float* operand = scores + kAttentionRows * kSpan;  // [T][kSpan]: the probabilities as Op wants them
    float* q = operand + kAttentionRows * kSpan;       // [dp / 64][T][64], of groups [T][dp]: offsets that are known take no registers
    float* span = q + kAttentionRows * dp;             // [T][dp]: what this span gives
    float* total = span + kAttentionRows * dp;         // [T][dp]: what all spans so far give
    [[maybe_unused]] float* sums = total + kAttentionRows * dp;         // [T][dp / kSumsOf], of the groups of a query
    float largest[T] = {}, mass[T] = {};

    for (int t = 0; t < T; ++t) {
        if constexpr (type.turned) {
            float* row = type.group ? q + t * dp : span;  // of which nothing is wanted yet
            for (int i = 0; i < d; ++i) row[i] = task.q[t][i] * task.scale;
            turn_blocks(row, d, turned_together(d), row);
            if constexpr (type.group) sum_groups(row, d, sums + t * (dp / kSumsOf));
            else for (int i = 0; i < dp; i += kPanelRows) std::memcpy(q + i * T + t * kPanelRows, row + i, kPanelRows * sizeof(float));
            continue;
        }
        float scaled[kPanelRows];
        for (int i = 0; i < d; i += kPanelRows) {
            const int count = d - i < kPanelRows ? d - i : kPanelRows;
            for (int j = 0; j < count; ++j) scaled[j] = task.q[t][i + j] * task.scale;
            if (kPairs<Op> && count % 2) scaled[count] = 0;
            to_operand<Op, T>(scaled, (count + Op::step - 1) / Op::step * Op::step, q + i * T + t * kPanelRows);
        }
    }

    if constexpr (kAmx<Op>) Amx::shape(T, 0);
    const int end = task.limit[T - 1];
    for (int begin = 0; begin < end; begin += kSpan) {
        const int keys = end - begin < kSpan ? end - begin : kSpan;
        const int blocks = (keys + kKVBlock - 1) / kKVBlock;
        const int32_t* table = task.blocks + begin / kKVBlock;
        for (int b = 0; b < blocks; ++b) {
            const uint8_t* panel = task.kv + table[b] * task.block_stride;
            if constexpr (type.group) {
                ask_for(panel + layout.keys_bytes, layout.values_bytes);
                if (begin + (b + 1) * kKVBlock < end) ask_for(task.kv + table[b + 1] * task.block_stride, layout.keys_bytes);
                in_coded_tiles<T>([&](auto tokens, int t) {
                    score_codes<decltype(tokens)::value>(layout, panel, q + t * dp, dp, sums + t * (dp / kSumsOf), dp / kSumsOf,
                                                         scores + t * kSpan + b * kKVBlock);
                });
                continue;
            }
            if constexpr (kAmx<Op>) {
                score_pairs<Op>(panel, q, T, d, scores + b * kKVBlock);
                continue;
            }
            const float* scale = (const float*)(panel + (size_t)d * kKVBlock * type.bytes);
            for (int v = 0; v < kVectors; v += R) {
                F acc[T][R];
#pragma GCC unroll 6
                for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) acc[t][r] = S::zero();
                for (int i = 0; i < d; i += kPanelRows) {
                    const int count = d - i < kPanelRows ? d - i : kPanelRows;
                    accumulate_operands<Op, R, T>(panel + (i / Op::step * kVectors + v) * Op::vector, q + i * T, kPanelRows,
                                                  (count + Op::step - 1) / Op::step, acc);
                }
#pragma GCC unroll 6
                for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) {
                        if constexpr (type.scales) acc[t][r] = S::mul(acc[t][r], S::load(scale + (v + r) * 16));
                        S::store(scores + t * kSpan + b * kKVBlock + (v + r) * 16, acc[t][r]);
                    }
            }
        }

        float span_largest[T], span_mass[T];
        for (int t = 0; t < T; ++t) {
            float* row = scores + t * kSpan;
            const int seen = task.limit[t] - begin < keys ? task.limit[t] - begin : keys;
            if (task.scores && task.scores[t] && seen > 0) std::memcpy(task.scores[t] + begin, row, seen * sizeof(float));
            for (int i = seen > 0 ? seen : 0; i < blocks * kKVBlock; ++i) row[i] = -INFINITY;
            F most = S::set(-INFINITY);
            for (int i = 0; i < blocks * kKVBlock; i += 16) most = S::max(most, S::load(row + i));
            span_largest[t] = S::maximum(most);
            const F shift = S::set(seen > 0 ? span_largest[t] : 0);
            F sum = S::zero();
            for (int i = 0; i < blocks * kKVBlock; i += 16) {
                const F p = exp(S::sub(S::load(row + i), shift));
                sum = S::add(sum, p);
                S::store(row + i, p);
            }
            span_mass[t] = S::sum(sum);
            if constexpr (type.scales) {
                for (int b = 0; b < blocks; ++b) {
                    const uint8_t* values = task.kv + table[b] * task.block_stride + layout.keys_bytes;
                    const float* scale = (const float*)(values + layout.values_bytes) - kKVBlock;
                    for (int i = 0; i < kKVBlock; i += 16)
                        S::store(row + b * kKVBlock + i, S::mul(S::load(row + b * kKVBlock + i), S::load(scale + i)));
                }
            }
            to_operand<Op, T>(row, blocks * kKVBlock, kPairs<Op> ? operand + t * kSpan : row);
        }

        const float* weights = kPairs<Op> ? operand : scores;
        for (int group = 0; type.group && group < groups_of(d); ++group)
            in_coded_tiles<T>([&](auto tokens, int t) {
                weigh_codes<decltype(tokens)::value>(layout, task, table, keys, group, scores + t * kSpan, operand,
                                                     span + t * dp + group * kGroupOf, dp);
            });
        if constexpr (kAmx<Op>)
            for (int group = 0; group * kPanelRows < d; ++group)
                weigh_pairs<Op>(task, table, layout.keys_bytes + group * group_bytes, keys, operand, span + group * kPanelRows, dp);
        for (int group = 0; !type.group && !kAmx<Op> && group * kPanelRows < d; ++group)
            for (int v = 0; v < kVectors; v += R) {
                F acc[T][R];
#pragma GCC unroll 6
                for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) acc[t][r] = S::zero();
                for (int b = 0; b < blocks; ++b) {
                    const uint8_t* panel = task.kv + table[b] * task.block_stride + layout.keys_bytes + group * group_bytes;
                    const int seen = keys - b * kKVBlock < kKVBlock ? keys - b * kKVBlock : kKVBlock;
                    accumulate_operands<Op, R, T>(panel + v * Op::vector, weights + b * kKVBlock / kPacked<Op, T>, kSpan,
                                                  (seen + Op::step - 1) / Op::step, acc);
                }
#pragma GCC unroll 6
                for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) S::store(span + t * dp + group * kPanelRows + (v + r) * 16, acc[t][r]);
            }

        for (int t = 0; t < T; ++t) {
            if (task.limit[t] <= begin) continue;
            float* sum = total + t * dp;
            if (begin == 0) {
                largest[t] = span_largest[t], mass[t] = span_mass[t];
                std::memcpy(sum, span + t * dp, dp * sizeof(float));
                continue;
            }
            const float most = largest[t] > span_largest[t] ? largest[t] : span_largest[t];
            float shifts[16] = {largest[t] - most, span_largest[t] - most}, factors[16];
            S::store(factors, exp(S::load(shifts)));
            mass[t] = mass[t] * factors[0] + span_mass[t] * factors[1];
            largest[t] = most;
            for (int i = 0; i < dp; i += 16)
                S::store(sum + i, S::fma(S::load(span + t * dp + i), S::set(factors[1]),
                                         S::mul(S::load(sum + i), S::set(factors[0]))));
        }
    }
    if constexpr (kAmx<Op>) Amx::release();
    for (int t = 0; t < T; ++t) {
        for (int i = 0; i < d; i += 16)
            store_part(task.out[t] + i, S::div(S::load(total + t * dp + i), S::set(mass[t])), d - i);
        if constexpr (type.turned) turn_blocks(task.out[t], d, turned_together(d), task.out[t]);
    }
}

template <KVType kType>
void attention_as(const KVLayout& layout, const AttentionTask& task) {
    switch (task.rows) {
        case 1: return attend<kType, 1>(layout, task);
        case 2: return attend<kType, 2>(layout, task);
        case 3: return attend<kType, 3>(layout, task);
        case 4: if constexpr (kAttentionRows >= 4) return attend<kType, 4>(layout, task); break;
        case 5: if constexpr (kAttentionRows >= 5) return attend<kType, 5>(layout, task); break;
        default: if constexpr (kAttentionRows >= 6) return attend<kType, 6>(layout, task);
    }
}

// Where a processor has tiles, all else but pairs is read as without.
template <KVType kType>
constexpr decltype(Kernels::attention) attention_of() {
    if constexpr (S::tiles && !kAmx<KVOp<kType>>) return PRONK_LIKE::attention;
    else return attention_as<kType>;
}

template <class Indices>
struct OfEveryType;
template <int... kIndex>
struct OfEveryType<std::integer_sequence<int, kIndex...>> {
    static constexpr decltype(Kernels::store_kv) store_kv[] = {store_kv_as<static_cast<KVType>(kIndex)>...};
    static constexpr decltype(Kernels::attention) attention[] = {attention_of<static_cast<KVType>(kIndex)>()...};
};
using All = OfEveryType<std::make_integer_sequence<int, count_of(kKVTypes)>>;

}  // namespace

void store_kv(const KVLayout& layout, uint8_t* block, int slot, const float* key, const float* value) {
    All::store_kv[static_cast<int>(layout.type)](layout, block, slot, key, value);
}

void attention(const KVLayout& layout, const AttentionTask& task) {
    All::attention[static_cast<int>(layout.type)](layout, task);
}

}  // namespace pronk::PRONK_TARGET
