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
constexpr float kMostOfByte = 127, kMostOfCode = 127 * 256;
constexpr float kLeastShare = 0x1p-4f;  // of a row's largest byte that each rank has somewhere
constexpr int kMostRanks = 512;  // of a factor in bytes: 32 bits hold their sums

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

// Whether the even or the odd half panels have rows of it: gate rows and up rows take turns.
bool has(const Adapter::Module& module, int half) { return module.product != kGateUp || half == module.up; }

// B [rows][rank], after each rank has taken the size of its row of A, brought to 1/2 to 1: then numbers of a row count as
// much as they are large.
class Second {
public:
    Second(const Adapter::Module& module, const std::vector<int>& of_a) : b_(module.b), rows_(module.rows), rank_(module.rank), down_(rank_) {
        double most = 0;
        for (int r = 0; r < rank_; ++r) {
            const float* a = module.a + static_cast<size_t>(r) * module.cols;
            down_[r] = is_zero({a, static_cast<size_t>(module.cols)}) ? 0 : std::ldexp(1.0, of_a[r]);
            for (int n = 0; n < rows_; ++n) most = std::max(most, std::abs(b_[static_cast<size_t>(n) * rank_ + r] * down_[r]));
        }
        if (most > 0) std::frexp(most, &exponent_);
        for (double& down : down_) down = std::ldexp(down, -exponent_);
        zero_ = most == 0;
    }

    int exponent() const { return exponent_; }
    bool zero() const { return zero_; }

    // Whether fewer bits would lose digits of more than a few numbers: those under 2^-14 of the largest.
    bool is_wide() const {
        size_t small = 0, all = 0;
        for (int n = 0; n < rows_; ++n)
            for (int r = 0; r < rank_; ++r) {
                const float x = std::abs(at(n, r));
                all += x > 0, small += x > 0 && x < 0x1p-14f;
            }
        return small * 16 > all;
    }

    // Whether bytes with a scale a row would leave a rank nowhere more than a few steps: little of B may meet much of u.
    bool is_uneven() const {
        std::vector<float> shares(rank_);
        for (int n = 0; n < rows_; ++n) {
            float most = 0;
            for (int r = 0; r < rank_; ++r) most = std::max(most, std::abs(at(n, r)));
            for (int r = 0; r < rank_; ++r)
                if (most > 0) shares[r] = std::max(shares[r], std::abs(at(n, r)) / most);
        }
        return std::any_of(shares.begin(), shares.end(), [](float share) { return share > 0 && share < kLeastShare; });
    }

    // Row n into its half panel.
    void pack(int n, SecondFactor type, uint8_t* half) const {
        const int row = n % kHalf;
        float most = 0;
        for (int r = 0; r < rank_; ++r) {
            const float x = at(n, r);
            most = std::max(most, std::abs(x));
            if (type == SecondFactor::f16) reinterpret_cast<uint16_t*>(half)[r * kHalf + row] = f32_to_f16(x);
            if (type == SecondFactor::f32) reinterpret_cast<float*>(half)[r * kHalf + row] = x;
        }
        if (type != SecondFactor::bytes || most == 0) return;
        uint16_t& scale = reinterpret_cast<uint16_t*>(half)[row];
        scale = f32_to_f16(most);
        if (f16_to_f32(scale) < most) ++scale;
        const float steps = kMostOfByte / f16_to_f32(scale);
        for (int r = 0; r < rank_; ++r)
            half[2 * kHalf + (r / 4 * kHalf + row) * 4 + r % 4] = static_cast<uint8_t>(128 + std::lrint(at(n, r) * steps));
    }

private:
    float at(int n, int r) const { return static_cast<float>(b_[static_cast<size_t>(n) * rank_ + r] * down_[r]); }

    const float* b_;
    int rows_, rank_, exponent_ = 0;
    bool zero_;
    std::vector<double> down_;  // what each rank is multiplied with: a float's own range is too small
};

