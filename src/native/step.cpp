#include "step.h"

#include <cstring>

namespace pronk {

namespace {

// Tokens that one thread multiplies before it asks for the next panel: their activations stay in its second-level cache.
constexpr int kTokenBlock = 264;

// A batch this small is bound by reading weights: each thread reads from a stretch of its own, in long runs.
constexpr int kFewTokens = 24;

// Of the weights that come next, what a thread asks for while it waits for the others: no more than its own cache keeps.
constexpr size_t kAskedFor = 128 << 10;

}  // namespace

void Model::Step::run(int thread) {
    Worker worker{thread};
    const Input attended{scratch.attended.data, config.num_attention_heads * config.head_dim};
    const Input h{scratch.h.data, config.intermediate_size};

    embed(worker);
    for (size_t index = 0; index < model.layers.size(); ++index) {
        const Layer& layer = model.layers[index];
        const Linears linears = bind(index);
        const bool last = index + 1 == model.layers.size();
        if (probe) keep_hidden(worker, index);
        linear(worker, norm(layer.input_layernorm), linears.qkv);
        if (!stores_late) rotate_and_store(worker, index);
        if (last && batch.rows == 0) return;
        attend(worker, index, last);
        linear(worker, attended, linears.o);
        linear(worker, norm(layer.post_attention_layernorm), linears.gate_up);
        linear(worker, h, linears.down);
    }
    if (probe) return keep_hidden(worker, model.layers.size()), look_through_head(worker);
    linear(worker, norm(model.norm), bind_head(logits, batch.rows, taps.head));
    find_likeliest(worker);
}

// Of the last layer nobody reads more than the rows that want logits.
Linears Model::Step::bind(size_t index) const {
    const Layer& layer = model.layers[index];
    const bool last = index + 1 == model.layers.size();
    const int c = config.hidden_size, f = config.intermediate_size;
    const int q = config.num_attention_heads * config.head_dim, kvs = config.num_key_value_heads * config.head_dim;
    const int tokens = last ? batch.rows : batch.tokens;
    const auto tap = [&](float* all, int cols) { return all ? all + index * batch.tokens * cols : nullptr; };
    const int32_t* all = batch.adapters ? scratch.token_adapters.data() : nullptr;
    const int32_t* wanted = last && all ? scratch.row_adapters.data() : all;
    const auto product = [&](int number, const Matrix& matrix, float* out, Epilogue epilogue, int cols) {
        const Adapted adapted{scratch.low_ranks.data(), static_cast<int>(index) * kProducts + number,
                              number < 3 ? all : wanted};
        return Product{&matrix, {out, static_cast<size_t>(cols), epilogue, cols, adapted}};
    };
    std::array<const Matrix*, 3> next{&model.lm_head};
    if (!last) {
        const Layer& following = model.layers[index + 1];
        next = {&following.q_proj, &following.k_proj, &following.v_proj};
    }
    const int firsts = static_cast<int>(index) * kFirsts;
    return {
        .qkv = {{product(0, layer.q_proj, scratch.q.data, Epilogue::store, q),
                 product(1, layer.k_proj, scratch.k.data, Epilogue::store, kvs),
                 product(2, layer.v_proj, scratch.v.data, Epilogue::store, kvs)},
                3, batch.tokens, tap(taps.qkv, c), {&layer.o_proj}, all, firsts},
        .o = {{product(3, layer.o_proj, scratch.x.data, Epilogue::add, c)}, 1, tokens, tap(taps.o, q), {&layer.gate_up_proj},
              wanted, firsts + 1},
        .gate_up = {{product(4, layer.gate_up_proj, scratch.h.data, Epilogue::swiglu, f)}, 1, tokens, tap(taps.gate_up, c),
                    {&layer.down_proj}, wanted, firsts + 2},
        .down = {{product(5, layer.down_proj, scratch.x.data, Epilogue::add, c)}, 1, tokens, tap(taps.down, f), next, wanted,
                 firsts + 3},
    };
}

// What rounding takes from the head's activations goes straight into the logits (a fifth of q8's divergence came from
// there), and few rows want any: they are multiplied in two parts, the second being what rounding left of the first.
Linear Model::Step::bind_head(float* out, int rows, float* tap) const {
    const bool exact = traits(traits(model.lm_head.format).activations).exact();
    const Output output{out, static_cast<size_t>(config.vocab_size), exact ? Epilogue::store : Epilogue::pairs, config.vocab_size};
    return {{Product{&model.lm_head, output}}, out ? 1 : 0, rows, tap, {}};
}

void Model::Step::embed(Worker& worker) {
    const int c = config.hidden_size;
    parallel_for(worker, batch.tokens, 1, [&](int t, int) {
        float* row = scratch.x.data + (size_t)t * c;
        unpack_row(model.embed_tokens, batch.token_ids[t], row);
        if (batch.embedding_noise == 0) return;
        uint64_t state = 0x9e3779b97f4a7c15u * (uint64_t)(batch.token_ids[t] + 1);
        for (int i = 0; i < c; ++i) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            row[i] *= 1 + (state >> 63 ? batch.embedding_noise : -batch.embedding_noise);
        }
    });
}

