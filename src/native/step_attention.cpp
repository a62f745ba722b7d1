// Of a step: keys and values into their places, and attention over them.
#include <cmath>

#include "step.h"

namespace pronk {

// Rotates one token's queries and key of a head, and stores its key and value.
void Model::Step::place(int layer, int run, int token, int head) {
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
void Model::Step::position(Self& self, int layer) {
    const int kv_heads = config.num_key_value_heads;
    int first = 0;  // block of the batch, numbered through its runs
    std::atomic<int>& ticket = scratch.tickets[self.phase++];
    const auto next = [&] { return ticket.fetch_add(1, std::memory_order_relaxed); };
    int mine = next();
    for (int n = 0; n < batch.runs; ++n) {
        const int begin = batch.offsets[n], end = batch.offsets[n + 1], start = batch.positions[begin];
        const int from = start / kKVBlock, to = (start + end - begin - 1) / kKVBlock + 1;
        for (; mine < (first + to - from) * kv_heads && going(self); mine = next()) {
            const int block = from + mine / kv_heads - first, head = mine % kv_heads;
            for (int p = std::max(start, block * kKVBlock); p < std::min(start + end - begin, (block + 1) * kKVBlock); ++p)
                place(layer, n, begin + p - start, head);
        }
        first += to - from;
    }
}

// A unit is a few query rows that share a key head; rows of a run go token by token, heads within.
void Model::Step::attend(Self& self, int layer, const int32_t* wanted, int tokens) {
    const int d = config.head_dim, heads = config.num_attention_heads, kv_heads = config.num_key_value_heads;
    const int group = heads / kv_heads, most = kernel.attention_rows;
    const float scale = 1 / std::sqrt((float)d);
    std::atomic<int>& ticket = scratch.tickets[self.phase++];
    const auto next = [&] { return ticket.fetch_add(1, std::memory_order_relaxed); };
    int mine = next(), first = 0;
    for (int begin = 0, end; begin < tokens; begin = end) {
        const int run = scratch.run_of[wanted[begin]];
        for (end = begin + 1; end < tokens && scratch.run_of[wanted[end]] == run;) ++end;
        const int rows = (end - begin) * group, tiles = (rows + most - 1) / most;
        for (; mine < first + tiles * kv_heads && going(self); mine = next()) {
            // The longest rows first, so that the last units are short ones.
            const int tile = tiles - 1 - (mine - first) / kv_heads, head = (mine - first) % kv_heads;
            if (placed_late) place(layer, run, wanted[begin], head);
            const float* q[kTileTokens];
            float* out[kTileTokens];
            int32_t limit[kTileTokens];
            AttentionTask task;
            task.rows = std::min(most, rows - tile * most);
            for (int r = 0; r < task.rows; ++r) {
                const int i = begin + (tile * most + r) / group, h = head * group + (tile * most + r) % group;
                q[r] = scratch.q.data + ((size_t)wanted[i] * heads + h) * d;
                out[r] = scratch.attended.data + ((size_t)i * heads + h) * d;
                limit[r] = batch.positions[wanted[i]] + 1;
            }
            task.q = q, task.out = out, task.limit = limit, task.scale = scale;
            task.kv = kv.at(layer, head), task.block_stride = kv.block_bytes();
            task.blocks = batch.blocks + batch.block_offsets[run];
            task.scratch = scratch.attention[self.thread].data;
            kernel.attention(kv.layout, task);
        }
        first += tiles * kv_heads;
    }
}

}  // namespace pronk
