// Rows: normalized, rotated, and made what a format is multiplied with; and the table of an instruction set's kernels.
// See kernels.inl.
#include <array>

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
// vector is, and `largest` are the bits of the largest magnitude of that.
template <class Taken>
float codes(const float* x, int size, int padded, int32_t largest, int8_t* out, int32_t* sum, const Taken& taken) {
    const float amax = number(&largest), scale = amax / 127, inverse = amax > 0 ? 127 / amax : 0;
    I total = S::set_int(0);
    const F factor = S::set(std::isfinite(inverse) ? inverse : 0);
    for (int i = 0; i < padded; i += 16) {
        const I q = i < size ? S::round(S::mul(taken(load_part(x + i, size - i)), factor)) : S::set_int(0);
        total = S::add_int(total, q);
        S::store_int8(out + i, q);
    }
    *sum = S::sum_int(total);
    return std::isfinite(inverse) ? scale : 0;
}

float quantize(const float* x, int size, int padded, int8_t* out, int32_t* sum) {
    I largest = S::set_int(0);
    for (int i = 0; i < size; i += 16) largest = S::max_int(largest, S::magnitude(load_part(x + i, size - i)));
    const int32_t bits = S::maximum_int(largest);
    if (bits >= 0x7f800000) return not_a_row(out, padded, sum);
    return codes(x, size, padded, bits, out, sum, [](F v) { return v; });
}

// The same of one group, number `index` of all, of which `count` floats exist.
PRONK_INLINE void quantize_group(const float* x, int count, int8_t* out, const Rows& rows, size_t index) {
    const F first = load_part(x, count), last = count > 16 ? load_part(x + 16, count - 16) : S::zero();
    const int32_t bits = S::maximum_int(S::max_int(S::magnitude(first), S::magnitude(last)));
    const bool finite = bits < 0x7f800000;
    const float amax = number(&bits), inverse = finite && amax > 0 ? 127 / amax : 0;
    const bool usable = std::isfinite(inverse);
    const F factor = S::set(usable ? inverse : 0);
    const I a = finite ? S::round(S::mul(first, factor)) : S::set_int(0), b = finite ? S::round(S::mul(last, factor)) : S::set_int(0);
    S::store_int8(out, a), S::store_int8(out + 16, b);
    const int32_t half = S::sums(a), other = S::sums(b), both = S::plus(half, other), sum = S::total(both);
    const float scale = !finite ? NAN : usable ? amax / 127 : 0;
    rows.half_sums[2 * index] = half, rows.half_sums[2 * index + 1] = other, rows.words[index] = both;
    rows.scale[index] = scale, rows.sum[index] = sum, rows.scaled_sum[index] = scale * (float)sum;
}

// -- turning: the sums and differences of turn.h, in its order, and so its bits; of lanes in place instead of from half to half

// A sum where bit `kDistance` of a lane's number is 0, and a difference where it is 1.
template <int kDistance>
PRONK_INLINE F turn_lanes(F x) {
    static constexpr auto signs = [] {
        std::array<float, 16> found{};
        for (int i = 0; i < 16; ++i) found[i] = i & kDistance ? -1.0f : 1.0f;
        return found;
    }();
    return S::fma(x, S::load(signs.data()), S::template swapped<kDistance>(x));
}

template <int kCount>  // vectors of a block
void turn_vectors(const float* x, F scale, float* out) {
    F v[kCount];
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) v[i] = S::load(x + i * 16);
#pragma GCC unroll 4
    for (int half = kCount / 2; half > 0; half /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < kCount; ++i)
            if (!(i & half)) {
                const F a = v[i], b = v[i + half];
                v[i] = S::add(a, b), v[i + half] = S::sub(a, b);
            }
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i)
        S::store(out + i * 16, S::mul(turn_lanes<1>(turn_lanes<2>(turn_lanes<4>(turn_lanes<8>(v[i])))), scale));
}

template <int kCount>
void turn_all(const float* x, int count, F scale, float* out) {
    for (int i = 0; i < count; i += kCount * 16) turn_vectors<kCount>(x + i, scale, out + i);
}

#include "outliers.inl"

// -- rows whose products are summed in 16 bits: see narrow.inl

