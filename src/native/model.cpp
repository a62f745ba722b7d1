#include "model.h"

#include <algorithm>

#include "lookahead.h"

namespace pronk {

BatchArrays::BatchArrays(const Batch& batch)
    : token_ids(batch.token_ids, batch.token_ids + batch.tokens),
      positions(batch.positions, batch.positions + batch.tokens),
      offsets(batch.offsets, batch.offsets + batch.runs + 1),
      blocks(batch.blocks, batch.blocks + batch.block_offsets[batch.runs]),
      block_offsets(batch.block_offsets, batch.block_offsets + batch.runs + 1),
      logits_rows(batch.logits_rows, batch.logits_rows + batch.rows),
      adapters(batch.adapters, batch.adapters ? batch.adapters + batch.runs : nullptr) {}

Batch BatchArrays::view() const {
    return {static_cast<int>(token_ids.size()), static_cast<int>(offsets.size()) - 1, static_cast<int>(logits_rows.size()),
            token_ids.data(), positions.data(), offsets.data(), blocks.data(), block_offsets.data(), logits_rows.data(), 0,
            adapters.empty() ? nullptr : adapters.data()};
}

Model::Model(const Config& config, int threads, const Kernels& kernel)
    : config(config),
      kernel(kernel),
      layers(config.num_hidden_layers),
      pool(std::make_shared<ThreadPool>(threads)),
      scratch_(std::make_shared<Scratch>()),
      lookahead_(std::make_shared<Lookahead>()) {}

Model::~Model() { quiesce(); }

Logits Model::forward(const Batch& batch, KV& kv, const std::function<bool()>& interrupted) {
    Lookahead& lookahead = *lookahead_;
    const bool right = lookahead.is(batch, kv);
    Logits logits;
    std::optional<bool> done;
    if (right) done = lookahead.finish(*this, interrupted), logits = std::move(lookahead.logits);
    if (!done) {
        logits.reset(new float[static_cast<size_t>(batch.rows) * config.vocab_size]);
        done = pass(batch, kv, logits.get(), Taps{}, interrupted);
    }
    lookahead.kv = nullptr;
    if (!*done) return nullptr;
    try {
        lookahead.foresee(batch, kv, scratch_->likeliest, rope_positions);
        if (right && lookahead.kv) lookahead.begin(*this);  // one that was wrong is seldom followed by one that is right
    } catch (const std::bad_alloc&) {
        lookahead.kv = nullptr;  // the logits are there
    }
    return logits;
}

bool Model::tap(const Batch& batch, KV& kv, const Taps& taps, const std::function<bool()>& interrupted) {
    return pass(batch, kv, nullptr, taps, interrupted);
}

bool Model::inspect(const Batch& batch, KV& kv, const Probe& probe, const std::function<bool()>& interrupted) {
    return pass(batch, kv, nullptr, Taps{}, interrupted, &probe);
}

bool Model::pass(const Batch& batch, KV& kv, float* logits, const Taps& taps, const std::function<bool()>& interrupted,
                 const Probe* probe) {
    quiesce(), kv.quiesce();
    prepare(batch, probe ? config.num_hidden_layers + 1 : 0);
    Step step{*this, config, kernel, batch, kv, logits, taps, interrupted, *scratch_, probe};
    return pool->run([&](int thread) { step.run(thread); });
}

// `head_rows`: what the head is given, if more than the rows that want logits.
void Model::prepare(const Batch& batch, int head_rows) {
    Scratch& s = *scratch_;
    const int t = batch.tokens, threads = pool->size();
    const int q = config.num_attention_heads * config.head_dim, kvs = config.num_key_value_heads * config.head_dim;
    const size_t c = config.hidden_size, f = config.intermediate_size;
    s.x.reserve(t * c), s.q.reserve((size_t)t * q), s.k.reserve((size_t)t * kvs), s.v.reserve((size_t)t * kvs);
    s.attended.reserve((size_t)t * q), s.h.reserve(t * f);
    const int widest = std::max({(int)c, (int)f, q});
    bool used[kActivationFormats] = {};
    const auto use = [&](const Matrix& m) { used[static_cast<int>(traits(m.format).activations)] = true; };
    use(lm_head);
    for (const Layer& layer : layers)
        for (const Matrix* m : layer.products()) use(*m);
    size_t ranks = 0;
    s.low_ranks.clear();
    for (const auto& adapter : adapters) {
        s.low_ranks.push_back(adapter ? adapter->seconds.data() : nullptr);
        if (adapter) ranks = std::max<size_t>(ranks, adapter->widest);
    }
    s.ranks = batch.adapters ? ranks : 0;
    s.u.reserve(t * s.ranks), s.own_u.resize(threads);
    s.own.resize(threads), s.attention.resize(threads), s.normed.resize(threads);
    for (int i = 0; i < threads; ++i) {
        if (!s.own[i]) s.own[i] = std::make_unique<RowsBuffer[]>(kActivationFormats);
        for (const ActivationTraits& format : kActivations)
            if (const int of = static_cast<int>(format.id); used[of]) s.own[i][of].reserve(format.id, 2, widest, false);
        s.attention[i].reserve(attention_scratch(config.head_dim));
        s.normed[i].reserve(widest);
        s.own_u[i].reserve(s.ranks);
    }
    for (const ActivationTraits& format : kActivations)
        if (const int of = static_cast<int>(format.id); used[of]) s.shared[of].reserve(format.id, std::max({t, 2 * batch.rows, 2 * head_rows}), widest, kernel.sums_narrow);
    s.number(batch, config, kernel.attention_rows);
    const size_t linears = layers.size() * 4 + 1;
    if (s.linears < linears) s.outliers_used = std::make_unique<std::atomic<int>[]>(linears), s.linears = linears;
    for (size_t i = 0; i < linears; ++i) s.outliers_used[i].store(0, std::memory_order_relaxed);
    s.likeliest.resize(Lookahead::possible(batch, *pool) ? batch.rows : 0);
}

}  // namespace pronk
