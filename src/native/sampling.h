// Tokens drawn from logits: what engine/sampling.py means, of many rows at once, and to the token the same.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "threads.h"

namespace pronk {

// The filters there are, in their order: see engine/filters.py.
inline constexpr const char* kFilters[] = {"top_k", "top_p", "min_p"};

// What is asked of one row: see engine/params.py. Tokens were checked to be of the vocabulary.
struct Wish {
    size_t row = 0;         // of the logits
    float temperature = 0;  // 0 is greedy
    int64_t top_k = 0;      // 0 is off
    double top_p = 1, min_p = 0;
    float repetition_penalty = 1;
    double presence_penalty = 0, frequency_penalty = 0;
    bool as_llama2c = false;  // its draw, which runs top_p itself
    int logprobs = -1;        // so many of the likeliest; -1: none, nor of the token drawn
    double coin = 0;          // in [0, 1)
    std::vector<int32_t> bias_tokens;  // no token twice
    std::vector<float> biases;
    std::vector<int32_t> history;  // prompt and generated tokens, where penalties ask for them
    size_t prompt_tokens = 0;      // of these, or more
    const uint8_t* allowed = nullptr;  // [V], 0 for what may not be drawn; null: all may
};

struct Drawn {
    int32_t token = -1;  // -1: the logits are not numbers
    // Of the model's logits, where logprobs were asked for: the largest, the sum of all weights, and the likeliest tokens.
    float largest = 0;
    int64_t weight = 0;
    std::vector<int32_t> top;
};

class Sampler {
public:
    explicit Sampler(const Kernels& kernel) : kernel_(kernel) {}

    // One token for each wish, from logits [rows][V]. On this thread, or the pool's: rows know nothing of each other. Throws
    // std::bad_alloc before anything is drawn.
    std::vector<Drawn> draw(const float* logits, int vocab_size, const std::vector<Wish>& wishes, ThreadPool& pool);

private:
    struct Candidate {
        float score;
        int32_t token;
    };
    // What one thread needs for a row, all of it allocated before any row is begun.
    struct Scratch {
        std::vector<float> scores, exponentials;  // [V]
        std::vector<int64_t> sums;                // of blocks of exponentials
        std::vector<int32_t> counts;              // [V], zero between rows
        std::vector<int32_t> places;              // [V + 1]
        std::vector<Candidate> candidates, edge;  // room for V
        void reserve(int vocab_size);
    };
    struct Row;

    const Kernels& kernel_;
    std::vector<Scratch> scratch_;
};

}  // namespace pronk
