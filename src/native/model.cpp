#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "rows.h"

namespace pronk {

namespace {

// Tokens that one thread multiplies before it asks for the next panel: their activations stay in its second-level cache.
constexpr int kTokenBlock = 252;

// A batch this small is bound by reading weights: each thread reads one stretch of them, agreed beforehand.
constexpr int kFewTokens = 24;

// Of the weights that come next, what a thread asks for while it waits for the others: no more than its own cache keeps.
constexpr size_t kAskedFor = 128 << 10;

struct Product {
    const Matrix* matrix;
    Output output;
};

}  // namespace

struct Model::Scratch {
    Buffer<float> x, q, k, v, attended, h;
    RowsBuffer shared[kForms];
    std::vector<std::unique_ptr<RowsBuffer[]>> own;  // of each thread, for batches of one token
    std::vector<Buffer<float>> attention, normed;    // of each thread
    std::vector<int32_t> attend_tokens, run_of;
    std::unique_ptr<std::atomic<int>[]> tickets;  // how far dynamic work has been handed out, one a phase
    size_t phases = 0;
};

// One step, seen by all threads.
struct Model::Step {
    Model& model;
    const Config& config;
    const Kernels& kernel;
    const Batch& batch;
    KV& kv;
    float* logits;  // none: only taps are wanted
    const Taps& taps;
    const std::function<bool()>& interrupted;
    Scratch& scratch;
    const int threads;
    // Runs of one token each, and of a head one tile: who attends has placed just before what only that tile needs.
    const bool placed_late = batch.runs == batch.tokens && batch.rows == batch.tokens &&
                             config.num_attention_heads / config.num_key_value_heads <= kernel.attention_rows;
    std::atomic<bool> abandoned{false};

    void run(int thread);

private:
    // What a thread knows while it runs.
    struct Self {
        int thread;
        size_t phase = 0;
        Ahead ahead{};
    };

    bool going(const Self& self) {
        if (self.thread == 0 && interrupted()) abandoned.store(true, std::memory_order_relaxed);
        return !abandoned.load(std::memory_order_relaxed);
    }
    void meet(Self& self) {
        if (threads > 1) model.pool.barrier().wait(self.ahead);
    }

    // Where a thread's stretch begins, for batches that are bound by reading weights.
    int cut(int units, int thread) const { return (int)((int64_t)units * thread / threads); }

    // body(i) for i in [0, count), each done by one thread; whoever is free takes the next.
    template <class Body>
    void share(Self& self, int count, const Body& body) {
        std::atomic<int>& ticket = scratch.tickets[self.phase++];
        for (int i; (i = ticket.fetch_add(1, std::memory_order_relaxed)) < count && going(self);) body(i);
    }

