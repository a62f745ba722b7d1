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

struct Model::Scratch {
    Buffer<float> x, q, k, v, attended, h;
    RowsBuffer shared[kForms];
    std::vector<std::unique_ptr<RowsBuffer[]>> own;  // of each thread, for batches of one token
    std::vector<Buffer<float>> attention, normed;    // of each thread
    std::vector<int32_t> attend_tokens, run_of;
    std::unique_ptr<std::atomic<int>[]> tickets;  // how far dynamic work has been handed out, one a phase
    size_t phases = 0;
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
    const int threads;
    // Runs of one token each, and of a head one tile: who attends has placed just before what only that tile needs.
    const bool placed_late = batch.runs == batch.tokens && batch.rows == batch.tokens &&
                             config.num_attention_heads / config.num_key_value_heads <= kernel.attention_rows;
    std::atomic<bool> abandoned{false};

    void run(int thread);

private:
    // What a thread knows while it runs.
    struct Self {
        int thread;
        size_t phase = 0;
        Ahead ahead{};
    };

    bool going(const Self& self) {
        if (self.thread == 0 && interrupted()) abandoned.store(true, std::memory_order_relaxed);
        return !abandoned.load(std::memory_order_relaxed);
    }
    void meet(Self& self) {
        if (threads > 1) model.pool.barrier().wait(self.ahead);
    }

    // Where a thread's stretch begins, for batches that are bound by reading weights.
    int cut(int units, int thread) const { return (int)((int64_t)units * thread / threads); }

    // body(i) for i in [0, count), each done by one thread; whoever is free takes the next.
    template <class Body>
    void share(Self& self, int count, const Body& body) {
        std::atomic<int>& ticket = scratch.tickets[self.phase++];
        for (int i; (i = ticket.fetch_add(1, std::memory_order_relaxed)) < count && going(self);) body(i);
    }

    void embed(Self& self);
    template <class Row>
    void multiply(Self& self, int tokens, int cols, const Row& row, const Product* products, int count, float* tap);
    void expect(Self& self, std::initializer_list<const Matrix*> next);
    void place(int layer, int run, int token, int head);
    void position(Self& self, int layer);
    void attend(Self& self, int layer, const int32_t* wanted, int tokens);
};

}  // namespace pronk
