// Weights rounded to a block type, each column's error made up for by those behind it (GPTQ, arXiv 2210.17323), and the
// scales of each group searched when its turn has come: pronk/calibrate/gptq.py says what is computed, and why.
//
// A row a lane. No two operations are fused, and each sum runs by ascending column: the same bits everywhere.
#include "half.h"
#include "kernels.inl"
#include "rounding.h"

namespace pronk::PRONK_TARGET {

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kAbreast = kRoundedTogether / kWidth;

using V = float __attribute__((vector_size(kWidth * sizeof(float)), may_alias));

constexpr float kShrink[] = {0, -0.25f, 0.35f, 0.7f};  // steps cut from either end of a grid with a minimum, as q4 has it
constexpr float kFew[] = {0, 0.35f};                   // of fine grids, where little is to be gained
constexpr float kCut[] = {-0.06f, 0.01f, 0.09f, 0.16f, 0.23f, 0.3f, 0.38f, 0.45f};  // of the largest weight, of a grid around 0
constexpr int kFineGrid = 31;  // steps from which on a grid is fine

V all(float x) { return V{} + x; }
V smaller(V a, V b) { return a < b ? a : b; }
V larger(V a, V b) { return a > b ? a : b; }
V magnitude(V x) { return x < 0.f ? -x : x; }
V ratio(V a, V b) { return b > 0.f ? a / b : V{}; }  // 0 where there is nothing to divide by

// The nearest whole number of [low, high], ties to even; low of NaN.
V whole(V x, float low, float high) {
    constexpr float magic = 0x1.8p23f;
    return smaller(larger(x, all(low)), all(high)) + magic - magic;
}

// The nearest number of kCurve, the lower of equals; the lowest of NaN.
V on_the_curve(V x) {
    V found = all(kCurve[0]);
    for (size_t i = 1; i < sizeof kCurve; ++i) {
        const float low = kCurve[i - 1], high = kCurve[i];
        found = x > (low + high) / 2 ? all(high) : found;
    }
    return found;
}

V in_half(V x) {
    for (int i = 0; i < kWidth; ++i) x[i] = f16_to_f32(f32_to_f16(x[i]));
    return x;
}

struct Scales {
    V step, minimum, n, m;
};

// How what a search wishes for can be stored.
struct AsItIs {
    Scales operator()(V step, V minimum) const { return {step, minimum, all(1), all(1)}; }
};

struct InHalf {
    Scales operator()(V step, V minimum) const { return {in_half(step), in_half(minimum), all(1), all(1)}; }
};

struct InNumbers {
    V d, dmin;
    float least, most;

    Scales operator()(V step, V minimum) const {
        const V n = whole(d != 0.f ? step / d : V{}, least, most), m = whole(dmin != 0.f ? -minimum / dmin : V{}, 0, most);
        return {d * n, -(dmin * m), n, m};
    }
};

struct Best {
    Scales scales;
    V error;  // but for what no grid changes

    void weigh(const Scales& found, V by) {
        const auto better = by < error;
        error = better ? by : error;
        scales.step = better ? found.step : scales.step;
        scales.minimum = better ? found.minimum : scales.minimum;
        scales.n = better ? found.n : scales.n;
        scales.m = better ? found.m : scales.m;
    }
};

struct Coder {  // by a step and a minimum
    V minimum, inverse;
    float low, high;
    bool curved;

