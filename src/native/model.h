// One forward pass of LLaMA over a ragged batch: the same steps under the same names as torch_engine/model.py.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "adapter.h"
#include "arena.h"
#include "reserve.h"
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

    std::array<const Matrix*, kProducts> products() const {  // in the order of adapter.h
        return {&q_proj, &k_proj, &v_proj, &o_proj, &gate_up_proj, &down_proj};
    }
};

// Keys and values: [block][layer][K heads](keys, values), one allocation that grows.
class KV {
public:
    KV(const Config& config, int layers, KVType type, int64_t num_blocks);
    ~KV() { quiesce(); }
    // Set aside addresses for so many blocks, or as many as the system has them for: up to there resize() moves nothing.
    // Gives how many that are. Throws std::bad_alloc, having changed nothing.
    int64_t reserve(int64_t num_blocks);
    void resize(int64_t num_blocks);  // grow; throws std::bad_alloc, having changed nothing
    void copy(int64_t source, int64_t destination);

    const KVLayout layout;
    int64_t num_blocks() const { return num_blocks_; }
    size_t nbytes() const { return num_blocks_ * block_bytes_; }
    size_t block_bytes() const { return block_bytes_; }
    bool remembers() const { return layers_ > 1; }  // false of a model's only layer too: it may be the one that all overwrite
    // In block 0. A KV of one layer serves a pass that remembers nothing: each layer in turn.
    uint8_t* at(int layer, int head);

    // A pass that was begun ahead on these threads writes here; quiesce() has it given up.
    void written_ahead_by(const std::shared_ptr<ThreadPool>& threads, uint64_t step) { threads_ = threads, step_ = step; }
    bool written_ahead() const;
    void quiesce();

private:
    std::weak_ptr<ThreadPool> threads_;
    uint64_t step_ = 0;
    const int layers_, heads_;
    const size_t head_bytes_, block_bytes_;
    void move_to(Reserve larger, size_t bytes);

    int64_t num_blocks_ = 0;
    uint8_t* data_ = nullptr;
    Reserve memory_;
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
    float embedding_noise = 0;    // see engine/backend.py, perturbed()
    const int32_t* adapters = nullptr;  // [N] indices into Model::adapters, -1: none; null: no run has any
};

// What a batch points to.
struct BatchArrays {
    std::vector<int32_t> token_ids, positions, offsets, blocks, block_offsets, logits_rows;
    std::vector<int32_t> adapters;  // [N], or none

    BatchArrays() = default;
    explicit BatchArrays(const Batch& batch);
    Batch view() const;
};

using Logits = std::unique_ptr<float[]>;  // [R][V]

// Where a pass leaves what its products are fed, as floats, for those that want to look: [layers][T][K]; head [T][C].
struct Taps {
    float *qkv = nullptr, *o = nullptr, *gate_up = nullptr, *down = nullptr, *head = nullptr;
};

struct Probe;

class Model {
public:
    Model(const Config& config, int threads, const Kernels& kernel = kernels());
    ~Model();

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
    std::vector<std::unique_ptr<const Adapter>> adapters;  // null: a place for another one

    Arena weights;
    const std::shared_ptr<ThreadPool> pool;

    // `interrupted` is asked now and then, on the calling thread; where it says so, the pass is given up, and there are no
    // logits. Throws std::bad_alloc before anything is computed.
    //
    // Leaves the other threads at the pass that most likely comes next (lookahead.h), which reads the model and writes into
    // `kv`, behind the last position of each run, until it or another one is asked for, or quiesce() gives it up.
    Logits forward(const Batch& batch, KV& kv, const std::function<bool()>& interrupted);

    // The same pass, but for logits, which are not made: what is fed to a layer's products is of all rows, and all must want
    // them; `head` alone is of those that do.
    bool tap(const Batch& batch, KV& kv, const Taps& taps, const std::function<bool()>& interrupted);

    // The same pass, of which one row wants logits, for what a probe shows of that row (probe.h); no logits are made.
    bool inspect(const Batch& batch, KV& kv, const Probe& probe, const std::function<bool()>& interrupted);

    // Before what passes read is changed. Gives up the pass that was begun ahead, if any.
    void quiesce() { pool->give_up(); }

private:
    struct Scratch;
    struct Step;
    struct Lookahead;
    void prepare(const Batch& batch, int head_rows = 0);
    bool pass(const Batch& batch, KV& kv, float* logits, const Taps& taps, const std::function<bool()>& interrupted,
              const Probe* probe = nullptr);
    const std::shared_ptr<Scratch> scratch_;
    const std::shared_ptr<Lookahead> lookahead_;
};

}  // namespace pronk
