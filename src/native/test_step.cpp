// Whole passes: any number of threads gives the bits of one, in memory and with threads that sanitizers watch.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "model.h"
#include "probe.h"
#include "test.h"
#include "test_random.h"

using namespace pronk;

namespace {

constexpr Config kConfig{300, 128, 192, 3, 4, 2, 32, 1e-5f};
constexpr int kPositions = 128, kBlocks = 8;

const Kernels& tested() {  // those whose rows of int8 have most beside them, where they can be run
    const Kernels* avx2 = kernels_named("avx2");
    return avx2 ? *avx2 : *kernels_named("portable");
}

// The same random weights every time, packed in `format`.
struct TestModel {
    TestModel(Format format, int threads) : model(kConfig, threads, tested()) {
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
        Matrix m = matrix_of(format, rows, cols);
        m.data = model.weights.allocate(m.nbytes());
        std::vector<float> source(static_cast<size_t>(rows) * cols);
        for (float& x : source) x = normal() / 11;  // about cols ** -0.5
        const auto* bytes = reinterpret_cast<const uint8_t*>(source.data());
        CHECK(pack_rows(m, bytes, cols * sizeof(float), Source::f32, 0, rows, {}));
        pack_zero_rows(m, rows, static_cast<int64_t>(m.panels) * kPanelRows);
        return m;
    }

    // Of a few products of every layer: some that share their rows, and up rows without their gate rows.
    void attach(int rank, float scale) {
        random_bits.seed(rank);
        std::vector<std::vector<float>> numbers;
        std::vector<Adapter::Module> modules;
        const auto add = [&](int layer, int product, bool up, int rows, int cols) {
            for (const int count : {rank * cols, rows * rank})
                for (float& x : numbers.emplace_back(count)) x = normal() / 11;
            modules.push_back({layer, product, up, rank, rows, cols, numbers[numbers.size() - 2].data(), numbers.back().data(), scale});
        };
        const int c = kConfig.hidden_size, q = kConfig.num_attention_heads * kConfig.head_dim;
        for (int layer = 0; layer < kConfig.num_hidden_layers; ++layer) {
            add(layer, 0, false, q, c), add(layer, 2, false, kConfig.num_key_value_heads * kConfig.head_dim, c);
            add(layer, 3, false, c, q), add(layer, kGateUp, true, kConfig.intermediate_size, c);
            add(layer, 5, false, c, kConfig.intermediate_size);
        }
        model.adapters.push_back(std::make_unique<const Adapter>(model.layers, modules));
    }

    float* ones(int count) {
        auto* data = reinterpret_cast<float*>(model.weights.allocate(count * sizeof(float)));
        std::fill_n(data, count, 1.0f);
        return data;
    }

    Model model;
};

struct TestRun {
    int start, tokens;
    std::vector<int32_t> blocks;
    int rows;  // the last so many want logits
};

struct TestBatch {
    explicit TestBatch(const std::vector<TestRun>& runs) {
        for (const TestRun& run : runs) {
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
                positions.data(), offsets.data(), blocks.data(), ends.data(), rows.data(), noise,
                adapters.empty() ? nullptr : adapters.data()};
    }

