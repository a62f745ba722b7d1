// Model and KV for Python. A call may come from any thread: locks keep calls on one model, or one KV, apart, and are
// waited for without the GIL, which who holds them may need.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <numeric>
#include <stdexcept>

#include "module_batch.h"
#include "module_interrupted.h"
#include "probe.h"
#include "sampling.h"

namespace pronk {

namespace {

class PyModel {
public:
    PyModel(const Config& config, int threads, const Kernels& kernel, const OutlierRule& rule) : model(config, threads, kernel) {
        model.outlier_rule = rule;
    }

    // Memory for the matrices that are allocated from now on, in their order. What is mounted holds them already.
    void lend(const BytesOut& memory) { take(memory.data(), memory.size(), nb::cast(memory)); }
    void mount(const Bytes& memory) { take(const_cast<uint8_t*>(memory.data()), memory.size(), nb::cast(memory)), mounted_ = true; }

    size_t nbytes() const { return model.weights.nbytes() + given_used_; }

    void allocate(const std::string& role, int layer, const std::string& format) {
        const Slot slot = find(role, layer);
        if (slot.part != Part::whole) refuse(role, " is a part of gate_up_proj");
        const Format as = format_or_refuse(format);
        if (slot.matrix->data) refuse(role, " is there already");
        Matrix matrix = shaped(as, slot.rows, slot.cols, role == "gate_up_proj");
        const Alone alone(*this);
        matrix.data = given_ ? of_given(matrix.nbytes()) : model.weights.allocate(matrix.nbytes());
        *slot.matrix = matrix;
    }

    void tie() {
        if (!model.embed_tokens.data || model.lm_head.data) refuse("embed_tokens must be there, and lm_head not yet");
        model.lm_head = model.embed_tokens;
    }

    bool pack(const std::string& role, int layer, const RawRows& raw, const std::string& source, int64_t first) {
        const Alone alone(*this);
        const Slot slot = allocated(role, layer);
        if (mounted_) refuse(role, " is as it was mounted");
        return pronk::pack(*slot.matrix, slot.part, raw, source, first, *model.pool);
    }

    void unpack(const std::string& role, int layer, int64_t first, const FloatsOut& out) {
        const Alone alone(*this);
        const Slot slot = allocated(role, layer);
        pronk::unpack(*slot.matrix, slot.part, first, out, *model.pool);
    }

    void set_bias(const std::string& role, int layer, const FloatVector& values) {
        const Slot slot = allocated(role, layer);
        if (layer < 0) refuse(role, " has no bias");
        const std::vector<float> numbers = finite("a bias", values, slot.rows);
        const Alone alone(*this);
        float* bias = const_cast<float*>(slot.matrix->bias);
        if (!bias) bias = floats(static_cast<size_t>(slot.matrix->panels) * kPanelRows);
        constexpr int half = kPanelRows / 2;
        for (size_t r = 0; r < numbers.size(); ++r)
            bias[slot.part == Part::whole ? r : r / half * kPanelRows + r % half + (slot.part == Part::up ? half : 0)] = numbers[r];
        slot.matrix->bias = bias;
    }

    void set_norm(const std::string& name, int layer, const FloatVector& weight) {
        const float** norm = &model.norm;
        if (name != "norm") {
            check_range("layer", layer, 0, static_cast<int64_t>(model.layers.size()) - 1);
            Layer& of = model.layers[layer];
            if (name == "input_layernorm") norm = &of.input_layernorm;
            else if (name == "post_attention_layernorm") norm = &of.post_attention_layernorm;
            else refuse("there is no norm ", name);
        }
        const std::vector<float> numbers = finite("a norm's weight", weight, model.config.hidden_size);
        float* copy = floats(numbers.size());
        std::memcpy(copy, numbers.data(), numbers.size() * sizeof(float));
        const Alone alone(*this);
        *norm = copy;
    }

