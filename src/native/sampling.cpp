#include "sampling.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

namespace pronk {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kReaches[] = {4, 8, 16, kInfinity};  // how far below the largest those lie that are looked at, if that is enough
constexpr int kBins = 256;
// The pass that was begun ahead supposes the likeliest tokens. Where so many are drawn by chance it is wrong, and its threads
// are of more use here.
constexpr int kManyDrawn = 4;

constexpr double kWhole = 0x1.8p52;  // added to a small double, it leaves the nearest whole number in the lowest bits

int64_t whole(float weight) {
    return static_cast<int64_t>(std::bit_cast<uint64_t>(static_cast<double>(weight) + kWhole) - std::bit_cast<uint64_t>(kWhole));
}

constexpr auto kInverseFactorials = [] {
    std::array<double, 15> inverses{};
    double factorial = 1;
    for (int k = 0; k < 15; ++k) factorial *= std::max(k, 1), inverses[k] = 1 / factorial;
    return inverses;
}();

// engine/sampling.py, _double_exponentials().
double falling_exponential(float x) {
    double r = std::max(x, -200.0f);
    const double n = (r * 1.4426950408889634 + kWhole) - kWhole;
    r -= n * 6.93147180369123816490e-01;
    r -= n * 1.90821492927058770002e-10;
    double power = kInverseFactorials[14];
    for (int k = 13; k >= 0; --k) power = power * r + kInverseFactorials[k];
    return power * std::bit_cast<double>(static_cast<uint64_t>(static_cast<int64_t>(n) + 1023) << 52);
}

}  // namespace

// One row on one thread. Vectors have room for a whole vocabulary, so that none of them grows.
struct Sampler::Row {
    const Kernels& kernel;
    const float* const logits;
    const int size;
    const Wish& wish;
    Scratch& scratch;
    const float* scores = logits;
    float largest = 0;      // of scores
    bool filtered = false;  // whether candidates say what is left; else all are

    void draw(Drawn& out) {
        const int32_t likeliest = kernel.argmax(logits, size);
        if (likeliest < 0) return;
        int32_t token = likeliest;
        if (penalize()) token = kernel.argmax(scores, size);
        if (token < 0) return;
        int64_t weight = -1;
        if (wish.temperature > 0) {
            largest = scores[token];
            divide();
            token = wish.as_llama2c ? choose_as_llama2c() : choose();
            if (scores == logits && weighed) weight = all;
        }
        if (wish.logprobs >= 0) {
            scores = logits, largest = out.largest = logits[likeliest];
            if (weight < 0) weigh(), weight = all;
            out.weight = weight;
            keep_best(wish.logprobs, out.top);
        }
        out.token = token;
    }

    // Scores that are not the logits, where anything is done to these: transformers' order.
    bool penalize() {
        const bool repeats = wish.repetition_penalty != 1 && !wish.history.empty();
        const bool counts = wish.presence_penalty != 0 || wish.frequency_penalty != 0;
        if (!wish.allowed && wish.bias_tokens.empty() && !repeats && !counts) return false;
        float* to = scratch.scores.data();
        scores = to;
        if (!wish.allowed) {
            std::copy_n(logits, size, to);
        } else {
            for (int i = 0; i < size; ++i) to[i] = wish.allowed[i] ? logits[i] : -kInfinity;
        }
        for (size_t i = 0; i < wish.bias_tokens.size(); ++i) to[wish.bias_tokens[i]] += wish.biases[i];
        // Each token once, however often it is there: those that were seen are marked, and unmarked after.
        int32_t* count = scratch.counts.data();
        if (repeats) {
            for (const int32_t token : wish.history)
                if (!count[token]++) to[token] = to[token] < 0 ? to[token] * wish.repetition_penalty : to[token] / wish.repetition_penalty;
            for (const int32_t token : wish.history) count[token] = 0;
        }
        if (counts) {
            const size_t begin = std::min(wish.prompt_tokens, wish.history.size()), end = wish.history.size();
            for (size_t i = begin; i < end; ++i) ++count[wish.history[i]];
            for (size_t i = begin; i < end; ++i) {
                const int32_t token = wish.history[i], times = count[token];
                if (!times) continue;
                to[token] -= static_cast<float>(times * wish.frequency_penalty + wish.presence_penalty);
                count[token] = 0;
            }
        }
        return true;
    }

    void divide() {
        const float t = wish.temperature;
        if (t == 1) return;
        float* to = scratch.scores.data();
        if (std::isfinite(largest / t)) {
            kernel.divide(scores, size, 0, t, to);
            largest /= t;
        } else {  // the same distribution, whose largest is 0
            kernel.divide(scores, size, largest, t, to);
            largest = 0;
        }
        scores = to;
    }