    void embed(Self& self);
    template <class Row>
    void multiply(Self& self, int tokens, int cols, const Row& row, const Product* products, int count, float* tap);
    void expect(Self& self, std::initializer_list<const Matrix*> next);
    void place(int layer, int run, int token, int head);
    void position(Self& self, int layer);
    void attend(Self& self, int layer, const int32_t* wanted, int tokens);
};

bool Model::forward(const Batch& batch, KV& kv, float* logits, const std::function<bool()>& interrupted) {
    return pass(batch, kv, logits, Taps{}, interrupted);
}

bool Model::tap(const Batch& batch, KV& kv, const Taps& taps, const std::function<bool()>& interrupted) {
    return pass(batch, kv, nullptr, taps, interrupted);
}

bool Model::pass(const Batch& batch, KV& kv, float* logits, const Taps& taps, const std::function<bool()>& interrupted) {
    if (!scratch_) scratch_ = std::make_shared<Scratch>();
    Scratch& s = *scratch_;
    const int t = batch.tokens, threads = pool.size();
    const int q = config.num_attention_heads * config.head_dim, kvs = config.num_key_value_heads * config.head_dim;
    const size_t c = config.hidden_size, f = config.intermediate_size;
    s.x.reserve(t * c), s.q.reserve((size_t)t * q), s.k.reserve((size_t)t * kvs), s.v.reserve((size_t)t * kvs);
    s.attended.reserve((size_t)t * q), s.h.reserve(t * f);
    const int widest = std::max({(int)c, (int)f, q});
    bool used[kForms] = {};
    used[(int)form_of(lm_head.format)] = true;
    for (const Layer& layer : layers)
        for (const Matrix* m : {&layer.q_proj, &layer.k_proj, &layer.v_proj, &layer.o_proj, &layer.gate_up_proj, &layer.down_proj})
            used[(int)form_of(m->format)] = true;
    s.own.resize(threads), s.attention.resize(threads), s.normed.resize(threads);
    for (int i = 0; i < threads; ++i) {
        if (!s.own[i]) s.own[i] = std::make_unique<RowsBuffer[]>(kForms);
        for (int form = 0; form < kForms; ++form)
            if (used[form]) s.own[i][form].reserve((Form)form, 2, widest);
        s.attention[i].reserve(attention_scratch(config.head_dim));
        s.normed[i].reserve(widest);
    }
    for (int form = 0; form < kForms; ++form)
        if (used[form]) s.shared[form].reserve((Form)form, std::max(t, 2 * batch.rows), widest);
    s.run_of.resize(t), s.attend_tokens.resize(t);
    for (int n = 0; n < batch.runs; ++n)
        for (int i = batch.offsets[n]; i < batch.offsets[n + 1]; ++i) s.run_of[i] = n, s.attend_tokens[i] = i;
    const size_t phases = layers.size() * 16 + 8;
    if (s.phases < phases) s.tickets = std::make_unique<std::atomic<int>[]>(phases), s.phases = phases;
    for (size_t i = 0; i < phases; ++i) s.tickets[i].store(0, std::memory_order_relaxed);

    Step step{*this, config, kernel, batch, kv, logits, taps, interrupted, s, threads};
    pool.run([&](int thread) { step.run(thread); });
    return !step.abandoned;
}

void Model::Step::run(int thread) {
    Self self{thread};
    const int c = config.hidden_size, f = config.intermediate_size;
    const int q = config.num_attention_heads * config.head_dim, kvs = config.num_key_value_heads * config.head_dim;
    float *x = scratch.x.data, *h = scratch.h.data;

    embed(self);
    meet(self);
    int tokens = batch.tokens;
    for (size_t index = 0; index < model.layers.size(); ++index) {
        const Layer& layer = model.layers[index];
        const bool last = index + 1 == model.layers.size();
        const auto tap = [&](float* all, int cols) { return all ? all + index * batch.tokens * cols : nullptr; };

        const auto input_norm = [&](int t, float* out) {
            kernel.rmsnorm(x + (size_t)t * c, layer.input_layernorm, config.rms_norm_eps, c, out);
            return out;
        };
        const Product qkv[] = {{&layer.q_proj, {scratch.q.data, (size_t)q, Then::store, q}},
                               {&layer.k_proj, {scratch.k.data, (size_t)kvs, Then::store, kvs}},
                               {&layer.v_proj, {scratch.v.data, (size_t)kvs, Then::store, kvs}}};
        multiply(self, tokens, c, input_norm, qkv, 3, tap(taps.qkv, c));
        expect(self, {&layer.o_proj});
        meet(self);
        if (!placed_late) {
            position(self, index);
            meet(self);
        }

        // Of the last layer nobody reads more than the rows that want logits.
        const int32_t* wanted = last ? batch.logits_rows : scratch.attend_tokens.data();
        if (last) tokens = batch.rows;
        if (tokens == 0) break;
        attend(self, index, wanted, tokens);
        if (last && thread == 0)  // rows ascend: none is overwritten before it is moved
            for (int t = 0; t < tokens; ++t)
                std::memmove(x + (size_t)t * c, x + (size_t)wanted[t] * c, c * sizeof(float));
        meet(self);
        const Product o{&layer.o_proj, {x, (size_t)c, Then::add, c}};
        multiply(self, tokens, q, [&](int t, float*) { return scratch.attended.data + (size_t)t * q; }, &o, 1,
                 tap(taps.o, q));
        expect(self, {&layer.gate_up_proj});
        meet(self);

        const auto mlp_norm = [&](int t, float* out) {
            kernel.rmsnorm(x + (size_t)t * c, layer.post_attention_layernorm, config.rms_norm_eps, c, out);
            return out;
        };
        const Product gate_up{&layer.gate_up_proj, {h, (size_t)f, Then::swiglu, f}};
        multiply(self, tokens, c, mlp_norm, &gate_up, 1, tap(taps.gate_up, c));
        expect(self, {&layer.down_proj});
        meet(self);
        const Product down{&layer.down_proj, {x, (size_t)c, Then::add, c}};
        multiply(self, tokens, f, [&](int t, float*) { return h + (size_t)t * f; }, &down, 1, tap(taps.down, f));
        if (last) {
            expect(self, {&model.lm_head});
        } else {
            const Layer& next = model.layers[index + 1];
            expect(self, {&next.q_proj, &next.k_proj, &next.v_proj});
        }
        meet(self);
    }
    if (tokens == 0) return;
    const auto norm = [&](int t, float* out) {
        kernel.rmsnorm(x + (size_t)t * c, model.norm, config.rms_norm_eps, c, out);
        return out;
    };
    // What rounding takes from the head's activations goes straight into the logits (a fifth of q8's divergence came from
    // there), and few rows want any: they are multiplied in two parts, the second being what rounding left of the first.
    const Then then = form_of(model.lm_head.format) == Form::f32 ? Then::store : Then::pairs;
    const Product head{&model.lm_head, {logits, (size_t)config.vocab_size, then, config.vocab_size}};
    multiply(self, tokens, c, norm, &head, logits ? 1 : 0, taps.head);
}

void Model::Step::embed(Self& self) {
    const int c = config.hidden_size;
    share(self, batch.tokens, [&](int t) {
        float* row = scratch.x.data + (size_t)t * c;
        unpack_row(model.embed_tokens, batch.token_ids[t], row);
        if (model.embedding_noise == 0) return;
        uint64_t state = 0x9e3779b97f4a7c15u * (uint64_t)(batch.token_ids[t] + 1);
        for (int i = 0; i < c; ++i) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            row[i] *= 1 + (state >> 63 ? model.embedding_noise : -model.embedding_noise);
        }
    });
}

