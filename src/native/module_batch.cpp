#include "module_batch.h"

#include <algorithm>

namespace pronk {

namespace {

constexpr int kMostTokens = 1 << 24;

void check_offsets(const char* what, const std::vector<int32_t>& offsets, int64_t end, int32_t least) {
    if (offsets.size() < 2 || offsets.front() != 0 || offsets.back() != end)
        refuse(what, " must begin with 0 and end with ", end);
    for (size_t i = 1; i < offsets.size(); ++i)
        if (offsets[i] < offsets[i - 1] || offsets[i] - offsets[i - 1] < least) refuse(what, " must ascend");
}

void check_run(const BatchArrays& batch, size_t n, const Model& model, const PyKV& kv, std::vector<bool>& written) {
    const auto& [token_ids, positions, offsets, blocks, block_offsets, logits_rows, adapters] = batch;
    const int32_t begin = offsets[n], end = offsets[n + 1], start = positions[begin];
    const int32_t* table = blocks.data() + block_offsets[n];
    const int64_t last = static_cast<int64_t>(start) + end - begin - 1, have = block_offsets[n + 1] - block_offsets[n];
    if (start < 0 || last >= model.rope_positions)
        refuse("run ", n, ": positions ", start, " to ", last, " are not within ", model.rope_positions);
    for (int32_t i = begin; i < end; ++i)
        if (positions[i] != start + i - begin) refuse("run ", n, ": positions must be consecutive");
    if (last / kKVBlock >= have)
        refuse("run ", n, ": ", last + 1, " positions do not fit in ", have, " blocks of ", kKVBlock);
    for (int64_t i = 0; i <= last / kKVBlock; ++i)
        if (table[i] < 0 || table[i] >= kv.kv.num_blocks())
            refuse("run ", n, ": there is no block ", table[i], " among ", kv.kv.num_blocks());
    for (int64_t i = start / kKVBlock; i <= last / kKVBlock; ++i) {
        if (written[table[i]]) refuse("block ", table[i], " is written twice in one batch");
        written[table[i]] = true;
    }
    if (kv.layers != static_cast<int>(model.layers.size()) && start != 0)
        refuse("run ", n, ": keys of one layer remember nothing; a run must start at position 0, not ", start);
}

}  // namespace

void check(const BatchArrays& batch, const Model& model, const PyKV& kv) {
    const auto& [token_ids, positions, offsets, blocks, block_offsets, logits_rows, adapters] = batch;
    const int64_t tokens = token_ids.size();
    check_range("the number of tokens", tokens, 1, std::min(kMostTokens, INT32_MAX / model.config.num_attention_heads));
    if (positions.size() != token_ids.size())
        refuse("there are ", positions.size(), " positions for ", tokens, " tokens");
    check_offsets("offsets", offsets, tokens, 1);
    check_offsets("block_offsets", block_offsets, blocks.size(), 0);
    if (block_offsets.size() != offsets.size())
        refuse("there are ", block_offsets.size() - 1, " block tables for ", offsets.size() - 1, " runs");
    for (const int32_t id : token_ids)
        if (id < 0 || id >= model.config.vocab_size)
            refuse("token id ", id, " is not in a vocabulary of ", model.config.vocab_size);
    if (!adapters.empty() && adapters.size() + 1 != offsets.size())
        refuse("there are ", adapters.size(), " adapters for ", offsets.size() - 1, " runs");
    for (const int32_t adapter : adapters)
        if (adapter < -1 || adapter >= static_cast<int64_t>(model.adapters.size()) || (adapter >= 0 && !model.adapters[adapter]))
            refuse("there is no adapter ", adapter);
    for (size_t i = 0; i < logits_rows.size(); ++i)
        if (logits_rows[i] < (i ? logits_rows[i - 1] + 1 : 0) || logits_rows[i] >= tokens)
            refuse("logits_rows must ascend within ", tokens, " tokens; row ", i, " is ", logits_rows[i]);
    std::vector<bool> written(kv.kv.num_blocks());
    for (size_t n = 0; n + 1 < offsets.size(); ++n) check_run(batch, n, model, kv, written);
    for (size_t n = 0; n + 1 < offsets.size(); ++n)
        for (int32_t i = 0; i < positions[offsets[n]] / kKVBlock; ++i)
            if (const int32_t block = blocks[block_offsets[n] + i]; written[block])
                refuse("block ", block, " is written by one run and read by another");
}

}  // namespace pronk
