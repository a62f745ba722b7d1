#include "step.h"

#include <cstring>

namespace pronk {

namespace {

// Tokens that one thread multiplies before it asks for the next panel: their activations stay in its second-level cache.
constexpr int kTokenBlock = 252;

// A batch this small is bound by reading weights: each thread reads from a stretch of its own, in long runs.
constexpr int kFewTokens = 24;

// Of the weights that come next, what a thread asks for while it waits for the others: no more than its own cache keeps.
constexpr size_t kAskedFor = 128 << 10;

}  // namespace

void Model::Step::run(int thread) {
    Self self{thread};
    const int c = config.hidden_size, f = config.intermediate_size;
    const int q = config.num_attention_heads * config.head_dim, kvs = config.num_key_value_heads * config.head_dim;
    float *x = scratch.x.data, *h = scratch.h.data;

    embed(self);
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
        multiply(self, tokens, c, input_norm, qkv, 3, tap(taps.qkv, c), {&layer.o_proj});
        if (!placed_late) position(self, index);

        // Of the last layer nobody reads more than the rows that want logits.
        if (last) tokens = batch.rows;
        if (tokens == 0) return;
        attend(self, index, last);
        const Product o{&layer.o_proj, {x, (size_t)c, Then::add, c}};
        multiply(self, tokens, q, [&](int t, float*) { return scratch.attended.data + (size_t)t * q; }, &o, 1,
                 tap(taps.o, q), {&layer.gate_up_proj});

        const auto mlp_norm = [&](int t, float* out) {
            kernel.rmsnorm(x + (size_t)t * c, layer.post_attention_layernorm, config.rms_norm_eps, c, out);
            return out;
        };
        const Product gate_up{&layer.gate_up_proj, {h, (size_t)f, Then::swiglu, f}};
        multiply(self, tokens, c, mlp_norm, &gate_up, 1, tap(taps.gate_up, c), {&layer.down_proj});
        const Product down{&layer.down_proj, {x, (size_t)c, Then::add, c}};
        const Layer& next = model.layers[last ? index : index + 1];
        const std::initializer_list<const Matrix*> head = {&model.lm_head}, following = {&next.q_proj, &next.k_proj, &next.v_proj};
        multiply(self, tokens, f, [&](int t, float*) { return h + (size_t)t * f; }, &down, 1, tap(taps.down, f),
                 last ? head : following);
    }
    const auto norm = [&](int t, float* out) {
        kernel.rmsnorm(x + (size_t)t * c, model.norm, config.rms_norm_eps, c, out);
        return out;
    };
    // What rounding takes from the head's activations goes straight into the logits (a fifth of q8's divergence came from
    // there), and few rows want any: they are multiplied in two parts, the second being what rounding left of the first.
    const Then then = form_of(model.lm_head.format) == Form::f32 ? Then::store : Then::pairs;
    const Product head{&model.lm_head, {logits, (size_t)config.vocab_size, then, config.vocab_size}};
    multiply(self, tokens, c, norm, &head, logits ? 1 : 0, taps.head, {});
    share(self, logits ? static_cast<int>(scratch.likeliest.size()) : 0, 1, [&](int row, int) {
        scratch.likeliest[row] = kernel.argmax(logits + (size_t)row * config.vocab_size, config.vocab_size);
    });
}

void Model::Step::embed(Self& self) {
    const int c = config.hidden_size;
    share(self, batch.tokens, 1, [&](int t, int) {
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

// Products of several matrices with the same rows: row(t, buffer) gives `cols` floats, in `buffer` or elsewhere. They are
// copied to `tap` where there is one.
template <class Row>
void Model::Step::multiply(Self& self, int tokens, int cols, const Row& row, const Product* products, int count, float* tap,
                           std::initializer_list<const Matrix*> next) {
    const int parts = products[0].output.then == Then::pairs ? 2 : 1;
    float* buffer = scratch.normed[self.thread].data;
    const bool alone = tokens == 1 && !tap;  // then each thread converts the row for itself: sooner done than waited for
    RowsBuffer* buffers = alone ? scratch.own[self.thread].get() : scratch.shared;
    Rows rows[kForms];
    bool wanted[kForms] = {};
    int halves = 0;
    for (int i = 0; i < count; ++i) {
        const Matrix& m = *products[i].matrix;
        const int form = (int)form_of(m.format);
        if (!wanted[form]) rows[form] = buffers[form].rows((Form)form, cols, model.outlier_rule);
        wanted[form] = true, halves += 2 * m.panels;
    }
    if (Rows& shared = rows[(int)Form::llm_int8]; !alone && wanted[(int)Form::llm_int8]) {
        // All threads fill one list; each chooses what goes there in memory of its own.
        const Rows mine = scratch.own[self.thread][(int)Form::llm_int8].rows(Form::llm_int8, cols, model.outlier_rule);
        shared.outliers_used = &scratch.outliers_used[self.products++];
        shared.found_x = mine.found_x, shared.found_k = mine.found_k;
    }
    const auto prepare = [&](int t) {
        const float* x = row(t, buffer);
        if (tap) std::memcpy(tap + (size_t)t * cols, x, cols * sizeof(float));
        for (int form = 0; form < kForms; ++form)
            if (wanted[form]) {
                kernel.convert(x, cols, rows[form], t * parts);
                if (parts == 1) continue;
                rest_of(rows[form], t * parts, x, cols, buffer);
                kernel.convert(buffer, cols, rows[form], t * parts + 1);
            }
    };
    if (!alone)
        share(self, tokens, 4, [&](int begin, int end) {
            for (int t = begin; t < end; ++t) prepare(t);
        });

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
        // SwiGLU needs a whole panel. In pieces of about a megabyte, so that a wish to stop is heard in time.
        const int unit = products[0].output.then == Then::swiglu ? 2 : 1;
        const int most = std::max<int>(1, (1 << 21) / products[0].matrix->panel_bytes / unit);
        expect(self, next);
        bool ready = !alone;
        share(self, halves / unit, most, [&](int begin, int end) {
            if (!ready) prepare(0), ready = true;  // only now: a thread that comes late must not read what others have written
            range(begin * unit, end * unit, 0, tokens);
        });
        return;
    }
    const int panels = halves / 2, blocks = (tokens + kTokenBlock - 1) / kTokenBlock;
    share(self, panels * blocks, 1, [&](int i, int) {
        const int token = i / panels * kTokenBlock, panel = i % panels;
        range(2 * panel, 2 * panel + 2, token, std::min(kTokenBlock, tokens - token));
    });
}

// Which matrices are multiplied next, side by side: a thread that waits asks for the first of its own stretch of them.
void Model::Step::expect(Self& self, std::initializer_list<const Matrix*> next) {
    if (batch.tokens > kFewTokens) return;
    int panels = 0;
    for (const Matrix* m : next) panels += m->panels;
    int begin = model.pool->phases().cut(2 * panels, self.thread) / 2;
    for (const Matrix* m : next) {
        if (begin < m->panels) {
            const uint8_t* data = m->panel(begin);
            self.ahead = {data, data + std::min(kAskedFor, (m->panels - begin) * m->panel_bytes)};
            return;
        }
        begin -= m->panels;
    }
}

}  // namespace pronk