    void set_rope(const FloatRows& cos, const FloatRows& sin) {
        check_range("positions", cos.shape(0), 1, 1 << 30);
        check_shape("cos", cos, cos.shape(0), model.config.head_dim / 2);
        check_shape("sin", sin, cos.shape(0), model.config.head_dim / 2);
        std::vector<float> table(cos.size() + sin.size());
        std::memcpy(table.data(), cos.data(), cos.nbytes());
        std::memcpy(table.data() + cos.size(), sin.data(), sin.nbytes());
        const Alone alone(*this);
        rope_ = std::move(table);
        model.cos = rope_.data(), model.sin = rope_.data() + rope_.size() / 2;
        model.rope_positions = static_cast<int>(rope_.size() / model.config.head_dim);
    }

    // A module of an adapter: its role and layer, its factors [rank, K] and [N, rank], and the scale of their product.
    using AdapterModule = std::tuple<std::string, int, FloatRows, FloatRows, double>;

    // Its number, and the bytes that it takes.
    std::pair<int, size_t> attach(const std::vector<AdapterModule>& given) {
        std::vector<Adapter::Module> modules;
        for (const auto& [role, layer, a, b, scale] : given) {
            const Slot slot = allocated(role, layer);
            if (layer < 0) refuse(role, " takes no adapter");
            const int64_t rank = a.shape(0);
            check_range("an adapter's rank", rank, 1, 1 << 14);
            check_shape("a", a, rank, slot.cols), check_shape("b", b, slot.rows, rank);
            const auto finite = [](const FloatRows& of) { return std::all_of(of.data(), of.data() + of.size(), [](float x) { return std::isfinite(x); }); };
            if (!finite(a) || !finite(b) || !std::isfinite(static_cast<float>(scale))) refuse("an adapter's numbers must be finite");
            const auto products = model.layers[layer].products();
            const auto product = std::find(products.begin(), products.end(), slot.matrix) - products.begin();
            for (const Adapter::Module& other : modules)
                if (other.layer == layer && other.product == product && other.up == (slot.part == Part::up)) refuse(role, " is there twice");
            modules.push_back({layer, static_cast<int>(product), slot.part == Part::up, static_cast<int>(rank),
                               static_cast<int>(slot.rows), static_cast<int>(slot.cols), a.data(), b.data(), static_cast<float>(scale)});
        }
        for (const Layer& layer : model.layers)
            for (const Matrix* m : layer.products())
                if (!m->data) refuse("not all of the model's weights are set");
        std::unique_ptr<const Adapter> adapter;
        try {
            adapter = std::make_unique<const Adapter>(model.layers, modules);
        } catch (const std::range_error& error) {
            refuse(error.what());
        }
        const size_t bytes = adapter->memory.nbytes();
        const Alone alone(*this);
        auto place = std::find(model.adapters.begin(), model.adapters.end(), nullptr);
        if (place == model.adapters.end()) place = model.adapters.emplace(place);
        *place = std::move(adapter);
        return {static_cast<int>(place - model.adapters.begin()), bytes};
    }

    void detach(int adapter) {
        const Alone alone(*this);
        if (adapter < 0 || adapter >= static_cast<int64_t>(model.adapters.size()) || !model.adapters[adapter])
            refuse("there is no adapter ", adapter);
        model.adapters[adapter].reset();
    }

    nb::ndarray<nb::numpy, float, nb::ndim<2>> forward(const Ints& token_ids, const Ints& positions, const Ints& offsets,
                                                       const Ints& blocks, const Ints& block_offsets, const Ints& logits_rows,
                                                       PyKV& kv, float embedding_noise, const std::optional<Ints>& adapters) {
        BatchArrays batch = arrays(token_ids, positions, offsets, blocks, block_offsets, adapters);
        batch.logits_rows = copied(logits_rows);
        Logits logits;
        pass(batch, kv, embedding_noise, [&](const Batch& checked, const auto& interrupted) {
            logits = model.forward(checked, kv.kv, interrupted);
            return logits != nullptr;
        });
        float* data = logits.release();
        const nb::capsule owner(data, [](void* of) noexcept { delete[] static_cast<float*>(of); });
        return {data, {batch.logits_rows.size(), static_cast<size_t>(model.config.vocab_size)}, owner};
    }

