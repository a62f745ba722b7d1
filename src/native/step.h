// One step of a model, as all of its threads run it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <vector>

#include "model.h"
#include "rows.h"

namespace pronk {

struct Product {
    const Matrix* matrix;
    Output output;
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
    RowsBuffer shared[kForms];
    std::vector<std::unique_ptr<RowsBuffer[]>> own;  // of each thread, for batches of one token
    std::vector<Buffer<float>> attention, normed;    // of each thread
    std::vector<int32_t> all_tokens;
    Units placing, attending, attending_last;  // the last layer attends for rows that want logits alone
    std::vector<int32_t> likeliest;            // token of each row of logits: see guess.h
    std::unique_ptr<std::atomic<int>[]> outliers_used;  // of rows that threads convert together, one a product
    size_t products = 0;

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
    // Runs of one token each, and of a head one tile: who attends has placed just before what only that tile needs.
    const bool placed_late = batch.runs == batch.tokens && batch.rows == batch.tokens &&
                             config.num_attention_heads / config.num_key_value_heads <= kernel.attention_rows;

    void run(int thread);

private:
    // What a thread knows while it runs.
    struct Self : Place {
        int products = 0;
    };

    // body(begin, end) over [0, count), at most `most` at once: see Phases.
    template <class Body>
    void share(Self& self, int count, int most, const Body& body) {
        Phases& phases = model.pool->phases();
        phases.share(self, count, most, [&](int begin, int end) {
            if (self.thread == 0 && interrupted()) phases.abandon();
            body(begin, end);
        });
    }

    void embed(Self& self);
    template <class Row>
    void multiply(Self& self, int tokens, int cols, const Row& row, const Product* products, int count, float* tap,
                  std::initializer_list<const Matrix*> next);
    void expect(Self& self, std::initializer_list<const Matrix*> next);
    void place(int layer, int run, int token, int head);
    void position(Self& self, int layer);
    void attend(Self& self, int layer, bool last);
    void keep_wanted();
};

}  // namespace pronk
