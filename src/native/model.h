// One forward pass of LLaMA over a ragged batch: the same steps under the same names as torch_engine/model.py.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "arena.h"
#include "kernels.h"
#include "threads.h"

namespace pronk {

struct Config {
    int vocab_size, hidden_size, intermediate_size, num_hidden_layers;
    int num_attention_heads, num_key_value_heads, head_dim;
    float rms_norm_eps;
};

struct Layer {
    const float* input_layernorm = nullptr;
    Matrix q_proj, k_proj, v_proj, o_proj;
    const float* post_attention_layernorm = nullptr;
    Matrix gate_up_proj;  // 32 gate rows beside 32 up rows
    Matrix down_proj;
};

// Keys and values: [block][layer][K heads](keys, values), one allocation that grows.
class KV {
public:
    KV(const Config& config, int layers, KVType type, int64_t num_blocks);
    void resize(int64_t num_blocks);  // grow; throws std::bad_alloc, having changed nothing
    void copy(int64_t source, int64_t destination);

    const KVLayout layout;
    int64_t num_blocks() const { return num_blocks_; }
    size_t nbytes() const { return num_blocks_ * block_bytes_; }
    size_t block_bytes() const { return block_bytes_; }
    // In block 0. A KV of one layer serves a pass that remembers nothing: each layer in turn.
    uint8_t* at(int layer, int head);

private:
    const int layers_, heads_;
    const size_t head_bytes_, block_bytes_;
    int64_t num_blocks_ = 0;
    uint8_t* data_ = nullptr;
    Arena memory_;
};

// See engine/batch.py. Everything here was checked (module.cpp).
struct Batch {
    int tokens, runs, rows;
    const int32_t* token_ids;     // [T]
    const int32_t* positions;     // [T]
    const int32_t* offsets;       // [N + 1]
    const int32_t* blocks;        // block tables, one after the other
    const int32_t* block_offsets; // [N + 1] into `blocks`
    const int32_t* logits_rows;   // [R] ascending
};

// Where a pass leaves what its products are fed, as floats, for those that want to look: [layers][T][K]; head [T][C].
struct Taps {
    float *qkv = nullptr, *o = nullptr, *gate_up = nullptr, *down = nullptr, *head = nullptr;
};

class Model {
public:
    Model(const Config& config, int threads, const Kernels& kernel = kernels());

    const Config config;
    const Kernels& kernel;
    std::vector<Layer> layers;
    Matrix embed_tokens;
    Matrix lm_head;  // the same data where tied
    const float* norm = nullptr;
    const float* cos = nullptr;  // [positions][D/2]
    const float* sin = nullptr;
    int rope_positions = 0;
    OutlierRule outlier_rule;
    float embedding_noise = 0;  // see engine/backend.py, perturbed()

    Arena weights;
    ThreadPool pool;

    // Logits [R][V]. `interrupted` is asked now and then, on the calling thread; where it says so, the pass is given up
    // and false returned. Throws std::bad_alloc before anything is computed.
    bool forward(const Batch& batch, KV& kv, float* logits, const std::function<bool()>& interrupted);

    // The likeliest token of each run, all of one token, then the one after it, and so on: tokens [S][N], -1 where logits are
    // no numbers. There are `most` rows at most, and none after a -1, one of the `stops` (ascending), or a row that is
    // `enough`. Gives how many; 0 where it was interrupted. Throws std::bad_alloc.
    int greedy(const Batch& first, KV& kv, int most, const std::vector<int32_t>& stops, const std::function<bool()>& enough,
               int32_t* tokens, const std::function<bool()>& interrupted);

    // The same pass, but for logits: all rows of the batch must want them, and none are made.
    bool tap(const Batch& batch, KV& kv, const Taps& taps, const std::function<bool()>& interrupted);

private:
    struct Scratch;
    struct Step;
    bool pass(const Batch& batch, KV& kv, float* logits, const Taps& taps, const std::function<bool()>& interrupted);
    std::shared_ptr<Scratch> scratch_;
};

}  // namespace pronk
