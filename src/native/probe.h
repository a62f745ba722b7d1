// What a pass shows of one token on its way through the layers, for who wants to look inside.
#pragma once

#include <cstddef>
#include <vector>

namespace pronk {

// Of the one row of a batch that wants logits. Nothing here changes a bit of what is computed.
struct Probe {
    float* hidden;            // [layers + 1][C]: the residual stream before each layer, and after the last
    float* lens;              // [layers + 1][V]: what norm and head make of each; or none
    float* scores;            // [shown][H][stride]: of the layers shown, before the softmax
    std::vector<int> shown;   // of each layer its place in `scores`, -1: it is not shown
    size_t stride;            // at least the token's position + 1

    // Of a layer and its query heads, or none.
    float* scores_of(int layer, int heads) const {
        return shown[layer] < 0 ? nullptr : scores + static_cast<size_t>(shown[layer]) * heads * stride;
    }
};

}  // namespace pronk
