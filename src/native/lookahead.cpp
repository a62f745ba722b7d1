#include "lookahead.h"

#include <algorithm>

namespace pronk {

namespace {

// After larger batches, the time between two passes is little beside theirs, and the logits of one more take much memory.
constexpr int kMostRuns = 24;

}  // namespace

bool Model::Lookahead::possible(const Batch& batch, const ThreadPool& pool) {
    return pool.size() > 1 && batch.runs <= kMostRuns && batch.runs == batch.tokens && batch.rows == batch.tokens;
}

void Model::Lookahead::foresee(const Batch& last, KV& of, const std::vector<int32_t>& likeliest, int positions) {
    if (likeliest.empty() || !of.remembers()) return;
    for (int run = 0; run < last.runs; ++run) {
        const int next = last.positions[run] + 1;
        // Which block the run gets where it needs another one is not known here.
        if (likeliest[run] < 0 || next >= positions || next % kKVBlock == 0) return;
    }
    arrays = BatchArrays(last);
    arrays.token_ids = likeliest;
    for (int32_t& position : arrays.positions) ++position;
    batch = arrays.view();
    batch.embedding_noise = last.embedding_noise;
    kv = &of;
}

bool Model::Lookahead::is(const Batch& other, const KV& of) const {
    const auto same = [](const std::vector<int32_t>& mine, const int32_t* theirs) { return std::equal(mine.begin(), mine.end(), theirs); };
    return kv == &of && other.runs == batch.runs && other.tokens == batch.tokens && other.rows == batch.rows &&
           other.embedding_noise == batch.embedding_noise && same(arrays.token_ids, other.token_ids) &&
           same(arrays.positions, other.positions) && same(arrays.block_offsets, other.block_offsets) &&
           same(arrays.blocks, other.blocks) && !other.adapters == arrays.adapters.empty() &&
           (!other.adapters || same(arrays.adapters, other.adapters));
}

void Model::Lookahead::begin(Model& model) {
    logits.reset(new float[static_cast<size_t>(batch.rows) * model.config.vocab_size]);
    interrupted_ = nullptr;  // asked by nobody but who finishes it
    model.prepare(batch);
    step_.reset(new Step{model, model.config, model.kernel, batch, *kv, logits.get(), taps_, interrupted_, *model.scratch_});
    kv->written_ahead_by(model.pool, model.pool->begin([step = step_.get()](int thread) { step->run(thread); }));
}

std::optional<bool> Model::Lookahead::finish(Model& model, const std::function<bool()>& interrupted) {
    interrupted_ = interrupted;
    return model.pool->finish();
}

}  // namespace pronk
