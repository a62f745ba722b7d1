// The sampler of every instruction set against full sorts, and that neither threads nor neighbours change what a row draws.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "sampling.h"
#include "test.h"
#include "test_random.h"

using namespace pronk;

namespace {

double unit() { return std::uniform_real_distribution<double>(0, 1)(random_bits); }

template <class T>
T one_of(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<int>(values.size()) - 1)];
}

Wish random_wish(int vocab_size, size_t row) {
    Wish wish;
    wish.row = row, wish.coin = one_of({0.0, unit(), unit(), 1 - 0x1p-53});
    wish.temperature = one_of({0.0f, 1e-4f, 0.7f, 1.0f, 1.0f, 1e4f});
    wish.top_k = one_of<int64_t>({0, 0, 1, 7, 300, 1 << 30});
    wish.top_p = one_of({1.0, 1.0, 0.95, 0.5, 1e-6}), wish.min_p = one_of({0.0, 0.0, 1e-20, 0.05, 1.0});
    wish.logprobs = one_of({-1, 0, 3, 1 << 30}), wish.as_llama2c = between(0, 3) == 0;
    wish.repetition_penalty = one_of({1.0f, 1.2f}), wish.presence_penalty = one_of({0.0, 0.5}), wish.frequency_penalty = one_of({0.0, -1.0});
    for (int i = between(0, 20); i > 0; --i) wish.history.push_back(between(0, vocab_size - 1));
    wish.prompt_tokens = between(0, 30);
    if (between(0, 1)) wish.bias_tokens = {between(0, vocab_size - 1)}, wish.biases = {normal() * 10};
    return wish;
}

std::vector<float> random_logits(int vocab_size) {
    std::vector<float> logits(vocab_size);
    const float scale = one_of({0.0f, 1.0f, 3.0f, 1e30f});
    const bool rounded = between(0, 2) == 0;
    for (float& x : logits) x = scale * normal(), x = rounded ? std::round(x) : x;
    if (between(0, 5) == 0) logits[between(0, vocab_size - 1)] = one_of({NAN, INFINITY, -INFINITY, 3.4e38f});
    return logits;
}

// Plain: sorted, all of it, and summed one by one. Without penalties, and not llama2.c's.
int32_t plainly(const Kernels& kernel, const std::vector<float>& logits, const Wish& wish) {
    const int size = static_cast<int>(logits.size());
    std::vector<float> scores(size), weights(size);
    const float largest = *std::max_element(logits.begin(), logits.end());
    const bool whole = std::isfinite(largest / wish.temperature);
    for (int i = 0; i < size; ++i) scores[i] = whole ? logits[i] / wish.temperature : (logits[i] - largest) / wish.temperature;
    std::vector<int64_t> sums(size / kWeightBlock + 1);
    kernel.exponentials(scores.data(), size, *std::max_element(scores.begin(), scores.end()), weights.data(), sums.data());
    const auto weight = [&](int i) { return std::llrint(static_cast<double>(weights[i])); };
    std::vector<int> order(size);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scores[a] > scores[b]; });
    if (wish.top_k && wish.top_k < size) order.resize(wish.top_k);
    const auto total = [&] { return std::accumulate(order.begin(), order.end(), int64_t{0}, [&](int64_t s, int i) { return s + weight(i); }); };
    if (wish.top_p < 1) {
        const int64_t all = total();
        for (int64_t dropped = 0; order.size() > 1; order.pop_back()) {
            dropped += weight(order.back());
            if (static_cast<float>(static_cast<double>(dropped) / static_cast<double>(all)) > static_cast<float>(1.0 - wish.top_p)) break;
        }
    }
    const float least = static_cast<float>(wish.min_p) * static_cast<float>(kOne);
    std::erase_if(order, [&](int i) { return weights[i] < least; });
    std::sort(order.begin(), order.end());
    int64_t left = std::min(static_cast<int64_t>(wish.coin * static_cast<double>(total())), total() - 1);
    for (const int i : order)
        if ((left -= weight(i)) < 0) return i;
    return -1;
}