    // What is asked of a token whatever the text: temperature, top_k, top_p, min_p; the three penalties; tokens and their
    // biases; whether llama2.c's draw is meant; logprobs, -1 for none.
    using Asked = std::tuple<double, int64_t, double, double, double, double, double, Ints, FloatVector, bool, int64_t>;
    // A row of the logits, its coin, what is asked, the text so far and how much of it is the prompt, and which tokens may be
    // drawn.
    using AskedRow = std::tuple<int64_t, double, Asked, std::optional<Ints>, int64_t, std::optional<Bools>>;
    // The token, -1 where the logits are not numbers; the largest logit, the weight of all, and the likeliest.
    using Answer = std::tuple<int32_t, float, int64_t, std::vector<int32_t>>;

    std::vector<Answer> draw(const FloatRows& logits, const std::vector<AskedRow>& rows) {
        const int vocab_size = model.config.vocab_size;
        check_shape("logits", logits, logits.shape(0), vocab_size);
        std::vector<Wish> wishes;
        wishes.reserve(rows.size());
        for (const AskedRow& row : rows) wishes.push_back(wish(row, logits.shape(0), vocab_size));
        std::vector<Drawn> drawn;
        {
            const Released released;
            const std::scoped_lock lock(mutex);
            drawn = sampler_.draw(logits.data(), vocab_size, wishes, *model.pool);
        }
        std::vector<Answer> answers;
        answers.reserve(drawn.size());
        for (Drawn& of : drawn) answers.emplace_back(of.token, of.largest, of.weight, std::move(of.top));
        return answers;
    }

    void activations(const Ints& token_ids, const Ints& positions, const Ints& offsets, const Ints& blocks,
                     const Ints& block_offsets, PyKV& kv, const LayersOut& qkv, const LayersOut& o, const LayersOut& gate_up,
                     const LayersOut& down, const LayersOut& head, float embedding_noise, const std::optional<Ints>& adapters) {
        BatchArrays batch = arrays(token_ids, positions, offsets, blocks, block_offsets, adapters);
        const int64_t tokens = token_ids.shape(0);
        batch.logits_rows.resize(tokens);
        std::iota(batch.logits_rows.begin(), batch.logits_rows.end(), 0);
        const Config& c = model.config;
        const auto tap = [&](const char* what, const LayersOut& array, int64_t layers, int64_t cols) {
            check_shape(what, array, layers, tokens, cols);
            return array.data();
        };
        const int64_t layers = c.num_hidden_layers;
        const Taps taps{tap("qkv", qkv, layers, c.hidden_size),
                        tap("o", o, layers, static_cast<int64_t>(c.num_attention_heads) * c.head_dim),
                        tap("gate_up", gate_up, layers, c.hidden_size),
                        tap("down", down, layers, c.intermediate_size), tap("head", head, 1, c.hidden_size)};
        pass(batch, kv, embedding_noise, [&](const Batch& checked, const auto& interrupted) {
            return model.tap(checked, kv.kv, taps, interrupted);
        });
    }

    void hidden(const Ints& token_ids, const Ints& positions, const Ints& offsets, const Ints& blocks,
                const Ints& block_offsets, const Ints& logits_rows, PyKV& kv, const FloatsOut& out, float embedding_noise,
                const std::optional<Ints>& adapters) {
        BatchArrays batch = arrays(token_ids, positions, offsets, blocks, block_offsets, adapters);
        batch.logits_rows = copied(logits_rows);
        check_shape("out", out, static_cast<int64_t>(batch.logits_rows.size()), model.config.hidden_size);
        Taps taps;
        taps.head = out.data();
        pass(batch, kv, embedding_noise, [&](const Batch& checked, const auto& interrupted) {
            return model.tap(checked, kv.kv, taps, interrupted);
        });
    }

