// A batch as Python hands it over, and the keys and values it is for: checked before kernels see them.
#pragma once

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

// ValueError where anything is not as the kernels take it.
void check(const BatchArrays& batch, const Model& model, const PyKV& kv);

}  // namespace pronk