    Coder(V step, V minimum, const Rule& rule)
        : minimum(minimum), inverse(step != 0.f ? 1.f / step : V{}), low(static_cast<float>(rule.low)),
          high(static_cast<float>(rule.high)), curved(rule.curved) {}
    V operator()(V w) const {
        const V code = (w - minimum) * inverse;
        return curved ? on_the_curve(code) : whole(code, low, high);
    }
};

// The best of several ways to lay a grid over a group, whose weights are kAbreast apart: round, solve for the scale (and
// the minimum) that suit these codes best, take what can be stored of that. Squared errors count `weight` each.
template <class Store>
Scales around_nothing(const V* w, const float* weight, const Rule& rule, const Store& store) {
    V far = w[0];
    for (int k = 1; k < rule.group; ++k) far = magnitude(w[k * kAbreast]) > magnitude(far) ? w[k * kAbreast] : far;
    Best best{store(V{}, V{}), V{}};
    const auto lay = [&](float end) {
        const Coder code(far / end, V{}, rule);
        V qw = {}, qq = {};
        for (int k = 0; k < rule.group; ++k) {
            const V q = code(w[k * kAbreast]), weighted = q * weight[k];
            qw += weighted * w[k * kAbreast];
            qq += weighted * q;
        }
        const Scales found = store(ratio(qw, qq), V{});
        best.weigh(found, found.step * (found.step * qq - 2.f * qw));
    };
    for (const float cut : kCut) lay(static_cast<float>(rule.low) * (1 - cut));
    if (rule.curved || (rule.low != -rule.high && rule.high - rule.low < kFineGrid))  // the far end may be the one with less room
        for (int i = 1; i < 5; ++i) lay(static_cast<float>(rule.high) * (1 - kCut[i]));
    return best.scales;
}

template <class Store>
Scales with_minimum(const V* w, const float* weight, const Rule& rule, const Store& store) {
    V low = w[0], most = w[0], sum_w = w[0] * weight[0];
    float total = weight[0];
    for (int k = 1; k < rule.group; ++k) {
        const V x = w[k * kAbreast];
        low = smaller(low, x), most = larger(most, x);
        sum_w += x * weight[k];
        total += weight[k];
    }
    if (rule.numbers) low = smaller(low, V{});  // what is stored is taken away, and cannot be added
    const V span = most - low;
    Best best{store(V{}, sum_w / total), V{}};
    best.error = best.scales.minimum * (best.scales.minimum * total - 2.f * sum_w);
    const auto lay = [&](float bottom, float top) {
        const V step = span / (static_cast<float>(rule.high) - bottom - top);
        const Coder code(step, low + bottom * step, rule);
        V sum_q = {}, qw = {}, qq = {};
        for (int k = 0; k < rule.group; ++k) {
            const V q = code(w[k * kAbreast]), weighted = q * weight[k];
            sum_q += weighted;
            qw += weighted * w[k * kAbreast];
            qq += weighted * q;
        }
        V slope = ratio(total * qw - sum_q * sum_w, total * qq - sum_q * sum_q);
        if (rule.numbers) slope = sum_w > slope * sum_q ? ratio(qw, qq) : slope;  // a minimum over 0 cannot be had
        const V stored = store(slope, V{}).step;
        const Scales found = store(stored, (sum_w - stored * sum_q) / total);
        const V s = found.step, m = found.minimum;
        best.weigh(found, s * (s * qq - 2.f * qw) + m * (m * total - 2.f * sum_w + 2.f * s * sum_q));
    };
    const auto lay_all = [&](const auto& shrink) {
        for (const float bottom : shrink)
            for (const float top : shrink) lay(bottom, top);
    };
    if (rule.high - rule.low < kFineGrid) lay_all(kShrink);
    else lay_all(kFew);
    return best.scales;
}

template <class Store>
Scales fit(const V* w, const float* weight, const Rule& rule, const Store& store) {
    return rule.minimum ? with_minimum(w, weight, rule, store) : around_nothing(w, weight, rule, store);
}

// d and dmin of one block, as fine as lets the largest scale of its groups be stored.
InNumbers heads(const V* w, const float* weight, const Rule& rule) {
    V far = {}, lowest = {};
    for (int at = 0; at < rule.block; at += rule.group) {
        const Scales ideal = fit(w + at * kAbreast, weight + at, rule, AsItIs{});
        far = magnitude(ideal.step) > magnitude(far) ? ideal.step : far;
        lowest = smaller(lowest, ideal.minimum);
    }
    // The scale of the largest magnitude gets the number of the largest one: a negative one, where there are any.
    const float least = static_cast<float>(rule.least), most = static_cast<float>(rule.most);
    return {in_half(far / (rule.least < 0 ? least : most)), in_half(-lowest / most), least, most};
}

// Rounds the columns of a group one after the other; each error moves the others of the group, all together the columns
// behind it.
void carry(V* left, const Rounding& r, const Scales (&scales)[kAbreast], int at, V* errors) {
    const int end = at + r.rule.group;
    for (int j = at; j < end; ++j) {
        const float* u = r.upper + static_cast<size_t>(j) * r.columns;
        for (int v = 0; v < kAbreast; ++v) {
            V& x = left[j * kAbreast + v];
            const V q = Coder(scales[v].step, scales[v].minimum, r.rule)(x);
            const V error = (x - (q * scales[v].step + scales[v].minimum)) / u[j];
            x = q;
            errors[(j - at) * kAbreast + v] = error;
            for (int k = j + 1; k < end; ++k) left[k * kAbreast + v] -= error * u[k];
        }
    }
    constexpr int kTile = 4;  // columns; blocks have a multiple
    for (int k = end; k < r.columns; k += kTile) {
        V acc[kTile][kAbreast];
        for (int i = 0; i < kTile; ++i)
            for (int v = 0; v < kAbreast; ++v) acc[i][v] = left[(k + i) * kAbreast + v];
        for (int j = at; j < end; ++j) {
            const float* u = r.upper + static_cast<size_t>(j) * r.columns + k;
            for (int i = 0; i < kTile; ++i)
                for (int v = 0; v < kAbreast; ++v) acc[i][v] -= errors[(j - at) * kAbreast + v] * u[i];
        }
        for (int i = 0; i < kTile; ++i)
            for (int v = 0; v < kAbreast; ++v) left[(k + i) * kAbreast + v] = acc[i][v];
    }
}

void put(V x, float* out, size_t stride, int rows) {
    for (int i = 0; i < rows; ++i) out[i * stride] = x[i];
}

void put(V x, int16_t* out, size_t stride, int rows) {
    for (int i = 0; i < rows; ++i) out[i * stride] = static_cast<int16_t>(x[i]);
}

// Rows [first, first + rows), at most kRoundedTogether.
void together(const Rounding& r, const float* weight, int first, int rows, V* left, V* errors) {
    const Rule& rule = r.rule;
    const size_t columns = r.columns, blocks = columns / rule.block, groups = columns / rule.group;
    float* numbers = reinterpret_cast<float*>(left);  // [columns][kRoundedTogether]
    const float* from = r.weights + first * columns;
    for (size_t k = 0; k < columns; ++k)
        for (int i = 0; i < kRoundedTogether; ++i) numbers[k * kRoundedTogether + i] = i < rows ? from[i * columns + k] : 0;
    for (size_t block = 0; block < blocks; ++block) {
        InNumbers head[kAbreast];
        const size_t begin = block * rule.block, end = begin + rule.block;
        for (int v = 0; rule.numbers && v < kAbreast; ++v) head[v] = heads(left + begin * kAbreast + v, weight + begin, rule);
        for (size_t at = begin; at < end; at += rule.group) {
            Scales scales[kAbreast];
            for (int v = 0; v < kAbreast; ++v) {
                V* w = left + at * kAbreast + v;
                scales[v] = rule.numbers ? fit(w, weight + at, rule, head[v]) : fit(w, weight + at, rule, InHalf{});
                const int begun = v * kWidth, count = rows - begun < kWidth ? rows - begun : kWidth;
                const size_t row = first + begun, group = row * groups + at / rule.group, in = row * blocks + block;
                put(scales[v].n, r.n + group, groups, count);
                put(scales[v].m, r.m + group, groups, count);
                put(rule.numbers ? head[v].d : scales[v].step, r.d + in, blocks, count);
                put(rule.numbers ? head[v].dmin : scales[v].minimum, r.dmin + in, blocks, count);
                const Coder code(scales[v].step, scales[v].minimum, rule);
                for (int k = 0; !r.upper && k < rule.group; ++k) w[k * kAbreast] = code(w[k * kAbreast]);
            }
            if (r.upper) carry(left, r, scales, static_cast<int>(at), errors);
        }
    }
    int8_t* codes = r.codes + first * columns;
    for (int i = 0; i < rows; ++i)
        for (size_t k = 0; k < columns; ++k) codes[i * columns + k] = static_cast<int8_t>(numbers[k * kRoundedTogether + i]);
}

}  // namespace

void round_rows(const Rounding& r) {
    V* left = reinterpret_cast<V*>(r.scratch);
    V* errors = left + static_cast<size_t>(r.columns) * kAbreast;
    float* weight = reinterpret_cast<float*>(errors + kMostGroup * kAbreast);
    for (int k = 0; k < r.columns; ++k) {
        const float u = r.upper ? r.upper[static_cast<size_t>(k) * r.columns + k] : 1;
        weight[k] = 1 / (u * u);
    }
    for (int first = 0; first < r.rows; first += kRoundedTogether)
        together(r, weight, first, r.rows - first < kRoundedTogether ? r.rows - first : kRoundedTogether, left, errors);
}

}  // namespace pronk::PRONK_TARGET