void test_against_sorts(const Kernels& kernel) {
    Sampler sampler(kernel);
    ThreadPool pool(1);
    for (int i = 0; i < 300; ++i) {
        const int vocab_size = one_of({1, 2, 15, 16, 17, 63, 64, 65, 511, 512, 513, 3000});
        const std::vector<float> logits = random_logits(vocab_size);
        Wish wish = random_wish(vocab_size, 0);
        wish.history.clear(), wish.bias_tokens.clear(), wish.biases.clear(), wish.as_llama2c = false;
        if (wish.temperature == 0) wish.temperature = 1;
        const Drawn drawn = sampler.draw(logits.data(), vocab_size, {wish}, pool)[0];
        const bool sound = kernel.argmax(logits.data(), vocab_size) >= 0;
        CHECK(drawn.token == (sound ? plainly(kernel, logits, wish) : -1));
        if (sound && wish.logprobs >= 0) CHECK(static_cast<int>(drawn.top.size()) == std::min(wish.logprobs, vocab_size));
        for (size_t k = 1; k < drawn.top.size(); ++k) {
            const float before = logits[drawn.top[k - 1]], here = logits[drawn.top[k]];
            CHECK(before > here || (before == here && drawn.top[k - 1] < drawn.top[k]));
        }
    }
}

void test_company(const Kernels& kernel) {
    constexpr int vocab_size = 700, rows = 40;
    std::vector<float> logits;
    std::vector<Wish> wishes;
    std::vector<uint8_t> allowed(vocab_size);
    for (int i = 0; i < vocab_size; i += 4) allowed[i] = 1;
    for (int row = 0; row < rows; ++row) {
        const std::vector<float> one = random_logits(vocab_size);
        logits.insert(logits.end(), one.begin(), one.end());
        wishes.push_back(random_wish(vocab_size, row));
        if (row % 3 == 0) wishes.back().allowed = allowed.data();
    }
    Sampler sampler(kernel), other(kernel);
    ThreadPool three(3), one(1);
    for (int again = 0; again < 5; ++again) {
        const std::vector<Drawn> together = sampler.draw(logits.data(), vocab_size, wishes, three);
        for (int row = 0; row < rows; ++row) {
            const Drawn alone = other.draw(logits.data(), vocab_size, {wishes[row]}, one)[0];
            CHECK(alone.token == together[row].token && alone.top == together[row].top && alone.weight == together[row].weight);
            if (alone.token >= 0 && wishes[row].allowed) CHECK(alone.token % 4 == 0);
        }
    }
}

// Every instruction set has the same bits of the exponentials.
void test_exponentials() {
    for (const int size : {1, 15, 16, 17, 511, 512, 513, 1500}) {
        std::vector<float> x(size), expected(size), found(size);
        for (float& v : x) v = -std::fabs(normal() * one_of({1.0f, 10.0f, 100.0f}));
        std::vector<int64_t> sums(size / kWeightBlock + 1), other(sums.size());
        kernels_named("portable")->exponentials(x.data(), size, 0, expected.data(), sums.data());
        for (int i = 0; i < size; ++i)
            if (x[i] > -39) CHECK(std::fabs(expected[i] / kOne / std::exp((double)x[i]) - 1) < 0x1p-22);
        for (int i = 0; const Kernels* kernel = kernels_at(i); ++i) {
            kernel->exponentials(x.data(), size, 0, found.data(), other.data());
            CHECK(found == expected && other == sums);
        }
    }
}

void test_find(const Kernels& kernel) {
    for (const int size : {1, 63, 64, 65, 200}) {
        std::vector<float> x(size);
        for (float& v : x) v = std::round(normal());
        for (const float least : {-INFINITY, -1.0f, 0.0f, 1.0f, 9.0f}) {
            std::vector<int32_t> places(size + 1), expected;
            for (int i = 0; i < size; ++i)
                if (x[i] >= least) expected.push_back(i);
            places.resize(kernel.find(x.data(), size, least, places.data()));
            CHECK(places == expected);
        }
    }
}

}  // namespace

int main() {
    test_exponentials();
    for (int i = 0; const Kernels* kernel = kernels_at(i); ++i) {
        std::printf("%s\n", kernel->name);
        test_find(*kernel);
        test_against_sorts(*kernel);
        test_company(*kernel);
    }
    return test_result();
}