// Products of several matrices with the same rows: row(t, buffer) gives `cols` floats, in `buffer` or elsewhere. They are
// copied to `tap` where there is one.
template <class Row>
void Model::Step::multiply(Self& self, int tokens, int cols, const Row& row, const Product* products, int count, float* tap) {
    const int parts = products[0].output.then == Then::pairs ? 2 : 1;
    float* buffer = scratch.normed[self.thread].data;
    RowsBuffer* buffers = tokens == 1 ? scratch.own[self.thread].get() : scratch.shared;
    Rows rows[kForms];
    bool wanted[kForms] = {};
    int halves = 0;
    for (int i = 0; i < count; ++i) {
        const Matrix& m = *products[i].matrix;
        const int form = (int)form_of(m.format);
        if (!wanted[form]) rows[form] = buffers[form].rows((Form)form, cols, model.outlier_rule);
        wanted[form] = true, halves += 2 * m.panels;
    }
    if (Rows& shared = rows[(int)Form::llm_int8]; tokens > 1 && wanted[(int)Form::llm_int8]) {
        // All threads fill one list; each chooses what goes there in memory of its own.
        const Rows mine = scratch.own[self.thread][(int)Form::llm_int8].rows(Form::llm_int8, cols, model.outlier_rule);
        shared.outliers_used = &scratch.tickets[self.phase++];
        shared.found_x = mine.found_x, shared.found_k = mine.found_k;
    }
    const auto prepare = [&](int t) {
        const float* x = row(t, buffer);
        if (tap && (tokens > 1 || self.thread == 0)) std::memcpy(tap + (size_t)t * cols, x, cols * sizeof(float));
        for (int form = 0; form < kForms; ++form)
            if (wanted[form]) {
                kernel.convert(x, cols, rows[form], t * parts);
                if (parts == 1) continue;
                rest_of(rows[form], t * parts, x, cols, buffer);
                kernel.convert(buffer, cols, rows[form], t * parts + 1);
            }
    };
    if (tokens == 1) {
        prepare(0);  // by each thread for itself: sooner done than waited for
    } else {
        constexpr int kRowsAtOnce = 4;
        share(self, (tokens + kRowsAtOnce - 1) / kRowsAtOnce, [&](int i) {
            for (int t = i * kRowsAtOnce; t < std::min(tokens, (i + 1) * kRowsAtOnce); ++t) prepare(t);
        });
        meet(self);
    }

    tokens *= parts;

    // Half panels are numbered through all the matrices.
    const auto range = [&](int begin, int end, int token, int few) {
        for (int i = 0; i < count && begin < end; ++i) {
            const Matrix& m = *products[i].matrix;
            const int own = 2 * m.panels, stop = std::min(end, own);
            if (begin < stop) {
                Output out = products[i].output;
                out.data += token / parts * out.stride;
                kernel.matmul(m, rows[(int)form_of(m.format)].at(token), few, begin, stop, out);
            }
            begin = std::max(0, begin - own), end -= own;
        }
    };
    if (tokens <= kFewTokens) {
        // SwiGLU needs a whole panel.
        const int unit = products[0].output.then == Then::swiglu ? 2 : 1, units = halves / unit;
        // In pieces of about a megabyte, so that a wish to stop is heard in time.
        const int end = cut(units, self.thread + 1) * unit;
        const int piece = std::max<int>(2, (1 << 21) / products[0].matrix->panel_bytes * 2);
        for (int begin = cut(units, self.thread) * unit; begin < end && going(self); begin += piece)
            range(begin, std::min(end, begin + piece), 0, tokens);
        return;
    }
    const int panels = halves / 2, blocks = (tokens + kTokenBlock - 1) / kTokenBlock;
    share(self, panels * blocks, [&](int i) {
        const int token = i / panels * kTokenBlock, panel = i % panels;
        range(2 * panel, 2 * panel + 2, token, std::min(kTokenBlock, tokens - token));
    });
}