// The nearest whole number, under 2^22; without a call, so that loops of it vectorize.
int32_t nearest(float x) { return std::bit_cast<int32_t>(x + 0x1.8p23f) - std::bit_cast<int32_t>(0x1.8p23f); }

}  // namespace

Matrix narrow(const Matrix& wide, Arena& memory) {
    constexpr int parts = kPanelRows / kRankRows;
    Matrix a{wide.format, wide.rows, wide.cols, (wide.rows + kRankRows - 1) / kRankRows, wide.panel_bytes / parts};
    a.data = memory.allocate(a.nbytes());
    const bool grouped = traits(a.format).scales == Scales::group;
    const size_t block = static_cast<size_t>(traits(a.format).bytes) * kRankRows, words = block - sizeof(uint16_t) * kRankRows;
    for (int panel = 0; panel < a.panels; ++panel) {
        uint8_t* to = a.data + panel * a.panel_bytes;
        for (size_t at = 0, bytes; at < a.panel_bytes; at += bytes) {
            bytes = (grouped && at % block == words ? sizeof(uint16_t) : sizeof(uint32_t)) * kRankRows;
            std::memcpy(to + at, wide.panel(panel / parts) + at * parts + panel % parts * bytes, bytes);
        }
    }
    return a;
}

void Adapter::First::finish(float* u, bool words) const {
    for (size_t r = 0; r < scales.size(); ++r) u[r] *= scales[r];
    for (const Rounded& of : rounded) {
        const float* x = u + of.from;
        uint32_t most = 0;  // the bits of |x|: ordered as the numbers are, infinity and NaN above all
        for (int r = 0; r < of.rank; ++r) most = std::max(most, std::bit_cast<uint32_t>(x[r]) & 0x7fffffffu);
        const float largest = std::bit_cast<float>(most), steps = largest < 1e-30f ? 0 : kMostOfCode / largest;
        RankCodes codes{largest / (kMostOfCode * kMostOfByte), 0, 0};
        const int padded = (of.rank + 3) / 4 * 4;
        auto* high = reinterpret_cast<int8_t*>(u + of.to) + sizeof(RankCodes);
        auto* low = high + padded;
        auto* even = reinterpret_cast<int16_t*>(high);
        std::memset(high, 0, 2 * padded);
        for (int r = 0; r < of.rank; ++r) {
            const int32_t code = nearest(x[r] * steps);
            if (words) {
                even[r % 2 * (padded / 2) + r / 2] = static_cast<int16_t>(code), codes.low -= 128 * code;
            } else {
                high[r] = static_cast<int8_t>((code + 128) >> 8), low[r] = static_cast<int8_t>(code);
                codes.high -= 128 * high[r], codes.low -= 128 * low[r];
            }
        }
        std::memcpy(u + of.to, &codes, sizeof(codes));
    }
}

