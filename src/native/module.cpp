// pronk._native: kernels and the forward pass for Python. src/pronk/_native.pyi says what is in it.
#include "checksum.h"
#include "module.h"
#include "sampling.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace pronk {

namespace {

// In panels of 32 gate rows beside 32 up rows.
Placement placement(Part part) {
    if (part == Part::whole) return {};
    return {part == Part::up ? kPanelRows / 2 : 0, kPanelRows / 2, kPanelRows};
}

int64_t rows_of(const Matrix& matrix, Part part) { return part == Part::whole ? matrix.rows : matrix.rows / 2; }

// body(begin, end) over [0, count) in pieces of a panel's rows: a step of one phase.
template <class Body>
void parallel_for(ThreadPool& pool, int64_t count, const Body& body) {
    const int panels = static_cast<int>((count + kPanelRows - 1) / kPanelRows);
    pool.run([&](int thread) {
        Cursor cursor{thread};
        pool.phases().parallel_for(cursor, panels, 1, [&](int64_t panel, int) {
            body(panel * kPanelRows, std::min(count, (panel + 1) * kPanelRows));
        });
    });
}

template <class Record, size_t kCount>
nb::list names_of(const Record (&table)[kCount]) {
    nb::list names;
    for (const Record& record : table) names.append(nb::str(record.name));
    return names;
}

}  // namespace

std::vector<float> finite(const char* what, const FloatVector& array, int64_t size) {
    if (static_cast<int64_t>(array.shape(0)) != size)
        refuse(what, " must have ", size, " numbers, not ", array.shape(0));
    std::vector<float> numbers = copied(array);
    for (const float x : numbers)
        if (!std::isfinite(x)) refuse(what, " must be finite");
    return numbers;
}

const Kernels& kernels_or_refuse(const std::optional<std::string>& isa) {
    if (isa) {
        const Kernels* table = kernels_named(isa->c_str());
        if (!table) refuse("this processor cannot run ", *isa);
        return *table;
    }
    try {
        return kernels();
    } catch (const std::runtime_error& error) {
        refuse(error.what());
    }
}

Format format_or_refuse(const std::string& name) {
    const FormatTraits* format = find_named(kFormats, name.c_str());
    if (!format) refuse("there is no weight format ", name);
    return format->id;
}

KVType kv_type_or_refuse(const std::string& name) {
    const KVTraits* type = find_named(kKVTypes, name.c_str());
    if (!type) refuse("there is no type ", name, " of keys and values");
    return type->id;
}

OutlierRule outlier_rule(double threshold, int64_t count) {
    if (!(threshold >= 0)) refuse("int8_threshold must be 0 or more");
    check_range("int8_outliers", count, 0, 1 << 22);
    constexpr double most = std::numeric_limits<float>::max();
    return {threshold > most ? INFINITY : static_cast<float>(std::fabs(threshold)), static_cast<int>(count)};  // of 0, not -0
}

Matrix shaped(Format format, int64_t rows, int64_t cols, bool pairs) {
    check_range("rows", rows, 1, 1 << 26);
    check_range("columns", cols, 1, traits(format).longest_row);
    return matrix_of(format, static_cast<int>(pairs ? 2 * rows : rows), static_cast<int>(cols));
}

bool pack(const Matrix& matrix, Part part, const RawRows& raw, const std::string& source, int64_t first, ThreadPool& pool) {
    const SourceTraits* type = find_named(kSources, source.c_str());
    if (!type) refuse("rows of ", source, " cannot be packed");
    const int64_t count = raw.shape(0), stride = raw.shape(1), rows = rows_of(matrix, part);
    const FormatTraits& format = traits(matrix.format);
    if (!format.pack && !format.holds_codes_of(type->id)) refuse("rows of ", source, " cannot be packed in ", format.name);
    if (matrix.cols % type->elements) refuse(matrix.cols, " columns are not whole blocks of ", source);
    if (stride != type->before + static_cast<int64_t>(matrix.cols) / type->elements * type->bytes)
        refuse("a row of ", matrix.cols, " columns of ", source, " does not have ", stride, " bytes");
    if (first < 0 || first > rows || count > rows - first)
        refuse("rows ", first, " to ", first + count, " are not within a matrix of ", rows);
    const uint8_t* data = raw.data();
    std::atomic<bool> good{true};
    Released released;
    const auto body = [&](int64_t begin, int64_t end) {
        if (!good.load(std::memory_order_relaxed)) return;
        if (!pack_rows(matrix, data + begin * stride, stride, type->id, first + begin, first + end, placement(part)))
            good.store(false, std::memory_order_relaxed);
    };
    parallel_for(pool, count, body);
    return good;
}

void unpack(const Matrix& matrix, Part part, int64_t first, const FloatsOut& out, ThreadPool& pool) {
    const int64_t count = out.shape(0), rows = rows_of(matrix, part);
    check_shape("out", out, count, matrix.cols);
    if (first < 0 || first > rows || count > rows - first)
        refuse("rows ", first, " to ", first + count, " are not within a matrix of ", rows);
    float* data = out.data();
    Released released;
    parallel_for(pool, count, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) unpack_row(matrix, placement(part).row(first + r), data + r * matrix.cols);
    });
}

}  // namespace pronk

NB_MODULE(_native, module) {
    using namespace pronk;
    nb::set_leak_warnings(false);  // a program may end with a model in its hands
    nb::module_::import_("atexit").attr("register")(nb::cpp_function(&Ending::begin));
    module.def("isas", [] {
        nb::list names;
        for (int i = 0; const Kernels* kernel = kernels_at(i); ++i) names.append(kernel->name);
        return names;
    });
    module.def("isa", [] { return kernels_or_refuse(std::nullopt).name; });
    module.def("default_threads", default_threads);
    module.def("packed_bytes", [](const std::string& format, int64_t rows, int64_t cols, bool pairs) {
            return shaped(format_or_refuse(format), rows, cols, pairs).nbytes();
        }, nb::arg("format"), nb::arg("rows"), nb::arg("cols"), nb::arg("pairs") = false);
    module.def("checksum", [](const Bytes& memory, int threads) {
            check_range("threads", threads, 1, 1024);
            const Released released;
            ThreadPool pool(threads);
            return checksum(memory.data(), memory.size(), pool);
        }, nb::arg("memory").noconvert(), nb::arg("threads"));
    nb::class_<FormatTraits>(module, "Format")
        .def_prop_ro("name", [](const FormatTraits& format) { return format.name; })
        .def_prop_ro("activations", [](const FormatTraits& format) { return traits(format.activations).name; })
        .def_prop_ro("holds", [](const FormatTraits& format) {
                nb::list names;
                for (const SourceTraits& source : kSources)
                    if (format.holds_codes_of(source.id)) names.append(nb::str(source.name));
                return names;
            })
        .def_ro("longest_row", &FormatTraits::longest_row);
    module.def("formats", [] {
        nb::list formats;
        for (const FormatTraits& format : kFormats) formats.append(nb::cast(&format, nb::rv_policy::reference));
        return formats;
    });
    module.def("sources", [] { return names_of(kSources); });
    module.def("filters", [] {
        nb::list names;
        for (const char* name : kFilters) names.append(nb::str(name));
        return names;
    });
    module.def("kv_block", [] { return kKVBlock; });
    module.def("kv_types", [] { return names_of(kKVTypes); });
    bind_model(module);
    bind_kernels(module);
    bind_rounding(module);
}
