// Of a step: keys and values are stored, and attended over.
#include <cmath>
#include <cstring>
#include <iterator>
#include <numeric>

#include "step.h"

namespace pronk {

// Rotates one token's queries and key of a head, and stores its key and value.
void Model::Step::rotate_and_store(int layer, int run, int token, int head) {
    const int d = config.head_dim, heads = config.num_attention_heads, kv_heads = config.num_key_value_heads;
    const int group = heads / kv_heads, p = batch.positions[token];
    const float *cos = model.cos + (size_t)p * (d / 2), *sin = model.sin + (size_t)p * (d / 2);
    float* key = scratch.k.data + ((size_t)token * kv_heads + head) * d;
    const float* value = scratch.v.data + ((size_t)token * kv_heads + head) * d;
    const int32_t block = batch.blocks[batch.block_offsets[run] + p / kKVBlock];
    kernel.rope(scratch.q.data + ((size_t)token * heads + (size_t)head * group) * d, group, d, cos, sin);
    kernel.rope(key, 1, d, cos, sin);
    kernel.store_kv(kv.layout, kv.at(layer, head) + block * kv.block_bytes(), p % kKVBlock, key, value);
}

// A unit is one head of the tokens of one run in one block.
void Model::Step::rotate_and_store(Worker& worker, int layer) {
    const int kv_heads = config.num_key_value_heads;
    const Units& units = scratch.storing;
    parallel_for(worker, units.count, 1, [&](int unit, int) {
        const Span& span = units.of(unit);
        const int start = batch.positions[span.begin], end = start + span.end - span.begin;
        const int block = start / kKVBlock + (unit - span.first) / kv_heads, head = (unit - span.first) % kv_heads;
        for (int p = std::max(start, block * kKVBlock); p < std::min(end, (block + 1) * kKVBlock); ++p)
            rotate_and_store(layer, span.run, span.begin + p - start, head);
    });
}

// A unit is a few query rows that share a key head; rows of a run go token by token, heads within.
void Model::Step::attend(Worker& worker, int layer, bool last) {
    const int d = config.head_dim, heads = config.num_attention_heads, kv_heads = config.num_key_value_heads;
    const int group = heads / kv_heads, most = kernel.attention_rows;
    const float scale = 1 / std::sqrt((float)d);
    const int32_t* wanted = last ? batch.logits_rows : scratch.all_tokens.data();
    const Units& units = last ? scratch.attending_last : scratch.attending;
    float* shown = probe ? probe->scores_of(layer, heads) : nullptr;
    parallel_for(worker, units.count, 1, [&](int unit, int) {
        if (last && unit == 0) keep_wanted();
        const Span& span = units.of(unit);
        const int rows = (span.end - span.begin) * group, tiles = (rows + most - 1) / most;
        // The longest rows first, so that the last units are short ones.
        const int tile = tiles - 1 - (unit - span.first) / kv_heads, head = (unit - span.first) % kv_heads;
        if (stores_late) rotate_and_store(layer, span.run, wanted[span.begin], head);
        const float* q[kTileTokens];
        float *out[kTileTokens], *scores[kTileTokens];
        int32_t limit[kTileTokens];
        AttentionTask task;
        task.rows = std::min(most, rows - tile * most);
        for (int r = 0; r < task.rows; ++r) {
            const int i = span.begin + (tile * most + r) / group, h = head * group + (tile * most + r) % group;
            q[r] = scratch.q.data + ((size_t)wanted[i] * heads + h) * d;
            out[r] = scratch.attended.data + ((size_t)i * heads + h) * d;
            limit[r] = batch.positions[wanted[i]] + 1;
            if (shown) scores[r] = wanted[i] == batch.logits_rows[0] ? shown + h * probe->stride : nullptr;
        }
        task.q = q, task.out = out, task.limit = limit, task.scale = scale;
        task.kv = kv.at(layer, head), task.block_stride = kv.block_bytes();
        task.blocks = batch.blocks + batch.block_offsets[span.run];
        task.scratch = scratch.attention[worker.thread].data;
        if (shown) task.scores = scores;
        kernel.attention(kv.layout, task);
    });
}

// Hidden states of the rows that want logits to the front: they ascend, so that none is overwritten before it is moved.
void Model::Step::keep_wanted() {
    const size_t c = config.hidden_size;
    for (int i = 0; i < batch.rows; ++i)
        std::memmove(scratch.x.data + i * c, scratch.x.data + batch.logits_rows[i] * c, c * sizeof(float));
}

void Units::add(int run, int begin, int end, int units) {
    spans.push_back({run, begin, end, count});
    count += units;
}

const Span& Units::of(int unit) const {
    return *std::prev(std::upper_bound(spans.begin(), spans.end(), unit, [](int u, const Span& s) { return u < s.first; }));
}

// Which tokens belong together, for all layers.
void Model::Scratch::number(const Batch& batch, const Config& config, int attention_rows) {
    const int heads = config.num_key_value_heads, group = config.num_attention_heads / heads;
    for (Units* units : {&storing, &attending, &attending_last}) units->spans.clear(), units->count = 0;
    const auto attend = [&](Units& units, int run, int begin, int end) {
        if (begin < end) units.add(run, begin, end, ((end - begin) * group + attention_rows - 1) / attention_rows * heads);
    };
    int row = 0;
    for (int n = 0; n < batch.runs; ++n) {
        const int begin = batch.offsets[n], end = batch.offsets[n + 1], start = batch.positions[begin];
        storing.add(n, begin, end, ((start + end - begin - 1) / kKVBlock + 1 - start / kKVBlock) * heads);
        attend(attending, n, begin, end);
        const int first_row = row;
        while (row < batch.rows && batch.logits_rows[row] < end) ++row;
        attend(attending_last, n, first_row, row);
    }
    token_adapters.clear(), row_adapters.clear();
    for (int n = 0; batch.adapters && n < batch.runs; ++n)
        token_adapters.insert(token_adapters.end(), batch.offsets[n + 1] - batch.offsets[n], batch.adapters[n]);
    for (int i = 0; batch.adapters && i < batch.rows; ++i) row_adapters.push_back(token_adapters[batch.logits_rows[i]]);
    all_tokens.resize(batch.tokens);
    std::iota(all_tokens.begin(), all_tokens.end(), 0);
}

}  // namespace pronk
