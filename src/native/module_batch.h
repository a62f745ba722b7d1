// A batch as Python hands it over, and the keys and values it is for: copied, and checked before kernels see them.
#pragma once

#include <cstdint>
#include <vector>

#include "model.h"
#include "module.h"
#include "module_mutex.h"

namespace pronk {

struct PyKV {
    PyKV(const Config& config, int layers, KVType type, int64_t num_blocks)
        : layers(layers), heads(config.num_key_value_heads), kv(config, layers, type, num_blocks) {}

    const int layers, heads;
    KV kv;
    Mutex mutex;
};

// engine/batch.py's Batch, copied; block tables one after the other.
struct BatchArrays {
    std::vector<int32_t> token_ids, positions, offsets, blocks, block_offsets, logits_rows;

    Batch view() const {
        Batch batch;
        batch.tokens = static_cast<int>(token_ids.size());
        batch.runs = static_cast<int>(offsets.size()) - 1;
        batch.rows = static_cast<int>(logits_rows.size());
        batch.token_ids = token_ids.data(), batch.positions = positions.data(), batch.offsets = offsets.data();
        batch.blocks = blocks.data(), batch.block_offsets = block_offsets.data();
        batch.logits_rows = logits_rows.data();
        return batch;
    }

    // ValueError where anything is not as the kernels take it, in so many passes, each a position further.
    void check(const Model& model, const PyKV& kv, int passes = 1) const;

private:
    void check_run(size_t n, const Model& model, const PyKV& kv, std::vector<bool>& written) const;
};

}  // namespace pronk