// Which matrices are multiplied next, side by side: a thread that waits asks for the first of its own stretch of them.
void Model::Step::expect(Self& self, std::initializer_list<const Matrix*> next) {
    if (batch.tokens > kFewTokens) return;
    int panels = 0;
    for (const Matrix* m : next) panels += m->panels;
    int begin = cut(2 * panels, self.thread) / 2;
    for (const Matrix* m : next) {
        if (begin < m->panels) {
            const uint8_t* data = m->panel(begin);
            self.ahead = {data, data + std::min(kAskedFor, (m->panels - begin) * m->panel_bytes)};
            return;
        }
        begin -= m->panels;
    }
}

// Rotates one token's queries and key of a head, and stores its key and value.
void Model::Step::place(int layer, int run, int token, int head) {
    const int d = config.head_dim, heads = config.num_attention_heads, kv_heads = config.num_key_value_heads;
    const int group = heads / kv_heads, p = batch.positions[token];
    const float *cos = model.cos + (size_t)p * (d / 2), *sin = model.sin + (size_t)p * (d / 2);
    float* key = scratch.k.data + ((size_t)token * kv_heads + head) * d;
    const float* value = scratch.v.data + ((size_t)token * kv_heads + head) * d;
    const int32_t block = batch.blocks[batch.block_offsets[run] + p / kKVBlock];
    kernel.rope(scratch.q.data + ((size_t)token * heads + (size_t)head * group) * d, group, d, cos, sin);
    kernel.rope(key, 1, d, cos, sin);
    kernel.store_kv(kv.layout, kv.at(layer, head) + block * kv.block_bytes(), p % kKVBlock, key, value);
}

