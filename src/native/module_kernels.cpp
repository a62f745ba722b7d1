// Single kernels for Python, each in any instruction set that this processor runs: what tests hold against numpy.
#include <algorithm>
#include <cmath>

#include "model.h"
#include "module.h"
#include "rows.h"

namespace pronk {

namespace {

struct PyMatrix {
    PyMatrix(const std::string& format, int64_t rows, int64_t cols, bool pairs, int threads)
        : pairs(pairs), pool(threads), matrix(shaped(format_or_refuse(format), rows, cols, pairs)) {
        matrix.data = arena.allocate(matrix.nbytes());
    }

    Part part(const std::string& name) const {
        if (name == "whole" && !pairs) return Part::whole;
        if (name == "gate" && pairs) return Part::gate;
        if (name == "up" && pairs) return Part::up;
        refuse("this matrix has no part ", name);
    }

    const bool pairs;
    Arena arena;
    ThreadPool pool;
    Matrix matrix;
};

// out [T][N] of x [T][K]: stored, added, or for pairs SwiGLU.
void matmul(PyMatrix& w, const FloatRows& x, const FloatsOut& out, bool add, const std::optional<std::string>& isa,
            double int8_threshold, int int8_outliers) {
    const Kernels& kernel = kernels_or_refuse(isa);
    const int64_t tokens = x.shape(0), cols = w.pairs ? w.matrix.rows / 2 : w.matrix.rows;
    check_range("tokens", tokens, 1, 1 << 16);
    check_shape("x", x, tokens, w.matrix.cols);
    check_shape("out", out, tokens, cols);
    if (add && w.pairs) refuse("SwiGLU is stored, not added");
    const ActivationFormat format = traits(w.matrix.format).activations;
    RowsBuffer buffer;
    buffer.reserve(format, static_cast<int>(tokens), w.matrix.cols, kernel.sums_narrow && tokens >= kLeastNarrow);
    const Rows rows = buffer.rows(format, w.matrix.cols, outlier_rule(int8_threshold, int8_outliers));
    for (int64_t t = 0; t < tokens; ++t)
        kernel.convert(x.data() + t * w.matrix.cols, w.matrix.cols, rows, static_cast<int>(t));
    const Epilogue epilogue = w.pairs ? Epilogue::swiglu : add ? Epilogue::add : Epilogue::store;
    const Output output{out.data(), static_cast<size_t>(cols), epilogue, static_cast<int>(cols)};
    kernel.matmul(w.matrix, rows, static_cast<int>(tokens), 0, 2 * w.matrix.panels, output);
}

void rmsnorm(const FloatRows& x, const FloatVector& weight, float eps, const FloatsOut& out, const std::optional<std::string>& isa) {
    const Kernels& kernel = kernels_or_refuse(isa);
    const int64_t rows = x.shape(0), size = x.shape(1);
    check_range("size", size, 1, 1 << 20);
    check_shape("x", x, rows, size);
    check_shape("out", out, rows, size);
    if (static_cast<int64_t>(weight.shape(0)) != size) refuse("weight must have ", size, " numbers");
    const std::vector<float> w = copied(weight);
    for (int64_t r = 0; r < rows; ++r)
        kernel.rmsnorm(x.data() + r * size, w.data(), eps, static_cast<int>(size), out.data() + r * size);
}

// Rotates `x` [heads][D] in place.
void rope(const FloatsOut& x, const FloatVector& cos, const FloatVector& sin, const std::optional<std::string>& isa) {
    const Kernels& kernel = kernels_or_refuse(isa);
    const int64_t heads = x.shape(0), d = x.shape(1);
    check_range("head_dim", d, 2, 1 << 14);
    check_range("heads", heads, 1, 1 << 14);
    check_shape("x", x, heads, d);
    if (d % 2) refuse("head_dim must be even, not ", d);
    const std::vector<float> c = finite("cos", cos, d / 2), s = finite("sin", sin, d / 2);
    kernel.rope(x.data(), static_cast<int>(heads), static_cast<int>(d), c.data(), s.data());
}

// out [R][D] of queries [R][D], of which row i sees limits[i] keys. Keys lie in the blocks that `blocks` names, in order;
// `at_once` rows share a call; 0: as many as can.
void attention(const FloatRows& q, const FloatRows& keys, const FloatRows& values, const Ints& limits, const Ints& blocks,
               const std::string& type, int at_once, const FloatsOut& out, const std::optional<std::string>& isa) {
    const Kernels& kernel = kernels_or_refuse(isa);
    const int64_t rows = q.shape(0), d = q.shape(1), length = keys.shape(0);
    check_range("head_dim", d, 2, 1 << 14);
    check_range("rows", rows, 1, 1 << 16);
    check_range("keys", length, 1, 1 << 20);
    check_range("at_once", at_once, 0, kernel.attention_rows);
    if (at_once == 0) at_once = kernel.attention_rows;
    check_shape("q", q, rows, d);
    check_shape("keys", keys, length, d);
    check_shape("values", values, length, d);
    check_shape("out", out, rows, d);
    if (d % 2) refuse("head_dim must be even, not ", d);
    const std::vector<int32_t> limit = copied(limits), table = copied(blocks);
    const int64_t needed = (length + kKVBlock - 1) / kKVBlock;
    if (static_cast<int64_t>(limit.size()) != rows) refuse("limits must have ", rows, " numbers");
    if (static_cast<int64_t>(table.size()) != needed) refuse("blocks must have ", needed, " numbers");
    for (size_t i = 0; i < limit.size(); ++i) check_range("a limit", limit[i], i ? limit[i - 1] : 1, length);
    std::vector<bool> used(needed);
    for (const int32_t block : table) {
        check_range("a block", block, 0, needed - 1);
        if (used[block]) refuse("block ", block, " is named twice");
        used[block] = true;
    }
    Config config{};
    config.num_key_value_heads = 1, config.head_dim = static_cast<int>(d);
    KV kv(config, 1, kv_type_or_refuse(type), needed);
    for (int64_t i = 0; i < length; ++i)
        kernel.store_kv(kv.layout, kv.at(0, 0) + table[i / kKVBlock] * kv.block_bytes(), i % kKVBlock,
                        keys.data() + i * d, values.data() + i * d);
    Arena arena;
    AttentionTask task;
    task.kv = kv.at(0, 0), task.block_stride = kv.block_bytes(), task.blocks = table.data();
    task.scale = 1 / std::sqrt(static_cast<float>(d));
    task.scratch = reinterpret_cast<float*>(arena.allocate(attention_scratch(static_cast<int>(d)) * sizeof(float)));
    for (int64_t first = 0; first < rows; first += at_once) {
        const float* queries[kTileTokens];
        float* outs[kTileTokens];
        task.rows = static_cast<int>(std::min<int64_t>(at_once, rows - first));
        for (int i = 0; i < task.rows; ++i) queries[i] = q.data() + (first + i) * d, outs[i] = out.data() + (first + i) * d;
        task.q = queries, task.out = outs, task.limit = limit.data() + first;
        kernel.attention(kv.layout, task);
    }
}

}  // namespace

void bind_kernels(nb::module_& module) {
    using nb::arg;
    nb::class_<PyMatrix>(module, "Matrix")
        .def("__init__", [](PyMatrix* self, const std::string& format, int64_t rows, int64_t cols, bool pairs, int threads) {
                check_range("threads", threads, 1, 1024);
                new (self) PyMatrix(format, rows, cols, pairs, threads);
            }, arg("format"), arg("rows"), arg("cols"), arg("pairs") = false, arg("threads") = 1)
        .def_prop_ro("nbytes", [](const PyMatrix& w) { return w.matrix.nbytes(); })
        .def("pack", [](PyMatrix& w, const RawRows& raw, const std::string& source, int64_t first, const std::string& part) {
                return pack(w.matrix, w.part(part), raw, source, first, w.pool);
            }, arg("raw").noconvert(), arg("source"), arg("first") = 0, arg("part") = "whole")
        .def("unpack", [](PyMatrix& w, const FloatsOut& out, int64_t first, const std::string& part) {
                unpack(w.matrix, w.part(part), first, out, w.pool);
            }, arg("out").noconvert(), arg("first") = 0, arg("part") = "whole");
    module.def("matmul", matmul, arg("matrix"), arg("x").noconvert(), arg("out").noconvert(), arg("add") = false,
               arg("isa") = nb::none(), arg("int8_threshold") = OutlierRule{}.threshold,
               arg("int8_outliers") = OutlierRule{}.count);
    module.def("rmsnorm", rmsnorm, arg("x").noconvert(), arg("weight").noconvert(), arg("eps"), arg("out").noconvert(),
               arg("isa") = nb::none());
    module.def("rope", rope, arg("x").noconvert(), arg("cos").noconvert(), arg("sin").noconvert(), arg("isa") = nb::none());
    module.def("attention", attention, arg("q").noconvert(), arg("keys").noconvert(), arg("values").noconvert(),
               arg("limits").noconvert(), arg("blocks").noconvert(), arg("type"), arg("at_once"), arg("out").noconvert(),
               arg("isa") = nb::none());
}

}  // namespace pronk
