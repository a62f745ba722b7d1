#include <algorithm>
#include <cstring>
#include <limits>
#include <new>

#include "model.h"

namespace pronk {

KVLayout kv_layout(KVType type, int head_dim) {
    const KVTraits& of = traits(type);
    if (of.group) {
        const size_t halves = (head_dim + 1) / 2, groups = (head_dim + of.group - 1) / of.group;
        const size_t padded = (head_dim + kPanelRows - 1) / kPanelRows * kPanelRows;
        const auto bytes = [](size_t rows) { return rows * kKVBlock + kKVBlock * sizeof(float); };
        return {type, head_dim, static_cast<int>(padded), bytes(halves + 2 * groups), bytes(padded / 2 + 2 * padded / of.group)};
    }
    const size_t dims = (head_dim + of.dims - 1) / of.dims * of.dims, scales = of.scales ? kKVBlock * sizeof(float) : 0;
    const size_t padded = (head_dim + kPanelRows - 1) / kPanelRows * kPanelRows;
    return {type, head_dim, static_cast<int>(padded), dims * kKVBlock * of.bytes + scales, padded * kKVBlock * of.bytes + scales};
}

size_t attention_scratch(int head_dim) {
    const size_t padded = kv_layout(KVType::f32, head_dim).padded_dim;
    return kTileTokens * (2 * kSpan + 3 * padded + padded / kSumsOf);
}

KV::KV(const Config& config, int layers, KVType type, int64_t num_blocks)
    : layout(kv_layout(type, config.head_dim)),
      layers_(layers),
      heads_(config.num_key_value_heads),
      head_bytes_(layout.keys_bytes + layout.values_bytes),
      block_bytes_(head_bytes_ * heads_ * layers) {
    resize(num_blocks);
}

void KV::resize(int64_t num_blocks) {
    quiesce();
    if (num_blocks <= num_blocks_) return;
    if (static_cast<size_t>(num_blocks) > std::numeric_limits<size_t>::max() / block_bytes_) throw std::bad_alloc();
    const size_t bytes = num_blocks * block_bytes_;
    if (bytes <= memory_.most()) memory_.grow(bytes);
    else move_to(Reserve(bytes), bytes);
    num_blocks_ = num_blocks;
}

int64_t KV::reserve(int64_t num_blocks) {
    quiesce();
    const size_t limit = std::numeric_limits<size_t>::max() / 4 / block_bytes_;
    for (size_t most = std::min(static_cast<size_t>(num_blocks), limit); most * block_bytes_ > memory_.most(); most /= 2) {
        Reserve larger;
        try {
            larger = Reserve(most * block_bytes_);
        } catch (const std::bad_alloc&) {
            continue;
        }
        move_to(std::move(larger), num_blocks_ * block_bytes_);
        break;
    }
    return std::min<int64_t>(num_blocks, memory_.most() / block_bytes_);
}

void KV::move_to(Reserve larger, size_t bytes) {
    larger.grow(bytes);
    if (num_blocks_) std::memcpy(larger.data(), data_, num_blocks_ * block_bytes_);
    memory_ = std::move(larger), data_ = memory_.data();
}

void KV::copy(int64_t source, int64_t destination) {
    quiesce();
    if (source != destination) std::memcpy(data_ + destination * block_bytes_, data_ + source * block_bytes_, block_bytes_);
}

void KV::quiesce() {
    if (const std::shared_ptr<ThreadPool> threads = threads_.lock()) threads->give_up(step_);
    threads_.reset();
}

bool KV::written_ahead() const {
    const std::shared_ptr<ThreadPool> threads = threads_.lock();
    return threads && threads->begun(step_);
}

uint8_t* KV::at(int layer, int head) { return data_ + ((size_t)(layer % layers_) * heads_ + head) * head_bytes_; }

}  // namespace pronk