void Model::Step::linear(Worker& worker, const Input& input, const Linear& linear) {
    const int cols = input.cols, count = linear.count, parts = linear.epilogue() == Epilogue::pairs ? 2 : 1;
    float* buffer = scratch.normed[worker.thread].data;
    // Then each thread converts the row for itself: sooner done than waited for.
    const bool alone = linear.tokens == 1 && !linear.tap;
    RowsBuffer* buffers = alone ? scratch.own[worker.thread].get() : scratch.shared;
    Rows rows[kActivationFormats];
    bool wanted[kActivationFormats] = {};
    int halves = 0;
    for (int i = 0; i < count; ++i) {
        const Matrix& m = *linear.products[i].matrix;
        const ActivationFormat format = traits(m.format).activations;
        const int index = static_cast<int>(format);
        halves += 2 * m.panels;
        if (wanted[index]) continue;
        wanted[index] = true, rows[index] = buffers[index].rows(format, cols, model.outlier_rule);
        if (alone) continue;
        if (linear.tokens * parts < kLeastNarrow) rows[index].narrow = nullptr;
        // All threads fill the same rows; each makes what goes there in memory of its own.
        const Rows mine = scratch.own[worker.thread][index].rows(format, cols, model.outlier_rule);
        rows[index].turned = mine.turned;
        if (!traits(format).outliers) continue;
        rows[index].outliers_used = &scratch.outliers_used[worker.linears++];
        rows[index].found_x = mine.found_x, rows[index].found_k = mine.found_k;
    }
    float* u = alone ? scratch.own_u[worker.thread].data : scratch.u.data;
    const auto prepare = [&](int t) {
        const float* x = input.x + static_cast<size_t>(t) * cols;
        if (input.norm) kernel.rmsnorm(x, input.norm, config.rms_norm_eps, cols, buffer), x = buffer;
        if (linear.tap) std::memcpy(linear.tap + static_cast<size_t>(t) * cols, x, cols * sizeof(float));
        for (int format = 0; format < kActivationFormats; ++format)
            if (wanted[format]) {
                kernel.convert(x, cols, rows[format], t * parts);
                if (parts == 1) continue;
                rest_of(rows[format], t * parts, x, cols, buffer);
                kernel.convert(buffer, cols, rows[format], t * parts + 1);
            }
    };
    if (!alone)
        parallel_for(worker, linear.tokens, linear.adapters ? 2 * kTileTokens : 4, [&](int begin, int end) {
            for (int t = begin; t < end; ++t) prepare(t);
            first_factors(linear, rows, begin, end, u);
        });

    const int tokens = linear.tokens * parts;

    // Half panels are numbered through all the matrices.
    const auto range = [&](int begin, int end, int token, int few) {
        for (int i = 0; i < count && begin < end; ++i) {
            const Matrix& m = *linear.products[i].matrix;
            const int own = 2 * m.panels, stop = std::min(end, own);
            if (begin < stop) {
                Output out = linear.products[i].output;
                out.adapted.u = u, out.adapted.stride = scratch.ranks;
                kernel.matmul(m, rows[static_cast<int>(traits(m.format).activations)].at(token), few, begin, stop,
                              out.at(token / parts));
            }
            begin = std::max(0, begin - own), end -= own;
        }
    };
    if (tokens <= kFewTokens) {
        // SwiGLU needs a whole panel. In pieces of about a megabyte, so that a wish to stop is heard in time.
        const int unit = linear.epilogue() == Epilogue::swiglu ? 2 : 1;
        const int most = std::max<int>(1, (1 << 21) / linear.products[0].matrix->panel_bytes / unit);
        prefetch(worker, linear.next);
        bool ready = !alone;
        parallel_for(worker, halves / unit, most, [&](int begin, int end) {
            // Only now: a thread that comes late must not read what others have written.
            if (!ready) prepare(0), first_factors(linear, rows, 0, 1, u), ready = true;
            range(begin * unit, end * unit, 0, tokens);
        });
        return;
    }
    const int panels = halves / 2, blocks = (tokens + kTokenBlock - 1) / kTokenBlock;
    const int tile = kernel.tile_tokens, block = (tokens + blocks * tile - 1) / (blocks * tile) * tile;  // of one size, so that the last is not of a few tokens
    parallel_for(worker, panels * blocks, 1, [&](int i, int) {
        const int token = i / panels * block, panel = i % panels;
        range(2 * panel, 2 * panel + 2, token, std::min(block, tokens - token));
    });
}

