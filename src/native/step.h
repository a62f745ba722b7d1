// One step of a model, as all of its threads run it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "model.h"
#include "probe.h"
#include "rows.h"

namespace pronk {

// Rows that are multiplied, [T, cols]: as they lie, or each normalized before.
struct Input {
    const float* x;
    int cols;
    const float* norm = nullptr;  // RMSNorm's weight, [cols]
};

struct Product {
    const Matrix* matrix;
    Output output;
};

// One or several products with the same rows, and what they have beside these: bound once a layer.
struct Linear {
    std::array<Product, 3> products;
    int count;
    int tokens;  // T
    float* tap;  // where the rows are copied to, [T, cols]; or none
    std::array<const Matrix*, 3> next;  // what is multiplied after it, side by side; null: no more
    const int32_t* adapters = nullptr;  // of each row; null: none has any
    int first = 0;                      // which of an adapter's first factors is for these rows

    Epilogue epilogue() const { return products[0].output.epilogue; }
};

// The products of a layer.
struct Linears {
    Linear qkv, o, gate_up, down;
};

// Tokens [begin, end) of one run, counted among those of a batch or those attended for, which make units from `first` on.
struct Span {
    int run, begin, end, first;
};

struct Units {
    std::vector<Span> spans;
    int count = 0;

    void add(int run, int begin, int end, int units);
    const Span& of(int unit) const;
};

struct Model::Scratch {
    Buffer<float> x, q, k, v, attended, h;
    RowsBuffer shared[kActivationFormats];
    std::vector<std::unique_ptr<RowsBuffer[]>> own;  // of each thread, for batches of one token
    std::vector<Buffer<float>> attention, normed;    // of each thread
    Buffer<float> u;                                 // of each token what adapters' first factors give, [T][ranks]
    std::vector<Buffer<float>> own_u;                // of each thread, for batches of one token
    size_t ranks = 0;
    std::vector<const LowRank*> low_ranks;           // by adapter
    std::vector<int32_t> token_adapters, row_adapters;  // of each token, and of those that want logits; or none
    std::vector<int32_t> all_tokens;
    Units storing, attending, attending_last;  // the last layer attends for rows that want logits alone
    std::vector<int32_t> likeliest;            // token of each row of logits: see lookahead.h
    std::unique_ptr<std::atomic<int>[]> outliers_used;  // of rows that threads convert together, one a linear
    size_t linears = 0;

    void number(const Batch& batch, const Config& config, int attention_rows);
};

// One step, seen by all threads.
struct Model::Step {
    Model& model;
    const Config& config;
    const Kernels& kernel;
    const Batch& batch;
    KV& kv;
    float* logits;  // none: only taps are wanted
    const Taps& taps;
    const std::function<bool()>& interrupted;
    Scratch& scratch;
    const Probe* probe = nullptr;  // none: nobody looks
    // Runs of one token each, and of a head one tile: who attends has stored just before what only that tile needs.
    const bool stores_late = batch.runs == batch.tokens && batch.rows == batch.tokens &&
                             config.num_attention_heads / config.num_key_value_heads <= kernel.attention_rows;

    void run(int thread);

private:
    // A thread, and what it alone knows while it runs.
    struct Worker : Cursor {
        int linears = 0;
    };

    // body(begin, end) over [0, count), at most `most` at once: see Phases.
    template <class Body>
    void parallel_for(Worker& worker, int count, int most, const Body& body) {
        Phases& phases = model.pool->phases();
        phases.parallel_for(worker, count, most, [&](int begin, int end) {
            if (worker.thread == 0 && interrupted()) phases.abandon();
            body(begin, end);
        });
    }

    Linears bind(size_t index) const;
    Linear bind_head(float* out, int rows, float* tap) const;

    // The steps, in the order of torch_engine/model.py.
    void embed(Worker& worker);
    Input norm(const float* weight) const { return {scratch.x.data, config.hidden_size, weight}; }  // as it is read
    void linear(Worker& worker, const Input& input, const Linear& linear);
    void rotate_and_store(Worker& worker, int layer);
    void attend(Worker& worker, int layer, bool last);
    void find_likeliest(Worker& worker);
    void keep_hidden(Worker& worker, size_t layer);  // probe.cpp
    void look_through_head(Worker& worker);

    void rotate_and_store(int layer, int run, int token, int head);
    void keep_wanted();
    void first_factors(const Linear& linear, const Rows* rows, int begin, int end, float* u) const;
    void prefetch(Worker& worker, const std::array<const Matrix*, 3>& next) const;
};

}  // namespace pronk
