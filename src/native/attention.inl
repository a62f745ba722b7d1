// Attention over paged keys and values (arXiv 2205.14135, 2309.06180): a few query rows against spans of 256 keys.
// Part of kernels.inl.
//
// Spans lie at absolute positions and are merged in order, and a key that a row may not see adds an exact zero: so a
// row's result does not depend on which other rows share the pass, nor on where a chunk began.

constexpr int kRows = tile_tokens(1);  // query rows at once

template <class Op>
constexpr bool kPairs = Op::step == 2;

// `count` numbers as a KV type has them, into `out`.
void store_as(const KVLayout& layout, const float* x, int count, float inverse, uint8_t* out) {
    for (int i = 0; i < count; i += 16) {
        const F v = load_part(x + i, count - i);
        alignas(64) uint8_t part[64] = {};
        switch (layout.type) {
            case KVType::f32: S::store((float*)part, v); break;
            case KVType::f16: S::store_f16((uint16_t*)part, v); break;
            case KVType::bf16: S::store_bf16((uint16_t*)part, v); break;
            case KVType::int8: S::store_int8((int8_t*)part, S::round(S::mul(v, S::set(inverse)))); break;
        }
        std::memcpy(out + i * layout.element, part, (count - i < 16 ? count - i : 16) * layout.element);
    }
}

// Element i of `from` goes to element i * stride of `to`; where pairs lie together, pair by pair.
template <class T>
void scatter(const uint8_t* from, int count, uint8_t* to, int stride) {
    for (int i = 0; i < count; ++i) ((T*)to)[(size_t)i * stride] = ((const T*)from)[i];
}

float inverse_scale(const float* x, int size, float* scale) {
    float amax = 0;
    for (int i = 0; i < size; ++i) amax = std::fabs(x[i]) > amax ? std::fabs(x[i]) : amax;
    *scale = amax / 127;
    const float inverse = amax > 0 ? 127 / amax : 0;
    return std::isfinite(inverse) ? inverse : 0;
}

// Whether all numbers are finite once stored as `type`.
bool fits(KVType type, const float* x, int count) {
    const float most = type == KVType::f16 ? 65519.0f : type == KVType::bf16 ? 3.38e38f : 3.4e38f;
    bool all = true;
    for (int i = 0; i < count; ++i) all &= std::fabs(x[i]) <= most;
    return all;
}

void store_kv(const KVLayout& layout, uint8_t* block, int slot, const float* key, const float* value) {
    const int d = layout.head_dim;
    const KVType type = layout.type;
    const size_t size = layout.element;
    uint8_t *keys = block, *values = block + layout.keys_bytes;
    if (slot == 0) std::memset(values, 0, layout.values_bytes);
    // A value that is not finite would reach rows that may not see it, as 0 * infinity: its key carries the NaN instead.
    const bool sound = fits(type, value, d);
    constexpr float zeros[kPanelRows] = {};
    float inverse = 0, value_inverse = 0;
    if (type == KVType::int8) {
        inverse = inverse_scale(key, d, (float*)(keys + (size_t)d * kPanelRows) + slot);
        float* value_scale = (float*)(values + (size_t)layout.padded_dim * kKVBlock) + slot;
        if (sound)
            value_inverse = inverse_scale(value, d, value_scale);
        else
            *value_scale = 0;
    }
    alignas(64) uint8_t part[kPanelRows * sizeof(float)];
    for (int i = 0; i < d; i += kPanelRows) {
        const int count = d - i < kPanelRows ? d - i : kPanelRows;
        std::memset(part, 0, sizeof part);
        store_as(layout, key + i, count, inverse, part);
        uint8_t* column = keys + i * kPanelRows * size;
        switch (type) {
            case KVType::f32: scatter<uint32_t>(part, count, column + slot * size, kPanelRows); break;
            case KVType::f16: scatter<uint16_t>(part, count, column + slot * size, kPanelRows); break;
            case KVType::bf16: scatter<uint32_t>(part, (count + 1) / 2, column + slot * 2 * size, kPanelRows); break;
            case KVType::int8: scatter<uint8_t>(part, count, column + slot * size, kPanelRows); break;
        }
        uint8_t* group = values + (size_t)i * kKVBlock * size;
        store_as(layout, sound ? value + i : zeros, count, value_inverse, part);
        if (type == KVType::bf16)
            scatter<uint16_t>(part, count, group + (slot / 2 * 2 * kPanelRows + slot % 2) * size, 2);
        else
            std::memcpy(group + slot * kPanelRows * size, part, count * size);
    }
    if (sound) return;
    const float nan = NAN;
    if (type == KVType::int8)
        ((float*)(keys + (size_t)d * kPanelRows))[slot] = nan;
    else {
        store_as(layout, &nan, 1, 0, part);
        std::memcpy(keys + slot * (type == KVType::bf16 ? 2 : 1) * size, part, size);
    }
}

// Query rows or probabilities in the form that Op multiplies with; `count` is even for pairs.
template <class Op>
void to_form(const float* x, int count, float* out) {
    if constexpr (kPairs<Op>) {
        for (int i = 0; i < count; i += 16) S::store_bf16((uint16_t*)out + i, load_part(x + i, count - i));
    } else if (x != out) {
        std::memcpy(out, x, count * sizeof(float));
    }
}