Adapter::Adapter(const std::vector<Layer>& layers, const std::vector<Module>& modules)
    : firsts(layers.size() * kFirsts), seconds(layers.size() * kProducts) {
    std::vector<std::vector<std::pair<const Module*, std::vector<int>>>> below(firsts.size());  // one another; of A's rows the exponents
    std::vector<Second> factors;  // of all modules, in their order
    std::vector<bool> wide(seconds.size()), uneven(seconds.size());
    // Of gate and up rows the gate's ranks come first.
    std::vector<const Module*> ordered;
    for (const Module& module : modules) ordered.push_back(&module);
    std::stable_sort(ordered.begin(), ordered.end(), [](const Module* one, const Module* other) { return one->up < other->up; });
    for (const Module* module : ordered) {
        const size_t place = static_cast<size_t>(module->layer) * kFirsts + kFirstOf[module->product];
        std::vector<int> of_a;
        for (int r = 0; r < module->rank; ++r)
            of_a.push_back(exponent_of({module->a + static_cast<size_t>(r) * module->cols, static_cast<size_t>(module->cols)}));
        const Second& factor = factors.emplace_back(*module, of_a);
        First& first = firsts[place];
        const size_t product = static_cast<size_t>(module->layer) * kProducts + module->product;
        LowRank& second = seconds[product];
        for (int half = 0; half < 2; ++half)
            if (has(*module, half)) second.first[half] = static_cast<int>(first.scales.size()), second.rank[half] = module->rank;
        // Of zeros any scale would do, and an infinite one not.
        const auto scale = static_cast<float>(factor.zero() ? 0 : std::ldexp(static_cast<double>(module->scale), factor.exponent()));
        if (!std::isfinite(scale)) throw std::range_error("the product of an adapter's factors is too large");
        first.scales.insert(first.scales.end(), module->rank, scale);
        first.width = static_cast<int>(first.scales.size());
        below[place].emplace_back(module, std::move(of_a));
        const ActivationTraits& activations = traits(traits(layers[module->layer].products()[module->product]->format).activations);
        if (activations.exact() || factor.is_wide() || module->rank > kMostRanks) wide[product] = true;
        if (activations.scaled && factor.is_uneven()) uneven[product] = true;
        second.type = wide[product] ? SecondFactor::f32 : !activations.scaled || uneven[product] ? SecondFactor::f16 : SecondFactor::bytes;
    }
    for (const Module* module : ordered) {
        const size_t place = static_cast<size_t>(module->layer) * kFirsts + kFirstOf[module->product];
        LowRank& second = seconds[static_cast<size_t>(module->layer) * kProducts + module->product];
        First& first = firsts[place];
        if (second.type == SecondFactor::bytes) {
            first.rounded.push_back({second.first[module->up], module->rank, first.width});
            for (int half = 0; half < 2; ++half)
                if (has(*module, half)) second.first[half] = first.width;
            first.width += RankCodes::words(module->rank);
        }
        widest = std::max(widest, first.width);
    }
    std::vector<float> stacked;  // of one place at a time: all together would be what the adapter is in float32
    std::vector<uint8_t> packed;
    for (size_t place = 0; place < firsts.size(); ++place) {
        First& first = firsts[place];
        if (first.scales.empty()) continue;
        const auto product = static_cast<size_t>(std::find(kFirstOf, kFirstOf + kProducts, place % kFirsts) - kFirstOf);
        const Matrix& beside = *layers[place / kFirsts].products()[product];
        const int ranks = static_cast<int>(first.scales.size());
        Matrix wide = matrix_of(finest_beside(beside.format), ranks, beside.cols);
        packed.resize(wide.nbytes());
        wide.data = packed.data();
        stacked.clear();
        for (const auto& [module, exponents] : below[place]) {
            const float* x = module->a;
            for (const int exponent : exponents)
                for (const float *end = x + module->cols; x < end; ++x)
                    stacked.push_back(static_cast<float>(*x * std::ldexp(1.0, -exponent)));
        }
        const auto* rows = reinterpret_cast<const uint8_t*>(stacked.data());
        pack_rows(wide, rows, beside.cols * sizeof(float), Source::f32, 0, ranks, {});
        pack_zero_rows(wide, ranks, static_cast<int64_t>(wide.panels) * kPanelRows);
        first.a = narrow(wide, memory);
    }
    std::vector<uint8_t*> data(seconds.size());
    for (size_t i = 0; i < ordered.size(); ++i) {
        const Module& module = *ordered[i];
        const size_t place = static_cast<size_t>(module.layer) * kProducts + module.product;
        LowRank& second = seconds[place];
        const Matrix& beside = *layers[module.layer].products()[module.product];
        const size_t both = second.half_bytes(0) + second.half_bytes(1);
        if (!second.b) second.b = data[place] = memory.allocate(beside.panels * both);
        for (int n = 0; n < module.rows; ++n) {
            const int half = module.product == kGateUp ? n / kHalf * 2 + module.up : n / kHalf;
            factors[i].pack(n, second.type, data[place] + half / 2 * both + half % 2 * second.half_bytes(0));
        }
    }
}

}  // namespace pronk