    void inspect(const Ints& token_ids, const Ints& positions, const Ints& offsets, const Ints& blocks,
                 const Ints& block_offsets, const Ints& logits_rows, PyKV& kv, const Ints& layers, const FloatsOut& hidden,
                 const LayersOut& scores, const std::optional<FloatsOut>& lens, float embedding_noise,
                 const std::optional<Ints>& adapters) {
        BatchArrays batch = arrays(token_ids, positions, offsets, blocks, block_offsets, adapters);
        batch.logits_rows = copied(logits_rows);
        const Config& c = model.config;
        check_shape("hidden", hidden, c.num_hidden_layers + 1, c.hidden_size);
        if (lens) check_shape("lens", *lens, c.num_hidden_layers + 1, c.vocab_size);
        check_shape("scores", scores, layers.shape(0), c.num_attention_heads, scores.shape(2));
        Probe probe{hidden.data(), lens ? lens->data() : nullptr, scores.data(), std::vector<int>(c.num_hidden_layers, -1),
                    scores.shape(2)};
        int place = 0;
        for (const int32_t layer : copied(layers)) {
            check_range("layer", layer, 0, c.num_hidden_layers - 1);
            if (probe.shown[layer] >= 0) refuse("layer ", layer, " is named twice");
            probe.shown[layer] = place++;
        }
        pass(batch, kv, embedding_noise, [&](const Batch& checked, const auto& interrupted) {
            if (checked.rows != 1) refuse("one row is looked at, not ", checked.rows);
            const int64_t keys = static_cast<int64_t>(checked.positions[checked.logits_rows[0]]) + 1;
            if (place && static_cast<int64_t>(probe.stride) < keys) refuse(keys, " scores do not fit in ", probe.stride);
            return model.inspect(checked, kv.kv, probe, interrupted);
        });
    }

    Model model;

private:
    // Nobody else is at work with the model, no thread of its own either.
    struct Alone {
        explicit Alone(PyModel& of) : lock(of.mutex) { of.model.quiesce(); }
        const Unlocked lock;
    };

    static Wish wish(const AskedRow& from, int64_t rows, int vocab_size) {
        const auto& [row, coin, asked, history, prompt_tokens, allowed] = from;
        const auto& [temperature, top_k, top_p, min_p, repetition, presence, frequency, bias_tokens, biases, llama2c, logprobs] = asked;
        check_range("a row", row, 0, rows - 1);
        check_range("top_k", top_k, 0, INT32_MAX);
        check_range("logprobs", logprobs, -1, INT32_MAX);
        check_range("prompt_tokens", prompt_tokens, 0, INT64_MAX);
        if (!(coin >= 0 && coin < 1)) refuse("a coin must be from 0 to below 1");
        if (!(temperature == 0 || (temperature >= 1e-4 && temperature <= 1e4))) refuse("temperature must be 0, or from 0.0001 to 10000");
        if (!(top_p > 0 && top_p <= 1)) refuse("top_p must be above 0 and at most 1");
        if (!(min_p >= 0 && min_p <= 1)) refuse("min_p must be from 0 to 1");
        if (!(repetition > 0 && std::isfinite(repetition))) refuse("repetition_penalty must be above 0");
        if (!std::isfinite(presence) || !std::isfinite(frequency)) refuse("penalties must be finite");
        Wish wish;
        wish.row = static_cast<size_t>(row), wish.coin = coin, wish.temperature = static_cast<float>(temperature);
        wish.top_k = top_k, wish.top_p = top_p, wish.min_p = min_p, wish.as_llama2c = llama2c;
        wish.repetition_penalty = static_cast<float>(repetition), wish.presence_penalty = presence, wish.frequency_penalty = frequency;
        wish.logprobs = static_cast<int>(logprobs), wish.prompt_tokens = static_cast<size_t>(prompt_tokens);
        wish.bias_tokens = copied(bias_tokens), wish.biases = finite("biases", biases, wish.bias_tokens.size());
        if (history) wish.history = copied(*history);
        for (const std::vector<int32_t>* tokens : {&wish.bias_tokens, &wish.history})
            for (const int32_t id : *tokens)
                if (id < 0 || id >= vocab_size) refuse("token id ", id, " is not in a vocabulary of ", vocab_size);
        if (allowed) {
            if (allowed->shape(0) != static_cast<size_t>(vocab_size)) refuse("allowed must have ", vocab_size, " values");
            wish.allowed = reinterpret_cast<const uint8_t*>(allowed->data());
        }
        return wish;
    }

    static BatchArrays arrays(const Ints& token_ids, const Ints& positions, const Ints& offsets, const Ints& blocks,
                              const Ints& block_offsets, const std::optional<Ints>& adapters) {
        BatchArrays batch;
        batch.token_ids = copied(token_ids), batch.positions = copied(positions), batch.offsets = copied(offsets);
        batch.blocks = copied(blocks), batch.block_offsets = copied(block_offsets);
        if (adapters) batch.adapters = copied(*adapters);
        return batch;
    }

