// A vocabulary's scores: the largest of them, their exponentials, those above a bound. See kernels.inl and sampling.cpp.
#include <bit>

#include "kernels.inl"

namespace pronk::PRONK_TARGET {

namespace {

constexpr int kBlock = 64;  // scores that are looked at together

// The largest of a whole block.
float largest_of(const float* x) {
    const F a = S::max(S::load(x), S::load(x + 16)), b = S::max(S::load(x + 32), S::load(x + 48));
    return S::maximum(S::max(a, b));
}

// engine/filters.py, exponentials(), step for step: no operation is fused with another.
F falling_exponential(F x) {
    x = S::max(x, S::set(-40.0f));
    const F n = S::whole(S::mul(x, S::set(1.44269504f)));
    x = S::sub(x, S::mul(n, S::set(0.693359375f)));
    x = S::sub(x, S::mul(n, S::set(-2.12194440e-4f)));
    F power = S::add(S::mul(S::set((float)(1.0 / 5040)), x), S::set((float)(1.0 / 720)));
    power = S::add(S::mul(power, x), S::set((float)(1.0 / 120)));
    power = S::add(S::mul(power, x), S::set((float)(1.0 / 24)));
    power = S::add(S::mul(power, x), S::set((float)(1.0 / 6)));
    power = S::add(S::mul(power, x), S::set(0.5f));
    power = S::add(S::mul(power, x), S::set(1.0f));
    power = S::add(S::mul(power, x), S::set(1.0f));
    return S::times_power_of_two(power, n);
}

}  // namespace

int32_t argmax(const float* x, int count) {
    constexpr int32_t kInfinity = 0x7f800000;  // the bits of all that is no number lie above
    F most = S::set(-INFINITY);
    I magnitudes = S::set_int(0);
    const int whole = count / 16 * 16;
    for (int i = 0; i < whole; i += 16) {
        const F v = S::load(x + i);
        most = S::max(most, v), magnitudes = S::max_int(magnitudes, S::magnitude(v));
    }
    float largest = S::maximum(most);
    bool nan = S::maximum_int(magnitudes) > kInfinity;
    for (int i = whole; i < count; ++i) largest = x[i] > largest ? x[i] : largest, nan |= x[i] != x[i];
    if (nan || !std::isfinite(largest)) return -1;
    int at = 0;
    while (at + kBlock <= count && !(largest_of(x + at) == largest)) at += kBlock;
    while (x[at] != largest) ++at;
    return at;
}

// Plain loops, which the compiler turns into vectors.
void divide(const float* x, int count, float less, float by, float* out) {
    if (less == 0)
        for (int i = 0; i < count; ++i) out[i] = x[i] / by;
    else
        for (int i = 0; i < count; ++i) out[i] = (x[i] - less) / by;
}

void exponentials(const float* x, int count, float largest, float* out, int64_t* sums) {
    constexpr double kWhole = 0x1.8p52;  // added to a double, it leaves the nearest whole number in the lowest bits
    const F shift = S::set(largest), one = S::set((float)kOne);
    for (int begin = 0; begin < count; begin += kWeightBlock) {
        const int end = count - begin < kWeightBlock ? count : begin + kWeightBlock;
        int i = begin;
        for (; i + 16 <= end; i += 16) S::store(out + i, S::mul(falling_exponential(S::sub(S::load(x + i), shift)), one));
        if (i < end) store_part(out + i, S::mul(falling_exponential(S::sub(load_part(x + i, end - i), shift)), one), end - i);
        uint64_t sum = 0;
        for (i = begin; i < end; ++i) sum += std::bit_cast<uint64_t>((double)out[i] + kWhole);
        *sums++ = (int64_t)(sum - (uint64_t)(end - begin) * std::bit_cast<uint64_t>(kWhole));
    }
}

int find(const float* x, int count, float least, int32_t* places) {
    int found = 0, i = 0;
    for (; i + kBlock <= count; i += kBlock) {
        if (!(largest_of(x + i) >= least)) continue;
        for (int j = i; j < i + kBlock; ++j) places[found] = j, found += x[j] >= least;
    }
    for (; i < count; ++i) places[found] = i, found += x[i] >= least;
    return found;
}

}  // namespace pronk::PRONK_TARGET