// A unit is one head of the tokens of one run in one block.
void Model::Step::position(Self& self, int layer) {
    const int kv_heads = config.num_key_value_heads;
    int first = 0;  // block of the batch, numbered through its runs
    std::atomic<int>& ticket = scratch.tickets[self.phase++];
    const auto next = [&] { return ticket.fetch_add(1, std::memory_order_relaxed); };
    int mine = next();
    for (int n = 0; n < batch.runs; ++n) {
        const int begin = batch.offsets[n], end = batch.offsets[n + 1], start = batch.positions[begin];
        const int from = start / kKVBlock, to = (start + end - begin - 1) / kKVBlock + 1;
        for (; mine < (first + to - from) * kv_heads && going(self); mine = next()) {
            const int block = from + mine / kv_heads - first, head = mine % kv_heads;
            for (int p = std::max(start, block * kKVBlock); p < std::min(start + end - begin, (block + 1) * kKVBlock); ++p)
                place(layer, n, begin + p - start, head);
        }
        first += to - from;
    }
}

// A unit is a few query rows that share a key head; rows of a run go token by token, heads within.
void Model::Step::attend(Self& self, int layer, const int32_t* wanted, int tokens) {
    const int d = config.head_dim, heads = config.num_attention_heads, kv_heads = config.num_key_value_heads;
    const int group = heads / kv_heads, most = kernel.attention_rows;
    const float scale = 1 / std::sqrt((float)d);
    std::atomic<int>& ticket = scratch.tickets[self.phase++];
    const auto next = [&] { return ticket.fetch_add(1, std::memory_order_relaxed); };
    int mine = next(), first = 0;
    for (int begin = 0, end; begin < tokens; begin = end) {
        const int run = scratch.run_of[wanted[begin]];
        for (end = begin + 1; end < tokens && scratch.run_of[wanted[end]] == run;) ++end;
        const int rows = (end - begin) * group, tiles = (rows + most - 1) / most;
        for (; mine < first + tiles * kv_heads && going(self); mine = next()) {
            // The longest rows first, so that the last units are short ones.
            const int tile = tiles - 1 - (mine - first) / kv_heads, head = (mine - first) % kv_heads;
            if (placed_late) place(layer, run, wanted[begin], head);
            const float* q[kTileTokens];
            float* out[kTileTokens];
            int32_t limit[kTileTokens];
            AttentionTask task;
            task.rows = std::min(most, rows - tile * most);
            for (int r = 0; r < task.rows; ++r) {
                const int i = begin + (tile * most + r) / group, h = head * group + (tile * most + r) % group;
                q[r] = scratch.q.data + ((size_t)wanted[i] * heads + h) * d;
                out[r] = scratch.attended.data + ((size_t)i * heads + h) * d;
                limit[r] = batch.positions[wanted[i]] + 1;
            }
            task.q = q, task.out = out, task.limit = limit, task.scale = scale;
            task.kv = kv.at(layer, head), task.block_stride = kv.block_bytes();
            task.blocks = batch.blocks + batch.block_offsets[run];
            task.scratch = scratch.attention[self.thread].data;
            kernel.attention(kv.layout, task);
        }
        first += tiles * kv_heads;
    }
}

Model::Model(const Config& config, int threads, const Kernels& kernel)
    : config(config), kernel(kernel), layers(config.num_hidden_layers), pool(threads) {}

}  // namespace pronk