    // forward(batch, interrupted) says whether it was finished.
    template <class Forward>
    void pass(const BatchArrays& arrays, PyKV& kv, float embedding_noise, const Forward& forward) {
        check_complete();
        if (kv.heads != model.config.num_key_value_heads || kv.kv.layout.head_dim != model.config.head_dim ||
            (kv.layers != 1 && kv.layers != static_cast<int>(model.layers.size())))
            refuse("these keys and values are those of another model");
        bool done;
        {
            const Released released;
            const std::scoped_lock locks(mutex, kv.mutex);
            check(arrays, model, kv);
            Batch batch = arrays.view();
            batch.embedding_noise = embedding_noise;
            Interrupted interrupted;
            done = forward(batch, [&] { return interrupted(); });
        }
        if (!done) nb::raise_python_error();
    }

    void take(uint8_t* memory, size_t bytes, nb::object owner) {
        if (given_ || model.embed_tokens.data) refuse("memory is given once, before anything is allocated");
        if (!bytes || reinterpret_cast<uintptr_t>(memory) % kLineBytes) refuse("memory must begin on a line of ", kLineBytes, " bytes");
        given_ = memory, given_bytes_ = bytes, owner_ = std::move(owner);
    }

    uint8_t* of_given(size_t bytes) {
        if (bytes > given_bytes_ - given_used_) refuse("the memory that was given is too small");
        given_used_ += bytes;
        return given_ + given_used_ - bytes;
    }

    struct Slot {
        Matrix* matrix;
        int64_t rows, cols;
        Part part = Part::whole;
    };

    Slot find(const std::string& role, int layer) {
        const Config& c = model.config;
        if (role == "embed_tokens" || role == "lm_head") {
            if (layer != -1) refuse(role, " is of no layer, which is -1, not ", layer);
            return {role == "lm_head" ? &model.lm_head : &model.embed_tokens, c.vocab_size, c.hidden_size};
        }
        check_range("layer", layer, 0, static_cast<int64_t>(model.layers.size()) - 1);
        Layer& of = model.layers[layer];
        const int64_t q = static_cast<int64_t>(c.num_attention_heads) * c.head_dim;
        const int64_t kv = static_cast<int64_t>(c.num_key_value_heads) * c.head_dim;
        if (role == "q_proj") return {&of.q_proj, q, c.hidden_size};
        if (role == "k_proj") return {&of.k_proj, kv, c.hidden_size};
        if (role == "v_proj") return {&of.v_proj, kv, c.hidden_size};
        if (role == "o_proj") return {&of.o_proj, c.hidden_size, q};
        if (role == "gate_up_proj") return {&of.gate_up_proj, c.intermediate_size, c.hidden_size};
        if (role == "gate_proj") return {&of.gate_up_proj, c.intermediate_size, c.hidden_size, Part::gate};
        if (role == "up_proj") return {&of.gate_up_proj, c.intermediate_size, c.hidden_size, Part::up};
        if (role == "down_proj") return {&of.down_proj, c.hidden_size, c.intermediate_size};
        refuse("there is no matrix ", role);
    }

    Slot allocated(const std::string& role, int layer) {
        const Slot slot = find(role, layer);
        if (!slot.matrix->data) refuse(role, " is not allocated");
        if (role == "gate_up_proj") refuse("gate_proj and up_proj are set one by one");
        return slot;
    }

    float* floats(size_t count) { return reinterpret_cast<float*>(model.weights.allocate(count * sizeof(float))); }

    void check_complete() const {
        bool complete = model.embed_tokens.data && model.lm_head.data && model.norm && model.cos;
        for (const Layer& layer : model.layers) {
            for (const Matrix* m : layer.products()) complete = complete && m->data;
            complete = complete && layer.input_layernorm && layer.post_attention_layernorm;
        }
        if (!complete) refuse("not all of the model's weights are set");
    }

