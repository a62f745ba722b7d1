// Rows: normalized, rotated, and made what a format is multiplied with; and the table of an instruction set's kernels.
// See kernels.inl.
#include "kernels.inl"
#include "turn.h"

namespace pronk::PRONK_TARGET {

namespace {

void rmsnorm(const float* x, const float* weight, float eps, int size, float* out) {
    F squares = S::zero();
    for (int i = 0; i < size; i += 16) {
        const F v = load_part(x + i, size - i);
        squares = S::fma(v, v, squares);
    }
    const F scale = S::set(1.0f / std::sqrt(S::sum(squares) / (float)size + eps));
    for (int i = 0; i < size; i += 16)
        store_part(out + i, S::mul(S::mul(load_part(x + i, size - i), scale), load_part(weight + i, size - i)), size - i);
}

// Fills in for numbers of which not all are finite: a scale of NaN, for a wrong number must not look like a right one.
float not_a_row(int8_t* out, int padded, int32_t* sum) {
    std::memset(out, 0, padded);
    *sum = 0;
    return NAN;
}

// `size` floats to int8, `padded` of them (a multiple of 32); gives their scale, and their sum. `taken` says what of a
// vector is, and `largest` are the bits of the largest magnitude of that. `sums`, if any, are those of each 16.
template <class Taken>
float codes(const float* x, int size, int padded, int32_t largest, int8_t* out, int32_t* sum, const Taken& taken,
            int32_t* sums = nullptr) {
    const float amax = number(&largest), scale = amax / 127, inverse = amax > 0 ? 127 / amax : 0;
    I total = S::set_int(0);
    const F factor = S::set(std::isfinite(inverse) ? inverse : 0);
    for (int i = 0; i < padded; i += 16) {
        const I q = i < size ? S::round(S::mul(taken(load_part(x + i, size - i)), factor)) : S::set_int(0);
        total = S::add_int(total, q);
        S::store_int8(out + i, q);
        if (sums) sums[i / 16] = S::sums(q);
    }
    *sum = S::sum_int(total);
    return std::isfinite(inverse) ? scale : 0;
}

float quantize(const float* x, int size, int padded, int8_t* out, int32_t* sum, int32_t* sums = nullptr) {
    I largest = S::set_int(0);
    for (int i = 0; i < size; i += 16) largest = S::max_int(largest, S::magnitude(load_part(x + i, size - i)));
    const int32_t bits = S::maximum_int(largest);
    if (bits >= 0x7f800000) {
        for (int i = 0; sums && i < padded / 16; ++i) sums[i] = 0;
        return not_a_row(out, padded, sum);
    }
    return codes(x, size, padded, bits, out, sum, [](F v) { return v; }, sums);
}

#include "outliers.inl"

void convert(const float* x, int size, const Rows& rows, int t) {
    uint8_t* data = rows.data + t * rows.stride;
    switch (rows.format) {
        case ActivationFormat::f32: std::memcpy(data, x, size * sizeof(float)); break;
        case ActivationFormat::bf16:
            for (int i = 0; i < size; i += 16) S::store_bf16((uint16_t*)data + i, load_part(x + i, size - i));
            break;
        case ActivationFormat::int8:
            std::memcpy(rows.turned, x, size * sizeof(float));
            turn(rows.turned, size, turned_together(size));
            rows.scale[t] = quantize(rows.turned, size, rows.padded, (int8_t*)data, rows.sum + t);
            break;
        case ActivationFormat::int8_plain: rows.scale[t] = quantize(x, size, rows.padded, (int8_t*)data, rows.sum + t); break;
        case ActivationFormat::llm_int8: rows.scale[t] = quantize_rest(x, size, rows, t, (int8_t*)data, rows.sum + t); break;
        case ActivationFormat::q8:
            for (int g = 0; g < rows.groups; ++g) {
                const int at = g * kGroup, count = size - at < kGroup ? size - at : kGroup;
                const size_t index = (size_t)t * rows.groups + g;
                int32_t* halves = rows.half_sums + 2 * index;
                rows.scale[index] = quantize(x + at, count, kGroup, (int8_t*)data + at, rows.sum + index, halves);
                rows.words[index] = S::plus(halves[0], halves[1]);
                rows.scaled_sum[index] = rows.scale[index] * (float)rows.sum[index];
            }
    }
}

void rope(float* x, int heads, int head_dim, const float* cos, const float* sin) {
    const int half = head_dim / 2;
    for (int h = 0; h < heads; ++h, x += head_dim)
        for (int i = 0; i < half; ++i) {
            const float a = x[i], b = x[i + half];
            x[i] = a * cos[i] - b * sin[i];
            x[i + half] = b * cos[i] + a * sin[i];
        }
}

}  // namespace

const Kernels* kernels() {
    static constexpr Kernels table{PRONK_NAME, kAttentionRows, S::widens_bytes, matmul, first_factor, rmsnorm, convert, rope,
                                   PRONK_LIKE::store_kv, PRONK_LIKE::attention, PRONK_LIKE::argmax, PRONK_LIKE::divide, PRONK_LIKE::exponentials,
                                   PRONK_LIKE::find, PRONK_LIKE::round_rows};
    return &table;
}

}  // namespace pronk::PRONK_TARGET
