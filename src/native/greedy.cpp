// Several tokens in one call, where nothing but the likeliest is wanted.
#include <algorithm>
#include <cmath>

#include "step.h"

namespace pronk {

namespace {

// The first of the largest; -1 where that is infinite, or where any is NaN. As numpy's argmax.
int32_t likeliest(const float* x, int count) {
    constexpr int kLanes = 16, kBlock = 512;
    float largest = -INFINITY;
    int at = 0;
    bool nan = false;
    for (int begin = 0; begin < count; begin += kBlock) {
        const int size = std::min(kBlock, count - begin), whole = size / kLanes * kLanes;
        float most[kLanes];
        int32_t nans[kLanes] = {};
        std::fill_n(most, kLanes, -INFINITY);
        for (int i = 0; i < whole; i += kLanes)
            for (int lane = 0; lane < kLanes; ++lane) {
                const float value = x[begin + i + lane];
                most[lane] = value > most[lane] ? value : most[lane];
                nans[lane] |= value != value;
            }
        for (int i = whole; i < size; ++i) {
            most[0] = x[begin + i] > most[0] ? x[begin + i] : most[0];
            nans[0] |= x[begin + i] != x[begin + i];
        }
        const float here = *std::max_element(most, most + kLanes);
        nan |= *std::max_element(nans, nans + kLanes) != 0;
        if (here > largest) largest = here, at = begin;
    }
    if (nan || !std::isfinite(largest)) return -1;
    return static_cast<int32_t>(std::find(x + at, x + count, largest) - x);
}

}  // namespace

int Model::greedy(const Batch& first, KV& kv, int most, const std::vector<int32_t>& stops, const std::function<bool()>& enough,
                  int32_t* tokens, const std::function<bool()>& interrupted) {
    const int rows = first.tokens;
    std::vector<float> logits(static_cast<size_t>(rows) * config.vocab_size);
    std::vector<int32_t> ids(first.token_ids, first.token_ids + rows), positions(first.positions, first.positions + rows);
    Batch batch = first;
    batch.token_ids = ids.data(), batch.positions = positions.data();
    for (int done = 0;;) {
        if (!forward(batch, kv, logits.data(), interrupted)) return 0;
        int32_t* drawn = tokens + static_cast<size_t>(done++) * rows;
        const auto draw = [&](int row, int) { drawn[row] = likeliest(&logits[static_cast<size_t>(row) * config.vocab_size], config.vocab_size); };
        if (rows == 1)
            draw(0, 1);
        else
            pool.run([&](int thread) {
                Place place{thread};
                pool.phases().share(place, rows, 1, draw);
            });
        bool ends = done == most || enough();
        for (int row = 0; row < rows; ++row) {
            ends |= drawn[row] < 0 || std::binary_search(stops.begin(), stops.end(), drawn[row]);
            ids[row] = drawn[row], ++positions[row];
        }
        if (ends) return done;
    }
}

}  // namespace pronk
