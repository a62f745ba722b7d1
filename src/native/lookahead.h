// The pass that most likely comes next: every run goes on with its likeliest token. While Python hands out a token and a
// reader reads it, the memory would be idle; instead the threads begin this pass, and who asks for it joins them. It is the
// very pass that would be run then, so no bit depends on what is expected. One that nobody asks for is given up.
#pragma once

#include <optional>

#include "step.h"

namespace pronk {

struct Model::Lookahead {
    // Whether the pass after a batch can be foreseen.
    static bool possible(const Batch& batch, const ThreadPool& pool);

    // After `last`, whose likeliest tokens these are: one a run, -1 where it has none. Nothing may be foreseen.
    void foresee(const Batch& last, KV& of, const std::vector<int32_t>& likeliest, int positions);
    bool is(const Batch& batch, const KV& of) const;

    // Throws std::bad_alloc.
    void begin(Model& model);
    // Whether it was finished, and did not have to be given up; nothing where it was not under way.
    std::optional<bool> finish(Model& model, const std::function<bool()>& interrupted);

    BatchArrays arrays;
    Batch batch{};
    KV* kv = nullptr;  // none: nothing is foreseen
    Logits logits;

private:
    const Taps taps_{};
    std::function<bool()> interrupted_;
    std::unique_ptr<Step> step_;
};

}  // namespace pronk