// Of rows [begin, end), which are ready: what adapters' first factors make of them, u [T][ranks].
void Model::Step::first_factors(const Linear& linear, const Rows* rows, int begin, int end, float* u) const {
    for (int t = begin, stop; linear.adapters && t < end; t = stop) {
        const int adapter = linear.adapters[t];
        for (stop = t + 1; stop < end && linear.adapters[stop] == adapter;) ++stop;
        if (adapter < 0) continue;
        const Adapter::First& first = model.adapters[adapter]->firsts[linear.first];
        if (first.scales.empty()) continue;
        float* out = u + t * scratch.ranks;
        const Rows& x = rows[static_cast<int>(traits(first.a.format).activations)];
        kernel.first_factor(first.a, x.at(t), stop - t, out, scratch.ranks);
        for (int i = t; i < stop; ++i, out += scratch.ranks) first.finish(out, kernel.rank_words);
    }
}

// A thread that waits asks for the first of its own stretch of what is multiplied next.
void Model::Step::prefetch(Worker& worker, const std::array<const Matrix*, 3>& next) const {
    if (batch.tokens > kFewTokens) return;
    int panels = 0;
    for (const Matrix* m : next) panels += m ? m->panels : 0;
    int begin = model.pool->phases().cut(2 * panels, worker.thread) / 2;
    for (const Matrix* m : next) {
        if (m && begin < m->panels) {
            const uint8_t* data = m->panel(begin);
            worker.next = {data, data + std::min(kAskedFor, (m->panels - begin) * m->panel_bytes)};
            return;
        }
        begin -= m ? m->panels : 0;
    }
}

void Model::Step::find_likeliest(Worker& worker) {
    parallel_for(worker, logits ? static_cast<int>(scratch.likeliest.size()) : 0, 1, [&](int row, int) {
        scratch.likeliest[row] = kernel.argmax(logits + static_cast<size_t>(row) * config.vocab_size, config.vocab_size);
    });
}

}  // namespace pronk
