// Whole passes: any number of threads gives the bits of one, in memory and with threads that sanitizers watch.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "model.h"
#include "test.h"
#include "test_random.h"

using namespace pronk;

namespace {

constexpr Config kConfig{300, 128, 192, 3, 4, 2, 32, 1e-5f};
constexpr int kPositions = 128, kBlocks = 8;

// The same random weights every time, packed in `format`.
struct TestModel {
    TestModel(Format format, int threads) : model(kConfig, threads, *kernels_portable()) {
        random_bits.seed(1);
        const int c = kConfig.hidden_size, q = kConfig.num_attention_heads * kConfig.head_dim;
        const int kv = kConfig.num_key_value_heads * kConfig.head_dim, f = kConfig.intermediate_size;
        for (Layer& layer : model.layers) {
            layer.input_layernorm = ones(c), layer.post_attention_layernorm = ones(c);
            layer.q_proj = matrix(format, q, c), layer.k_proj = matrix(format, kv, c), layer.v_proj = matrix(format, kv, c);
            layer.o_proj = matrix(format, c, q), layer.gate_up_proj = matrix(format, 2 * f, c);
            layer.down_proj = matrix(format, c, f);
        }
        model.embed_tokens = model.lm_head = matrix(format == Format::llm_int8 ? Format::q8 : format, kConfig.vocab_size, c);
        model.norm = ones(c), model.cos = ones(kPositions * kConfig.head_dim / 2), model.sin = model.cos;
        model.rope_positions = kPositions;
    }

    Matrix matrix(Format format, int rows, int cols) {
        Matrix m;
        m.format = format, m.rows = rows, m.cols = cols, m.panels = (rows + kPanelRows - 1) / kPanelRows;
        m.panel_bytes = panel_bytes(format, cols);
        m.data = model.weights.allocate(m.nbytes());
        std::vector<float> source(static_cast<size_t>(rows) * cols);
        for (float& x : source) x = normal() / 11;  // about cols ** -0.5
        const auto* bytes = reinterpret_cast<const uint8_t*>(source.data());
        CHECK(pack_rows(m, bytes, cols * sizeof(float), Source::f32, 0, rows, {}));
        pack_zero_rows(m, rows, static_cast<int64_t>(m.panels) * kPanelRows);
        return m;
    }

    float* ones(int count) {
        auto* data = reinterpret_cast<float*>(model.weights.allocate(count * sizeof(float)));
        std::fill_n(data, count, 1.0f);
        return data;
    }

    Model model;
};

struct Run {
    int start, tokens;
    std::vector<int32_t> blocks;
    int rows;  // the last so many want logits
};

struct TestBatch {
    explicit TestBatch(const std::vector<Run>& runs) {
        for (const Run& run : runs) {
            for (int i = 0; i < run.tokens; ++i) {
                ids.push_back((run.start + i) * 7 % kConfig.vocab_size), positions.push_back(run.start + i);
                if (i >= run.tokens - run.rows) rows.push_back(static_cast<int32_t>(ids.size()) - 1);
            }
            blocks.insert(blocks.end(), run.blocks.begin(), run.blocks.end());
            offsets.push_back(static_cast<int32_t>(ids.size())), ends.push_back(static_cast<int32_t>(blocks.size()));
        }
    }

    Batch view() const {
        return {static_cast<int>(ids.size()), static_cast<int>(ends.size()) - 1, static_cast<int>(rows.size()), ids.data(),
                positions.data(), offsets.data(), blocks.data(), ends.data(), rows.data()};
    }

    std::vector<int32_t> ids, positions, rows, blocks, offsets{0}, ends{0};
};

const std::function<bool()> kNever = [] { return false; };

std::vector<float> forward(Model& model, KV& kv, const std::vector<Run>& runs) {
    const TestBatch batch(runs);
    std::vector<float> logits(batch.rows.size() * kConfig.vocab_size);
    CHECK(model.forward(batch.view(), kv, logits.data(), kNever));
    return logits;
}

// A prompt, tokens one by one, texts side by side of which one wants nothing, and what products are fed.
std::vector<float> all_passes(Format format, int threads) {
    TestModel test(format, threads);
    KV kv(kConfig, kConfig.num_hidden_layers, KVType::f32, kBlocks);
    std::vector<float> all = forward(test.model, kv, {{0, 56, {0}, 1}});
    const auto append = [&](const std::vector<float>& more) { all.insert(all.end(), more.begin(), more.end()); };
    for (int at = 56; at < 70; ++at) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the others sleep as well, and come late
        append(forward(test.model, kv, {{at, 1, {0, 1}, 1}}));
    }
    append(forward(test.model, kv, {{0, 30, {2}, 3}, {0, 9, {3}, 0}, {70, 1, {0, 1}, 1}}));
    append(forward(test.model, kv, {{71, 1, {0, 1}, 1}, {30, 1, {2}, 1}, {9, 1, {3}, 1}}));
    CHECK(forward(test.model, kv, {{10, 4, {3}, 0}}).empty());
    for (const int tokens : {1, 33}) {
        const TestBatch batch({{0, tokens, {4}, tokens}});
        const size_t width = kConfig.num_hidden_layers * tokens;
        std::vector<float> qkv(width * kConfig.hidden_size), o(qkv.size()), gate_up(qkv.size());
        std::vector<float> down(width * kConfig.intermediate_size), head(tokens * kConfig.hidden_size);
        const Taps taps{qkv.data(), o.data(), gate_up.data(), down.data(), head.data()};
        CHECK(test.model.tap(batch.view(), kv, taps, kNever));
        for (const auto* tapped : {&qkv, &o, &gate_up, &down, &head}) append(*tapped);
    }
    return all;
}