template <class Op, int T>
void attend(const KVLayout& layout, const AttentionTask& task) {
    constexpr int R = tile_vectors(T, 1);
    const int d = layout.head_dim, dp = layout.padded_dim;
    const int q_steps = (d + Op::step - 1) / Op::step;
    const size_t group_bytes = (size_t)kKVBlock / Op::step * kVectors * Op::vector;  // of values: 64 of D
    float* scores = task.scratch;               // [T][kSpan]
    float* form = scores + kRows * kSpan;       // [T][kSpan]: the probabilities as Op wants them
    float* q = form + kRows * kSpan;            // [T][dp]
    float* span = q + kRows * dp;               // [T][dp]: what this span gives
    float* total = span + kRows * dp;           // [T][dp]: what all spans so far give
    float largest[T] = {}, mass[T] = {};

    for (int t = 0; t < T; ++t) {
        float scaled[kPanelRows];
        for (int i = 0; i < d; i += kPanelRows) {
            const int count = d - i < kPanelRows ? d - i : kPanelRows;
            for (int j = 0; j < count; ++j) scaled[j] = task.q[t][i + j] * task.scale;
            if (kPairs<Op> && count % 2) scaled[count] = 0;
            to_form<Op>(scaled, (count + Op::step - 1) / Op::step * Op::step, q + t * dp + i / Op::step);
        }
    }

    const int end = task.limit[T - 1];
    for (int begin = 0; begin < end; begin += kSpan) {
        const int keys = end - begin < kSpan ? end - begin : kSpan;
        const int blocks = (keys + kKVBlock - 1) / kKVBlock;
        const int32_t* table = task.blocks + begin / kKVBlock;
        for (int b = 0; b < blocks; ++b) {
            const uint8_t* panel = task.kv + table[b] * task.block_stride;
            const float* scale = (const float*)(panel + (size_t)d * kPanelRows);  // int8 only
            for (int v = 0; v < kVectors; v += R) {
                F acc[T][R];
#pragma GCC unroll 6
                for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) acc[t][r] = S::zero();
                accumulate<Op, R, T>(panel + v * Op::vector, (const uint8_t*)q, dp * sizeof(float), q_steps, acc);
#pragma GCC unroll 6
                for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) {
                        if constexpr (Op::vector == 16) acc[t][r] = S::mul(acc[t][r], S::load(scale + (v + r) * 16));
                        S::store(scores + t * kSpan + b * kKVBlock + (v + r) * 16, acc[t][r]);
                    }
            }
        }

        float span_largest[T], span_mass[T];
        for (int t = 0; t < T; ++t) {
            float* row = scores + t * kSpan;
            const int seen = task.limit[t] - begin < keys ? task.limit[t] - begin : keys;
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
            if constexpr (Op::vector == 16) {
                for (int b = 0; b < blocks; ++b) {
                    const uint8_t* values = task.kv + table[b] * task.block_stride + layout.keys_bytes;
                    const float* scale = (const float*)(values + (size_t)dp * kKVBlock);
                    for (int i = 0; i < kKVBlock; i += 16)
                        S::store(row + b * kKVBlock + i, S::mul(S::load(row + b * kKVBlock + i), S::load(scale + i)));
                }
            }
            to_form<Op>(row, blocks * kKVBlock, kPairs<Op> ? form + t * kSpan : row);
        }

        const float* weights = kPairs<Op> ? form : scores;
        for (int group = 0; group * kPanelRows < d; ++group)
            for (int v = 0; v < kVectors; v += R) {
                F acc[T][R];
#pragma GCC unroll 6
                for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) acc[t][r] = S::zero();
                for (int b = 0; b < blocks; ++b) {
                    const uint8_t* panel = task.kv + table[b] * task.block_stride + layout.keys_bytes + group * group_bytes;
                    const int seen = keys - b * kKVBlock < kKVBlock ? keys - b * kKVBlock : kKVBlock;
                    accumulate<Op, R, T>(panel + v * Op::vector, (const uint8_t*)(weights + b * kKVBlock / Op::step),
                                         kSpan * sizeof(float), (seen + Op::step - 1) / Op::step, acc);
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
    for (int t = 0; t < T; ++t)
        for (int i = 0; i < d; i += 16)
            store_part(task.out[t] + i, S::div(S::load(total + t * dp + i), S::set(mass[t])), d - i);
}

template <class Op>
void attend_as(const KVLayout& layout, const AttentionTask& task) {
    switch (task.rows) {
        case 1: return attend<Op, 1>(layout, task);
        case 2: return attend<Op, 2>(layout, task);
        case 3: return attend<Op, 3>(layout, task);
        case 4: if constexpr (kRows >= 4) return attend<Op, 4>(layout, task); break;
        case 5: if constexpr (kRows >= 5) return attend<Op, 5>(layout, task); break;
        default: if constexpr (kRows >= 6) return attend<Op, 6>(layout, task);
    }
}

void attention(const KVLayout& layout, const AttentionTask& task) {
    switch (layout.type) {
        case KVType::f32: return attend_as<OpF32>(layout, task);
        case KVType::f16: return attend_as<OpF16>(layout, task);
        case KVType::bf16: return attend_as<OpBF16>(layout, task);
        case KVType::int8: return attend_as<OpSigned8>(layout, task);
    }
}