    uint8_t* given_ = nullptr;
    size_t given_bytes_ = 0, given_used_ = 0;
    nb::object owner_;  // keeps it
    bool mounted_ = false;
    Mutex mutex;
    Sampler sampler_{model.kernel};
    std::vector<float> rope_;
};

void new_model(PyModel* self, int vocab_size, int hidden_size, int intermediate_size, int num_hidden_layers,
               int num_attention_heads, int num_key_value_heads, int head_dim, double rms_norm_eps, int threads,
               const std::optional<std::string>& isa, double int8_threshold, int64_t int8_outliers) {
    check_range("vocab_size", vocab_size, 1, 1 << 24);
    check_range("hidden_size", hidden_size, 1, 1 << 20);
    check_range("intermediate_size", intermediate_size, 1, 1 << 22);
    check_range("num_hidden_layers", num_hidden_layers, 1, 1024);
    check_range("num_attention_heads", num_attention_heads, 1, 1 << 14);
    check_range("num_key_value_heads", num_key_value_heads, 1, num_attention_heads);
    check_range("head_dim", head_dim, 2, 1 << 14);
    check_range("threads", threads, 1, 1024);
    if (head_dim % 2) refuse("head_dim must be even, not ", head_dim);
    if (num_attention_heads % num_key_value_heads) refuse("query heads must be a multiple of key heads");
    if (static_cast<int64_t>(num_attention_heads) * head_dim > 1 << 22) refuse("heads are too many, or too large");
    if (!(rms_norm_eps > 0 && rms_norm_eps <= 1)) refuse("rms_norm_eps must be from 0 to 1");
    const Config config{vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
                        num_key_value_heads, head_dim, static_cast<float>(rms_norm_eps)};
    new (self) PyModel(config, threads, kernels_or_refuse(isa), outlier_rule(int8_threshold, int8_outliers));
}

void new_kv(PyKV* self, const PyModel& of, const std::string& type, int64_t num_blocks, bool remembers) {
    check_range("num_blocks", num_blocks, 0, INT32_MAX);
    const Config& config = of.model.config;
    new (self) PyKV(config, remembers ? config.num_hidden_layers : 1, kv_type_or_refuse(type), num_blocks);
}

void resize(PyKV& kv, int64_t num_blocks) {
    check_range("num_blocks", num_blocks, 0, INT32_MAX);
    const Released released;
    const std::scoped_lock lock(kv.mutex);
    if (num_blocks < kv.kv.num_blocks()) refuse("blocks can only be added; there are ", kv.kv.num_blocks());
    kv.kv.resize(num_blocks);
}

int64_t reserve(PyKV& kv, int64_t num_blocks) {
    check_range("num_blocks", num_blocks, 0, INT32_MAX);
    const Released released;
    const std::scoped_lock lock(kv.mutex);
    return kv.kv.reserve(num_blocks);
}

void copy(PyKV& kv, const Array<const int32_t, 2>& pairs) {
    check_shape("pairs", pairs, pairs.shape(0), 2);
    std::vector<int32_t> blocks(pairs.size());
    if (!blocks.empty()) std::memcpy(blocks.data(), pairs.data(), pairs.nbytes());
    const Released released;
    const std::scoped_lock lock(kv.mutex);
    for (const int32_t block : blocks)
        if (block < 0 || block >= kv.kv.num_blocks()) refuse("there is no block ", block, " among ", kv.kv.num_blocks());
    for (size_t i = 0; i < blocks.size(); i += 2) kv.kv.copy(blocks[i], blocks[i + 1]);
}

// Not while a call is at work with it, which sees to what was begun ahead.
void quiesce(PyKV& kv) {
    const Released released;
    const std::unique_lock lock(kv.mutex, std::try_to_lock);
    if (lock) kv.kv.quiesce();
}

bool written_ahead(PyKV& kv) {
    const std::unique_lock lock(kv.mutex, std::try_to_lock);
    return lock && kv.kv.written_ahead();
}

}  // namespace

void bind_model(nb::module_& module) {
    using nb::arg;
    nb::class_<PyModel>(module, "Model")
        .def("__init__", new_model, nb::kw_only(), arg("vocab_size"), arg("hidden_size"), arg("intermediate_size"),
             arg("num_hidden_layers"), arg("num_attention_heads"), arg("num_key_value_heads"), arg("head_dim"),
             arg("rms_norm_eps"), arg("threads"), arg("isa") = nb::none(),
             arg("int8_threshold") = OutlierRule{}.threshold, arg("int8_outliers") = OutlierRule{}.count)
        .def_prop_ro("isa", [](const PyModel& m) { return m.model.kernel.name; })
        .def_prop_ro("threads", [](const PyModel& m) { return m.model.pool->size(); })
        .def_prop_ro("nbytes", &PyModel::nbytes)
        .def("lend", &PyModel::lend, arg("memory").noconvert())
        .def("mount", &PyModel::mount, arg("memory").noconvert())
        .def("allocate", &PyModel::allocate, arg("role"), arg("layer"), arg("format"))
        .def("tie", &PyModel::tie)
        .def("pack", &PyModel::pack, arg("role"), arg("layer"), arg("raw").noconvert(), arg("source"), arg("first") = 0)
        .def("unpack", &PyModel::unpack, arg("role"), arg("layer"), arg("first"), arg("out").noconvert())
        .def("set_bias", &PyModel::set_bias, arg("role"), arg("layer"), arg("values").noconvert())
        .def("set_norm", &PyModel::set_norm, arg("name"), arg("layer"), arg("weight").noconvert())
        .def("set_rope", &PyModel::set_rope, arg("cos").noconvert(), arg("sin").noconvert())
        .def("attach", &PyModel::attach, arg("modules"))
        .def("detach", &PyModel::detach, arg("adapter"))
        .def("forward", &PyModel::forward, arg("token_ids").noconvert(), arg("positions").noconvert(),
             arg("offsets").noconvert(), arg("blocks").noconvert(), arg("block_offsets").noconvert(),
             arg("logits_rows").noconvert(), arg("kv"), arg("embedding_noise") = 0.0f,
             arg("adapters").noconvert() = nb::none())
        .def("draw", &PyModel::draw, arg("logits").noconvert(), arg("rows"))
        .def("activations", &PyModel::activations, arg("token_ids").noconvert(), arg("positions").noconvert(),
             arg("offsets").noconvert(), arg("blocks").noconvert(), arg("block_offsets").noconvert(), arg("kv"),
             arg("qkv").noconvert(), arg("o").noconvert(), arg("gate_up").noconvert(), arg("down").noconvert(),
             arg("head").noconvert(), arg("embedding_noise") = 0.0f, arg("adapters").noconvert() = nb::none())
        .def("hidden", &PyModel::hidden, arg("token_ids").noconvert(), arg("positions").noconvert(),
             arg("offsets").noconvert(), arg("blocks").noconvert(), arg("block_offsets").noconvert(),
             arg("logits_rows").noconvert(), arg("kv"), arg("out").noconvert(), arg("embedding_noise") = 0.0f,
             arg("adapters").noconvert() = nb::none())
        .def("inspect", &PyModel::inspect, arg("token_ids").noconvert(), arg("positions").noconvert(),
             arg("offsets").noconvert(), arg("blocks").noconvert(), arg("block_offsets").noconvert(),
             arg("logits_rows").noconvert(), arg("kv"), arg("layers").noconvert(), arg("hidden").noconvert(),
             arg("scores").noconvert(), arg("lens").noconvert() = nb::none(), arg("embedding_noise") = 0.0f,
             arg("adapters").noconvert() = nb::none());
    nb::class_<PyKV>(module, "KV")
        .def("__init__", new_kv, arg("model"), arg("type"), arg("num_blocks"), arg("remembers") = true)
        .def_prop_ro("num_blocks", [](const PyKV& kv) { return kv.kv.num_blocks(); })
        .def_prop_ro("nbytes", [](const PyKV& kv) { return kv.kv.nbytes(); })
        .def_prop_ro("block_bytes", [](const PyKV& kv) { return kv.kv.block_bytes(); })
        .def_prop_ro("written_ahead", written_ahead)
        .def("reserve", reserve, arg("num_blocks"))
        .def("resize", resize, arg("num_blocks"))
        .def("copy", copy, arg("pairs").noconvert())
        .def("quiesce", quiesce);
}

}  // namespace pronk
