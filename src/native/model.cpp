#include "model.h"

#include <algorithm>

#include "step.h"

namespace pronk {

Model::Model(const Config& config, int threads, const Kernels& kernel)
    : config(config), kernel(kernel), layers(config.num_hidden_layers), pool(threads) {}

bool Model::forward(const Batch& batch, KV& kv, float* logits, const std::function<bool()>& interrupted) {
    return pass(batch, kv, logits, Taps{}, interrupted);
}

bool Model::tap(const Batch& batch, KV& kv, const Taps& taps, const std::function<bool()>& interrupted) {
    return pass(batch, kv, nullptr, taps, interrupted);
}

bool Model::pass(const Batch& batch, KV& kv, float* logits, const Taps& taps, const std::function<bool()>& interrupted) {
    if (!scratch_) scratch_ = std::make_shared<Scratch>();
    Scratch& s = *scratch_;
    const int t = batch.tokens, threads = pool.size();
    const int q = config.num_attention_heads * config.head_dim, kvs = config.num_key_value_heads * config.head_dim;
    const size_t c = config.hidden_size, f = config.intermediate_size;
    s.x.reserve(t * c), s.q.reserve((size_t)t * q), s.k.reserve((size_t)t * kvs), s.v.reserve((size_t)t * kvs);
    s.attended.reserve((size_t)t * q), s.h.reserve(t * f);
    const int widest = std::max({(int)c, (int)f, q});
    bool used[kForms] = {};
    used[(int)form_of(lm_head.format)] = true;
    for (const Layer& layer : layers)
        for (const Matrix* m : {&layer.q_proj, &layer.k_proj, &layer.v_proj, &layer.o_proj, &layer.gate_up_proj, &layer.down_proj})
            used[(int)form_of(m->format)] = true;
    s.own.resize(threads), s.attention.resize(threads), s.normed.resize(threads);
    for (int i = 0; i < threads; ++i) {
        if (!s.own[i]) s.own[i] = std::make_unique<RowsBuffer[]>(kForms);
        for (int form = 0; form < kForms; ++form)
            if (used[form]) s.own[i][form].reserve((Form)form, 2, widest);
        s.attention[i].reserve(attention_scratch(config.head_dim));
        s.normed[i].reserve(widest);
    }
    for (int form = 0; form < kForms; ++form)
        if (used[form]) s.shared[form].reserve((Form)form, std::max(t, 2 * batch.rows), widest);
    s.number(batch, config, kernel.attention_rows);
    const size_t products = layers.size() * 4 + 1;
    if (s.products < products) s.outliers_used = std::make_unique<std::atomic<int>[]>(products), s.products = products;
    for (size_t i = 0; i < products; ++i) s.outliers_used[i].store(0, std::memory_order_relaxed);

    Step step{*this, config, kernel, batch, kv, logits, taps, interrupted, s};
    return pool.run([&](int thread) { step.run(thread); });
}

}  // namespace pronk
