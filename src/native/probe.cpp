// Of a step: what is copied, and computed besides, where somebody looks. Its phases are there for a probe alone.
#include "probe.h"

#include <cstring>

#include "step.h"

namespace pronk {

// The residual stream as it stands before `layer`; after the last one it has but the row that wants logits.
void Model::Step::keep_hidden(Worker& worker, size_t layer) {
    const size_t c = config.hidden_size, row = layer < model.layers.size() ? batch.logits_rows[0] : 0;
    parallel_for(worker, 1, 1, [&](int, int) {
        std::memcpy(probe->hidden + layer * c, scratch.x.data + row * c, c * sizeof(float));
    });
}

// What the model would have said after each layer.
void Model::Step::look_through_head(Worker& worker) {
    const int rows = static_cast<int>(model.layers.size()) + 1;
    if (probe->lens) linear(worker, {probe->hidden, config.hidden_size, model.norm}, bind_head(probe->lens, rows, nullptr));
}

}  // namespace pronk