    int32_t choose() {
        top_k();
        top_p();
        min_p();
        if (filtered) {
            int64_t sum = 0;
            for (const Candidate& c : scratch.candidates) sum += weight_of(c);
            int64_t left = share(sum);
            for (const Candidate& c : scratch.candidates)
                if ((left -= weight_of(c)) < 0) return c.token;
            return scratch.candidates.back().token;  // never: the share is less than the sum
        }
        weigh();
        int64_t left = share(all);
        size_t block = 0;
        while (left >= scratch.sums[block]) left -= scratch.sums[block++];
        int32_t token = static_cast<int32_t>(block * kWeightBlock);
        while ((left -= whole(scratch.exponentials[token])) >= 0) ++token;
        return token;
    }

    // The weight that the one drawn lies at.
    int64_t share(int64_t sum) const {
        return std::min(static_cast<int64_t>(wish.coin * static_cast<double>(sum)), sum - 1);
    }

    // -- filters --

    void top_k() {
        if (wish.top_k == 0 || wish.top_k >= size) return;
        const auto enough = [&](int64_t count, int64_t) { return count >= wish.top_k; };
        const auto none = [](const Candidate&) { return int64_t{0}; };
        keep_fewest(gather([&] { return static_cast<int64_t>(scratch.candidates.size()) >= wish.top_k; }), none, enough);
        // Of these alone the weights are wanted, and of a score's weight nothing depends on its place.
        filtered = true;
        float packed[kWeightBlock], weights[kWeightBlock];
        int64_t unused;
        for (size_t begin = 0; begin < scratch.candidates.size(); begin += kWeightBlock) {
            const int count = static_cast<int>(std::min<size_t>(kWeightBlock, scratch.candidates.size() - begin));
            for (int i = 0; i < count; ++i) packed[i] = scratch.candidates[begin + i].score;
            kernel.exponentials(packed, count, largest, weights, &unused);
            for (int i = 0; i < count; ++i) scratch.exponentials[scratch.candidates[begin + i].token] = weights[i];
        }
    }

    void top_p() {
        if (wish.top_p >= 1 || wish.as_llama2c) return;
        const float spare = static_cast<float>(1.0 - wish.top_p);
        int64_t total = 0;
        // Whether what is left out beside so much may be dropped.
        const auto may_drop = [&](int64_t mass) {
            return static_cast<float>(static_cast<double>(total - mass) / static_cast<double>(total)) <= spare;
        };
        const auto weight = [this](const Candidate& c) { return weight_of(c); };
        const auto mass = [&] {
            int64_t sum = 0;
            for (const Candidate& c : scratch.candidates) sum += weight(c);
            return sum;
        };
        float reach = kInfinity;
        if (filtered) {
            total = mass();
        } else {
            weigh();
            total = all;
            reach = gather([&] { return may_drop(mass()); });
            filtered = true;
        }
        keep_fewest(reach, weight, [&](int64_t, int64_t sum) { return may_drop(sum); });
    }

    void min_p() {
        if (wish.min_p == 0) return;
        const float least = static_cast<float>(wish.min_p) * static_cast<float>(kOne);  // exact
        if (!filtered) {
            weigh();
            candidates_are(least, scratch.exponentials.data());
            filtered = true;
            return;
        }
        std::erase_if(scratch.candidates, [&](const Candidate& c) { return scratch.exponentials[c.token] < least; });
    }

    int64_t weight_of(const Candidate& c) const { return whole(scratch.exponentials[c.token]); }

    void weigh() {
        kernel.exponentials(scores, size, largest, scratch.exponentials.data(), scratch.sums.data());
        all = 0, weighed = true;
        for (int i = 0; i < (size + kWeightBlock - 1) / kWeightBlock; ++i) all += scratch.sums[i];
    }

    // Candidates, in order of their ids: the scores that are close to the largest, as close as does; gives how close.
    template <class Enough>
    float gather(const Enough& enough) {
        for (const float reach : kReaches) {
            candidates_are(largest - reach, scores);
            if (reach == kInfinity || enough()) return reach;
        }
        return kInfinity;
    }

    // Those of which `of` is at least so much, by their ids.
    void candidates_are(float least, const float* of) {
        const int count = kernel.find(of, size, least, scratch.places.data());
        scratch.candidates.clear();
        for (int i = 0; i < count; ++i) scratch.candidates.push_back({scores[scratch.places[i]], scratch.places[i]});
    }

    static bool better(const Candidate& a, const Candidate& b) { return a.score > b.score || (a.score == b.score && a.token < b.token); }

    // Leaves the fewest of the best candidates that are enough(how many, their weight), in order of their ids. Only the bin of
    // similar scores in which the last of them lies is sorted.
    template <class Weight, class Enough>
    void keep_fewest(float reach, const Weight& weight, const Enough& enough) {
        const float scale = kBins / std::min(reach, 32.0f);
        const auto bin = [&](const Candidate& c) { return static_cast<int>(std::min((largest - c.score) * scale, kBins - 1.0f)); };
        int64_t counts[kBins] = {}, masses[kBins] = {};
        for (const Candidate& c : scratch.candidates) {
            const int of = bin(c);
            ++counts[of], masses[of] += weight(c);
        }
        int64_t count = 0, mass = 0;
        int edge = 0;
        while (edge < kBins && !(counts[edge] && enough(count + counts[edge], mass + masses[edge])))
            count += counts[edge], mass += masses[edge], ++edge;
        if (edge == kBins) return;
        std::vector<Candidate>& sorted = scratch.edge;
        sorted.clear();
        for (const Candidate& c : scratch.candidates)
            if (bin(c) == edge) sorted.push_back(c);
        std::sort(sorted.begin(), sorted.end(), better);
        size_t last = 0;
        while (!enough(++count, mass += weight(sorted[last]))) ++last;
        const Candidate least = sorted[last];
        std::erase_if(scratch.candidates, [&](const Candidate& c) { return better(least, c); });
    }

