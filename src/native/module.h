// What the bindings share: arrays as Python hands them over, and refusals. Nothing from Python is trusted: every size,
// name and number is checked here, for the kernels check nothing.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "arena.h"
#include "kernels.h"
#include "module_gil.h"
#include "threads.h"

namespace nb = nanobind;

namespace pronk {

// Row-major, in memory, of just this type: nanobind raises TypeError for any other (every argument is noconvert).
template <class T, int kDimensions>
using Array = nb::ndarray<T, nb::ndim<kDimensions>, nb::c_contig, nb::device::cpu>;
using Ints = Array<const int32_t, 1>;
using Bools = Array<const bool, 1>;
using Bytes = Array<const uint8_t, 1>;
using BytesOut = Array<uint8_t, 1>;
using FloatVector = Array<const float, 1>;
using FloatRows = Array<const float, 2>;
using FloatsOut = Array<float, 2>;  // must be writable, as the next one
using LayersOut = Array<float, 3>;
using RawRows = Array<const uint8_t, 2>;

// ValueError.
template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
    const auto text = [](const auto& part) {
        if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) return std::to_string(part);
        else return std::string(part);
    };
    throw nb::value_error((text(parts) + ...).c_str());
}

inline void check_range(const char* what, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most) refuse(what, " must be from ", least, " to ", most, ", not ", value);
}

template <class Of, class... Sizes>
void check_shape(const char* what, const Of& array, Sizes... sizes) {
    const int64_t expected[] = {static_cast<int64_t>(sizes)...};
    const auto text = [](const auto& size) {
        std::string list;
        for (size_t i = 0; i < sizeof...(sizes); ++i) list += (i ? ", " : "(") + std::to_string(size(i));
        return list + ")";
    };
    for (size_t i = 0; i < sizeof...(sizes); ++i)
        if (static_cast<int64_t>(array.shape(i)) != expected[i])
            refuse(what, " must be of shape ", text([&](size_t d) { return expected[d]; }), ", not ",
                   text([&](size_t d) { return array.shape(d); }));
    if (reinterpret_cast<uintptr_t>(array.data()) % alignof(typename Of::Scalar)) refuse(what, " is not aligned");
}

// A copy: what was checked must not change under the kernels.
template <class T>
std::vector<T> copied(const Array<const T, 1>& array) {
    std::vector<T> copy(array.shape(0));
    if (!copy.empty()) std::memcpy(copy.data(), array.data(), copy.size() * sizeof(T));
    return copy;
}

std::vector<float> finite(const char* what, const FloatVector& array, int64_t size);

const Kernels& kernels_or_refuse(const std::optional<std::string>& isa);
Format format_or_refuse(const std::string& name);
KVType kv_type_or_refuse(const std::string& name);
OutlierRule outlier_rule(double threshold, int64_t count);

// A matrix of `rows` rows, without memory. `pairs`: rows of SwiGLU, of which there are gate rows and up rows.
Matrix shaped(Format format, int64_t rows, int64_t cols, bool pairs);

enum class Part { whole, gate, up };

// All the rows of `raw`, which go into rows `first` and on of a part. `source` is a tensor's type, "F32", "Q4_K", ...
// False where a number is not finite or does not fit the format. Without the GIL, on all threads of `pool`.
bool pack(const Matrix& matrix, Part part, const RawRows& raw, const std::string& source, int64_t first, ThreadPool& pool);

// The numbers of rows `first` and on, as many as `out` has.
void unpack(const Matrix& matrix, Part part, int64_t first, const FloatsOut& out, ThreadPool& pool);

void bind_model(nb::module_& module);
void bind_kernels(nb::module_& module);
void bind_rounding(nb::module_& module);

}  // namespace pronk
