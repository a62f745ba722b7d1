#include "adapter.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <span>
#include <stdexcept>
#include <utility>

#include "half.h"
#include "model.h"
#include "source.h"

namespace pronk {

namespace {

constexpr int kHalf = kPanelRows / 2;

// Of those with the same activations the one with the most bytes.
Format finest_beside(Format weights) {
    Format finest = weights;
    for (const FormatTraits& format : kFormats)
        if (format.activations == traits(weights).activations && format.row_bytes(kChunk) > traits(finest).row_bytes(kChunk))
            finest = format.id;
    return finest;
}

// The power of two that brings the largest of them to 1/2 to 1.
int exponent_of(std::span<const float> numbers) {
    float most = 0;
    for (const float x : numbers) most = std::max(most, std::abs(x));
    int exponent = 0;
    if (most > 0) std::frexp(most, &exponent);
    return exponent;
}

bool is_zero(std::span<const float> numbers) {
    return std::all_of(numbers.begin(), numbers.end(), [](float x) { return x == 0; });
}

// Whether float16 would lose digits of more than a few of them: those under 2^-14 of the largest.
bool is_wide(std::span<const float> numbers) {
    float most = 0;
    for (const float x : numbers) most = std::max(most, std::abs(x));
    size_t small = 0, all = 0;
    for (const float x : numbers) all += x != 0, small += x != 0 && std::abs(x) < most * 0x1p-14f;
    return small * 16 > all;
}

}  // namespace

Adapter::Adapter(const std::vector<Layer>& layers, const std::vector<Module>& modules)
    : firsts(layers.size() * kFirsts), seconds(layers.size() * kProducts) {
    std::vector<std::vector<std::pair<const Module*, int>>> below(firsts.size());  // one another; of A the exponent
    std::vector<int> exponents;                                                    // of B, of each module
    // Of gate and up rows, whose half panels take turns, the gate's ranks come first.
    std::vector<const Module*> ordered;
    for (const Module& module : modules) ordered.push_back(&module);
    std::stable_sort(ordered.begin(), ordered.end(), [](const Module* one, const Module* other) { return one->up < other->up; });
    for (const Module* module : ordered) {
        const size_t place = static_cast<size_t>(module->layer) * kFirsts + kFirstOf[module->product];
        const std::span<const float> a(module->a, static_cast<size_t>(module->rank) * module->cols);
        const std::span<const float> b(module->b, static_cast<size_t>(module->rows) * module->rank);
        const int from_a = exponent_of(a), from_b = exponent_of(b);
        First& first = firsts[place];
        LowRank& second = seconds[static_cast<size_t>(module->layer) * kProducts + module->product];
        const bool pairs = module->product == kGateUp;
        for (int half = 0; half < 2; ++half)
            if (!pairs || half == module->up) second.first[half] = static_cast<int>(first.scales.size()), second.rank[half] = module->rank;
        const bool none = is_zero(a) || is_zero(b);  // of which any scale would do, and an infinite one not
        const auto scale = static_cast<float>(none ? 0 : std::ldexp(static_cast<double>(module->scale), from_a + from_b));
        if (!std::isfinite(scale)) throw std::range_error("the product of an adapter's factors is too large");
        first.scales.insert(first.scales.end(), module->rank, scale);
        widest = std::max(widest, static_cast<int>(first.scales.size()));
        below[place].emplace_back(module, from_a);
        exponents.push_back(from_b);
    }
    std::vector<float> stacked;  // of one place at a time: all together would be what the adapter is in float32
    for (size_t place = 0; place < firsts.size(); ++place) {
        First& first = firsts[place];
        if (first.scales.empty()) continue;
        const auto product = static_cast<size_t>(std::find(kFirstOf, kFirstOf + kProducts, place % kFirsts) - kFirstOf);
        const Matrix& beside = *layers[place / kFirsts].products()[product];
        const int ranks = static_cast<int>(first.scales.size());
        first.a = matrix_of(finest_beside(beside.format), ranks, beside.cols);
        first.a.data = memory.allocate(first.a.nbytes());
        stacked.clear();
        for (const auto& [module, exponent] : below[place]) {
            const std::span<const float> a(module->a, static_cast<size_t>(module->rank) * module->cols);
            for (const double down = std::ldexp(1.0, -exponent); const float x : a) stacked.push_back(static_cast<float>(x * down));
        }
        const auto* rows = reinterpret_cast<const uint8_t*>(stacked.data());
        pack_rows(first.a, rows, beside.cols * sizeof(float), Source::f32, 0, ranks, {});
        pack_zero_rows(first.a, ranks, static_cast<int64_t>(first.a.panels) * kPanelRows);
    }
    std::vector<bool> wide(seconds.size());
    for (const Module& module : modules)
        if (is_wide({module.b, static_cast<size_t>(module.rows) * module.rank}))
            wide[static_cast<size_t>(module.layer) * kProducts + module.product] = true;
    std::vector<uint8_t*> data(seconds.size());
    for (size_t i = 0; i < ordered.size(); ++i) {
        const Module& module = *ordered[i];
        const size_t place = static_cast<size_t>(module.layer) * kProducts + module.product;
        LowRank& second = seconds[place];
        const Matrix& beside = *layers[module.layer].products()[module.product];
        const int both = second.rank[0] + second.rank[1];
        if (!second.b) {
            second.f16 = !traits(traits(beside.format).activations).exact() && !wide[place];
            second.b = data[place] = memory.allocate(static_cast<size_t>(beside.panels) * both * kHalf * (second.f16 ? 2 : 4));
        }
        const bool pairs = module.product == kGateUp;
        const double down = std::ldexp(1.0, -exponents[i]);  // a float's own range is too small
        for (int n = 0; n < module.rows; ++n) {
            const int half = pairs ? n / kHalf * 2 + module.up : n / kHalf;
            const size_t begin = static_cast<size_t>(half / 2) * both + half % 2 * second.rank[0];
            for (int r = 0; r < module.rank; ++r) {
                const auto x = static_cast<float>(module.b[static_cast<size_t>(n) * module.rank + r] * down);
                const size_t at = (begin + r) * kHalf + n % kHalf;
                if (second.f16) reinterpret_cast<uint16_t*>(data[place])[at] = f32_to_f16(x);
                else reinterpret_cast<float*>(data[place])[at] = x;
            }
        }
    }
}

}  // namespace pronk