    // The `count` likeliest, best first.
    void keep_best(int count, std::vector<int32_t>& out) {
        if (count == 0) return;
        count = std::min(count, size);
        const auto enough = [&](int64_t n, int64_t) { return n >= count; };
        const auto none = [](const Candidate&) { return int64_t{0}; };
        keep_fewest(gather([&] { return static_cast<int64_t>(scratch.candidates.size()) >= count; }), none, enough);
        std::sort(scratch.candidates.begin(), scratch.candidates.end(), better);
        for (const Candidate& c : scratch.candidates) out.push_back(c.token);
    }

    // -- llama2.c's choice: sums in float, one after the other, of all or in order of their probability --

    int32_t choose_as_llama2c() {
        top_k();
        min_p();
        float *probs = scratch.exponentials.data(), sum = 0;
        const int count = filtered ? static_cast<int>(scratch.candidates.size()) : size;
        const auto token = [&](int i) { return filtered ? scratch.candidates[i].token : i; };
        // By place, not by token: a place is at most its token, so nothing is overwritten that is still to be read.
        for (int i = 0; i < count; ++i) probs[i] = static_cast<float>(falling_exponential(scores[token(i)] - largest)), sum += probs[i];
        for (int i = 0; i < count; ++i) probs[i] /= sum;
        const float coin = static_cast<float>(wish.coin), top_p = static_cast<float>(wish.top_p);
        float cdf = 0;
        if (wish.top_p >= 1) {
            int last = 0;
            for (int i = 0; i < count; ++i) {
                if ((cdf += probs[i]) > coin) return token(i);
                if (scores[token(i)] > -kInfinity) last = i;
            }
            return token(last);
        }
        const float least = (1.0f - top_p) / static_cast<float>(std::max(size - 1, 1));
        std::vector<Candidate>& sorted = scratch.edge;
        sorted.clear();
        for (int i = 0; i < count; ++i)
            if (probs[i] >= least) sorted.push_back({probs[i], token(i)});
        if (sorted.empty()) return token(static_cast<int>(std::max_element(probs, probs + count) - probs));
        std::sort(sorted.begin(), sorted.end(), better);
        size_t end = 0;
        do cdf += sorted[end++].score;
        while (end < sorted.size() && !(cdf > top_p));
        const float place = coin * cdf;
        cdf = 0;
        for (size_t i = 0; i < end; ++i)
            if ((cdf += sorted[i].score) > place) return sorted[i].token;
        return sorted[end - 1].token;
    }

    int64_t all = 0;  // the weight of all scores
    bool weighed = false;
};

std::vector<Drawn> Sampler::draw(const float* logits, int vocab_size, const std::vector<Wish>& wishes, ThreadPool& pool) {
    std::vector<Drawn> drawn(wishes.size());
    for (size_t i = 0; i < wishes.size(); ++i)
        if (wishes[i].logprobs > 0) drawn[i].top.reserve(std::min(wishes[i].logprobs, vocab_size));
    const auto by_chance = std::count_if(wishes.begin(), wishes.end(), [](const Wish& wish) { return wish.temperature > 0; });
    const bool shared = pool.size() > 1 && wishes.size() > 1 && (by_chance >= kManyDrawn || pool.idle());
    const size_t threads = shared ? pool.size() : 1;
    scratch_.resize(std::max(scratch_.size(), threads));
    for (size_t i = 0; i < threads; ++i) scratch_[i].reserve(vocab_size);
    const auto draw_one = [&](int i, int thread) {
        const Wish& wish = wishes[i];
        Row{kernel_, logits + wish.row * vocab_size, vocab_size, wish, scratch_[thread]}.draw(drawn[i]);
    };
    const int count = static_cast<int>(wishes.size());
    if (!shared) {
        for (int i = 0; i < count; ++i) draw_one(i, 0);
        return drawn;
    }
    pool.run([&](int thread) {
        Cursor cursor{thread};
        pool.phases().parallel_for(cursor, count, 1, [&](int i, int) { draw_one(i, thread); });
    });
    return drawn;
}

void Sampler::Scratch::reserve(int vocab_size) {
    scores.resize(vocab_size), exponentials.resize(vocab_size), counts.resize(vocab_size), places.resize(vocab_size + 1);
    sums.resize(vocab_size / kWeightBlock + 1);
    candidates.reserve(vocab_size), edge.reserve(vocab_size);
}

}  // namespace pronk