constexpr int kNarrowSum = 128;  // times 255 it fits in 16 bits

// Words that go alone, their even and their odd numbers apart if they have to.
PRONK_INLINE int spill(const int8_t* x, int at, Spilled* to) {
    const int low = x[0] + x[1], high = x[2] + x[3];  // of two signs they always fit
    const int32_t all = word(x);
    if (low <= kNarrowSum && low >= -kNarrowSum && high <= kNarrowSum && high >= -kNarrowSum) return *to = {all, at}, 1;
    to[0] = {all & 0x00ff00ff, at}, to[1] = {(int32_t)((uint32_t)all & 0xff00ff00), at};
    return 2;
}

template <class V>
void narrow_row(const Rows& rows, int t) {
    const int8_t* x = (const int8_t*)rows.data + t * rows.stride;
    int8_t* out = (int8_t*)rows.narrow + t * rows.stride;
    Spilled* const spilled = rows.spilled + t * rows.most_spilled();
    int n = 0;
    for (int k = 0; k < rows.padded; k += 32)
        for (uint32_t full = V::take_fitting(x + k, out + k, kNarrowSum); full; full &= full - 1) {  // a bit for two words
            const int at = k / 4 + 2 * __builtin_ctz(full);
            n += spill(x + 4 * at + 4, at + 1, spilled + n);
            // The first one stays if it fits alone, and what was written of it does not count.
            int8_t* first = out + 4 * at;
            if (const int more = spill(first, at, spilled + n); more == 2) n += more, std::memset(first, 0, 4);
        }
    rows.spilled_count[t] = n;
}

void convert(const float* x, int size, const Rows& rows, int t) {
    uint8_t* data = rows.data + t * rows.stride;
    switch (rows.format) {
        case ActivationFormat::f32: std::memcpy(data, x, size * sizeof(float)); break;
        case ActivationFormat::bf16:
            for (int i = 0; i < size; i += 16) S::store_bf16((uint16_t*)data + i, load_part(x + i, size - i));
            break;
        case ActivationFormat::int8:
            turn_blocks(x, size, turned_together(size), rows.turned);
            rows.scale[t] = quantize(rows.turned, size, rows.padded, (int8_t*)data, rows.sum + t);
            break;
        case ActivationFormat::int8_plain: rows.scale[t] = quantize(x, size, rows.padded, (int8_t*)data, rows.sum + t); break;
        case ActivationFormat::llm_int8: rows.scale[t] = quantize_rest(x, size, rows, t, (int8_t*)data, rows.sum + t); break;
        case ActivationFormat::q8:
            for (int g = 0; g < rows.groups; ++g) {
                const int at = g * kGroup, count = size - at < kGroup ? size - at : kGroup;
                quantize_group(x + at, count, (int8_t*)data + at, rows, (size_t)t * rows.groups + g);
            }
    }
    if constexpr (S::sums_narrow)
        if (rows.narrow) narrow_row<S>(rows, t);
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

void turn_blocks(const float* x, int count, int block, float* out) {
    if constexpr (S::registers / S::registers_per_vector >= 8) {  // else vectors are arrays
        const F scale = S::set(1 / std::sqrt(static_cast<float>(block)));
        switch (block) {
            case 256: return turn_all<16>(x, count, scale, out);
            case 128: return turn_all<8>(x, count, scale, out);
            case 64: return turn_all<4>(x, count, scale, out);
            case 32: return turn_all<2>(x, count, scale, out);
            case 16: return turn_all<1>(x, count, scale, out);
        }
    }
    std::memmove(out, x, count * sizeof(float));
    turn(out, count, block);
}

const Kernels* kernels() {
    static constexpr Kernels table{PRONK_NAME, kAttentionRows, S::widens_bytes, S::tiles ? 32 : kTileTokens, S::sums_narrow, matmul, first_factor, rmsnorm, convert, rope,
                                   S::tiles ? store_kv : PRONK_LIKE::store_kv, S::tiles ? attention : PRONK_LIKE::attention, PRONK_LIKE::argmax, PRONK_LIKE::divide, PRONK_LIKE::exponentials,
                                   PRONK_LIKE::find, PRONK_LIKE::round_rows};
    return &table;
}

}  // namespace pronk::PRONK_TARGET