    float noise = 0;
    std::vector<int32_t> ids, positions, rows, blocks, offsets{0}, ends{0}, adapters;
};

const std::function<bool()> kNever = [] { return false; };

std::vector<float> forward(Model& model, KV& kv, const TestBatch& batch) {
    const Logits logits = model.forward(batch.view(), kv, kNever);
    CHECK(logits);
    return {logits.get(), logits.get() + batch.rows.size() * kConfig.vocab_size};
}

std::vector<float> forward(Model& model, KV& kv, const std::vector<TestRun>& runs) {
    return forward(model, kv, TestBatch(runs));
}

// The first of the largest.
std::vector<int32_t> likeliest(const std::vector<float>& logits) {
    std::vector<int32_t> found;
    for (auto row = logits.begin(); row != logits.end(); row += kConfig.vocab_size)
        found.push_back(static_cast<int32_t>(std::max_element(row, row + kConfig.vocab_size) - row));
    return found;
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
    test.attach(5, 2), test.attach(70, 1);
    TestBatch mixed({{0, 40, {5}, 3}, {0, 9, {6}, 0}, {72, 1, {0, 1}, 1}, {0, 3, {7}, 2}});
    mixed.adapters = {0, 1, -1, 1};
    append(forward(test.model, kv, mixed));
    for (int at = 40; at < 50; ++at) {
        TestBatch one({{at, 1, {5}, 1}});
        one.adapters = {at < 45 ? 0 : 1};
        append(forward(test.model, kv, one));
    }
    CHECK(forward(test.model, kv, {{10, 4, {3}, 0}}).empty());
    for (const int tokens : {1, 33}) {
        const TestBatch batch({{0, tokens, {4}, tokens}});
        const size_t width = kConfig.num_hidden_layers * tokens;
        std::vector<float> qkv(width * kConfig.hidden_size), o(qkv.size()), gate_up(qkv.size());
        std::vector<float> down(width * kConfig.intermediate_size), head(tokens * kConfig.hidden_size);
        const Taps taps{qkv.data(), o.data(), gate_up.data(), down.data(), head.data()};
        CHECK(test.model.tap(batch.view(), kv, taps, kNever));
        for (const auto* tapped : {&qkv, &o, &gate_up, &down, &head}) append(*tapped);
        const TestBatch last({{0, tokens, {4}, 1}});
        const size_t rows = kConfig.num_hidden_layers + 1;
        std::vector<float> hidden(rows * kConfig.hidden_size), lens(rows * kConfig.vocab_size);
        std::vector<float> scores(2 * kConfig.num_attention_heads * tokens);
        const Probe probe{hidden.data(), lens.data(), scores.data(), {1, -1, 0}, static_cast<size_t>(tokens)};
        CHECK(test.model.inspect(last.view(), kv, probe, kNever));
        const std::vector<float> logits = forward(test.model, kv, last);
        CHECK(std::memcmp(lens.data() + (rows - 1) * kConfig.vocab_size, logits.data(), logits.size() * sizeof(float)) == 0);
        for (const auto* seen : {&hidden, &lens, &scores}) append(*seen);
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

// What was foreseen is asked for, with the same adapters, with others, and with none.
void test_a_pass_begun_ahead_is_of_its_adapters() {
    for (const Format format : {Format::q8, Format::f32}) {
        TestModel ahead(format, 3), plain(format, 1);
        ahead.attach(5, 20), plain.attach(5, 20);
        KV kv(kConfig, kConfig.num_hidden_layers, KVType::f32, kBlocks), expected(kConfig, kConfig.num_hidden_layers, KVType::f32, kBlocks);
        TestBatch batch({{0, 1, {0}, 1}, {0, 1, {1}, 1}});
        for (int at = 0; at < 60; ++at) {
            batch.adapters = at / 10 % 3 == 0 ? std::vector<int32_t>{} : at / 10 % 3 == 1 ? std::vector<int32_t>{0, -1} : std::vector<int32_t>{-1, 0};
            const std::vector<float> logits = forward(ahead.model, kv, batch);
            CHECK(logits == forward(plain.model, expected, batch));
            batch.ids = likeliest(logits);
            for (int32_t& position : batch.positions) ++position;
        }
        CHECK(kv.written_ahead());
    }
}

void test_a_pass_can_be_given_up_and_made_again() {
    for (const int threads : {1, 3}) {
        TestModel test(Format::int8, threads);
        KV kv(kConfig, kConfig.num_hidden_layers, KVType::f32, kBlocks);
        const std::vector<float> whole = forward(test.model, kv, {{0, 56, {0}, 1}});
        const TestBatch batch({{0, 56, {0}, 1}});
        for (const int patience : {0, 1, 20}) {
            bool given_up = false;
            // Again, for the calling thread may come too late to be asked.
            for (int i = 0, asked = 0; i < 1000 && !given_up; ++i, asked = 0)
                given_up = !test.model.forward(batch.view(), kv, [&] { return asked++ >= patience; });
            CHECK(given_up);
        }
        CHECK(forward(test.model, kv, {{0, 56, {0}, 1}}) == whole);
    }
}

// Texts that mostly go on with their likeliest tokens, and everything else that may come between two of their passes.
void test_what_is_begun_ahead_changes_no_bit() {
    const TestBatch other({{5, 9, {6}, 1}});
    std::vector<float> tapped(kConfig.num_hidden_layers * 9 * kConfig.intermediate_size);
    const Taps taps{tapped.data(), tapped.data(), tapped.data(), tapped.data(), tapped.data()};
    for (const int threads : {1, 2, 5}) {
        TestModel test(Format::q8, threads), plain(Format::q8, 1);
        int begun = 0;
        for (int text = 0; text < 8; ++text) {
            KV kv(kConfig, kConfig.num_hidden_layers, KVType::int8, kBlocks), expected(kConfig, kConfig.num_hidden_layers, KVType::int8, kBlocks);
            TestBatch batch({{52, 1, {0}, 1}, {0, 1, {2}, 1}, {20, 1, {3}, 1}});
            for (int step = 0; step < 25; ++step) {
                if (batch.positions[0] == kKVBlock) batch.blocks.insert(batch.blocks.begin() + 1, 1), batch.ends = {0, 2, 3, 4};
                if (text % 3 == 1) batch.noise = 1e-6f * (step / 5 % 2);
                const std::vector<float> logits = forward(test.model, kv, batch);
                CHECK(logits == forward(plain.model, expected, batch));
                begun += kv.written_ahead();
                batch.ids = likeliest(logits);
                for (int32_t& position : batch.positions) ++position;
                switch (random_bits() % 12) {
                    case 0: ++batch.ids[step % 3] %= kConfig.vocab_size; break;
                    case 1: std::this_thread::sleep_for(std::chrono::milliseconds(1)); break;  // it is done by then
                    case 2: kv.resize(kv.num_blocks() + 1), expected.resize(kv.num_blocks()); break;
                    case 3: {  // a text goes on in a copy of its block
                        int32_t& block = *(batch.blocks.end() - 2);
                        const int32_t from = block, to = from == 2 ? 7 : 2;
                        kv.copy(from, to), expected.copy(from, to), block = to;
                        break;
                    }
                    case 4: kv.quiesce(); break;
                    case 5: CHECK(forward(test.model, kv, {{3, 5, {5}, 2}}) == forward(plain.model, expected, {{3, 5, {5}, 2}})); break;
                    case 6: CHECK(test.model.tap(other.view(), kv, taps, kNever)); break;
                    case 7: CHECK(!test.model.forward(other.view(), kv, [] { return true; }) || threads > 1); break;
                    default: break;
                }
            }
        }
        CHECK(threads == 1 ? begun == 0 : begun > 40);
    }
}

// All that a pass is told from another by, one by one.
void test_no_other_pass_is_taken_for_what_was_foreseen() {
    constexpr int next = 6;
    const auto asked = [](int threads, int change, int ms = 0) {
        TestModel test(Format::q8, threads);
        KV kv(kConfig, kConfig.num_hidden_layers, KVType::f32, kBlocks), other(kConfig, kConfig.num_hidden_layers, KVType::f32, kBlocks);
        TestBatch batch({{0, 1, {0}, 1}});
        const auto write = [&](KV& into, int32_t block) {
            for (batch = TestBatch({{0, 1, {block}, 1}}); batch.positions[0] < next; ++batch.positions[0])
                batch.ids = likeliest(forward(test.model, into, batch));
        };
        write(other, 0), write(kv, 1), write(kv, 0);
        CHECK(kv.written_ahead() == (threads > 1));
        std::this_thread::sleep_for(std::chrono::milliseconds(ms));
        KV& in = change == 1 ? other : kv;
        if (change == 2) batch.blocks = {1};
        if (change == 3) batch.noise = 1e-5f;
        if (change == 4) ++batch.ids[0] %= kConfig.vocab_size;
        if (change == 5) --batch.positions[0];
        if (change == 6) {
            const int32_t token = batch.ids[0];
            batch = TestBatch({{next, 1, {0}, 1}, {0, 3, {2}, 1}});
            batch.ids[0] = token;
        }
        std::vector<float> logits = forward(test.model, in, batch);
        // Reads what it wrote, and no position that only a pass ahead may have written.
        const std::vector<float> after = forward(test.model, in, {{batch.positions[0] + 1, 1, {batch.blocks[0]}, 1}});
        logits.insert(logits.end(), after.begin(), after.end());
        return logits;
    };
    for (int change = 0; change < 7; ++change)
        for (const int ms : {0, 20}) CHECK(asked(1, change) == asked(3, change, ms));  // given up at once; done by then
    CHECK(asked(1, 0) == asked(1, 1) && asked(1, 0) == asked(1, 2));  // which differ in nothing but where they write
    for (int change = 3; change < 7; ++change) CHECK(asked(1, 0) != asked(1, change));
}

void test_one_that_is_begun_ends_with_what_it_is_for() {
    const auto begin = [](Model& model, KV& kv) {
        TestBatch batch({{0, 1, {0}, 1}});
        for (int i = 0; i < 4; ++i) batch.ids = likeliest(forward(model, kv, batch)), ++batch.positions[0];
        CHECK(kv.written_ahead());
    };
    for (int i = 0; i < 10; ++i) {
        auto test = std::make_unique<TestModel>(Format::int8, 3);
        auto kv = std::make_unique<KV>(kConfig, kConfig.num_hidden_layers, KVType::f32, kBlocks);
        begin(test->model, *kv);
        i % 2 ? kv.reset() : test.reset();
        if (kv) kv->resize(kBlocks + 1);
        if (test) forward(test->model, *(kv = std::make_unique<KV>(kConfig, kConfig.num_hidden_layers, KVType::f32, 1)), {{0, 1, {0}, 1}});
    }
}

// Each begins a pass that the other gives up, and then is asked for what it had foreseen.
void test_two_models_with_the_same_keys_and_values() {
    TestModel one(Format::int8, 2), two(Format::int8, 2), plain(Format::int8, 1);
    for (int i = 0; i < 10; ++i) {
        KV kv(kConfig, kConfig.num_hidden_layers, KVType::f32, kBlocks), expected(kConfig, kConfig.num_hidden_layers, KVType::f32, kBlocks);
        TestBatch first({{0, 1, {0}, 1}}), second = first;
        second.ids[0] = 1 + i;
        const auto go = [&](Model& model, TestBatch& batch, int end) {
            while (batch.positions[0] < end) {
                const std::vector<float> logits = forward(model, kv, batch);
                CHECK(logits == forward(plain.model, expected, batch));
                batch.ids = likeliest(logits), ++batch.positions[0];
            }
            CHECK(kv.written_ahead());
        };
        go(one.model, first, 4), go(two.model, second, 4), go(one.model, first, 7), go(two.model, second, 8);
    }
}

}  // namespace

int main() {
    test_any_number_of_threads_gives_the_same_bits();
    test_a_pass_can_be_given_up_and_made_again();
    test_what_is_begun_ahead_changes_no_bit();
    test_a_pass_begun_ahead_is_of_its_adapters();
    test_no_other_pass_is_taken_for_what_was_foreseen();
    test_one_that_is_begun_ends_with_what_it_is_for();
    test_two_models_with_the_same_keys_and_values();
    return test_result();
}