void test_any_number_of_threads_gives_the_same_bits() {
    for (const Format format : {Format::f32, Format::bf16, Format::int8, Format::llm_int8, Format::q8, Format::q4}) {
        const std::vector<float> alone = all_passes(format, 1);
        for (const int threads : {2, 5}) {
            const std::vector<float> together = all_passes(format, threads);
            CHECK(alone.size() == together.size());
            CHECK(std::memcmp(alone.data(), together.data(), alone.size() * sizeof(float)) == 0);
        }
    }
}

void test_a_pass_can_be_given_up_and_made_again() {
    for (const int threads : {1, 3}) {
        TestModel test(Format::int8, threads);
        KV kv(kConfig, kConfig.num_hidden_layers, KVType::f32, kBlocks);
        const std::vector<float> whole = forward(test.model, kv, {{0, 56, {0}, 1}});
        const TestBatch batch({{0, 56, {0}, 1}});
        std::vector<float> logits(kConfig.vocab_size);
        for (const int patience : {0, 1, 20}) {
            bool given_up = false;
            // Again, for the calling thread may come too late to be asked.
            for (int i = 0, asked = 0; i < 1000 && !given_up; ++i, asked = 0)
                given_up = !test.model.forward(batch.view(), kv, logits.data(), [&] { return asked++ >= patience; });
            CHECK(given_up);
        }
        CHECK(forward(test.model, kv, {{0, 56, {0}, 1}}) == whole);
    }
}

// The first of the largest.
std::vector<int32_t> likeliest(const std::vector<float>& logits) {
    std::vector<int32_t> found;
    for (auto row = logits.begin(); row != logits.end(); row += kConfig.vocab_size)
        found.push_back(static_cast<int32_t>(std::max_element(row, row + kConfig.vocab_size) - row));
    return found;
}

void test_greedy_tokens_are_those_of_single_passes() {
    constexpr int most = 12;
    for (const int threads : {1, 2, 5}) {
        TestModel test(Format::q8, threads);
        KV kv(kConfig, kConfig.num_hidden_layers, KVType::bf16, kBlocks);
        TestBatch batch({{0, 1, {0}, 1}, {0, 1, {1}, 1}, {0, 1, {2}, 1}});
        batch.ids = {5, 200, 31};
        const int runs = static_cast<int>(batch.ids.size());
        std::vector<int32_t> expected, found(most * runs);
        TestBatch step = batch;
        for (int n = 0; n < most; ++n) {
            std::vector<float> logits(runs * kConfig.vocab_size);
            CHECK(test.model.forward(step.view(), kv, logits.data(), kNever));
            step.ids = likeliest(logits);
            for (int32_t& position : step.positions) ++position;
            expected.insert(expected.end(), step.ids.begin(), step.ids.end());
        }
        const auto greedy = [&](int rows, const std::vector<int32_t>& stops, const std::function<bool()>& enough,
                                const std::function<bool()>& interrupted) {
            std::fill(found.begin(), found.end(), -2);
            const int done = test.model.greedy(batch.view(), kv, rows, stops, enough, found.data(), interrupted);
            CHECK(std::equal(found.begin(), found.begin() + done * runs, expected.begin()));
            CHECK(std::count(found.begin(), found.end(), -2) == (most - done) * runs || done == 0);
            return done;
        };
        CHECK(greedy(most, {}, kNever, kNever) == most);
        CHECK(greedy(5, {}, kNever, kNever) == 5);
        CHECK(greedy(most, {}, [] { return true; }, kNever) == 1);
        const int32_t stop = expected[7];  // of the third row, or of one before
        const int row = static_cast<int>(std::find(expected.begin(), expected.end(), stop) - expected.begin()) / runs;
        CHECK(greedy(most, {stop, kConfig.vocab_size}, kNever, kNever) == row + 1);
        bool given_up = false;
        for (int i = 0; i < 1000 && !given_up; ++i) given_up = greedy(most, {}, kNever, [] { return true; }) == 0;
        CHECK(given_up);
    }
}

}  // namespace

int main() {
    test_any_number_of_threads_gives_the_same_bits();
    test_a_pass_can_be_given_up_and_made_again();
    test_greedy_tokens_are_those_of_single_passes();
    return test_result();
}
