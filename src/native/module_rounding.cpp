// Rounding to block types for Python (kernels_rounding.cpp): from any thread, and without Python's lock.
#include "module.h"
#include "rounding.h"

#include <iterator>

namespace pronk {

namespace {

using CodesOut = Array<int8_t, 2>;
using NumbersOut = Array<int16_t, 2>;

Rule rule_or_refuse(int block, int group, int low, int high, bool minimum, std::optional<std::pair<int, int>> scales,
                    bool curved) {
    check_range("block", block, 1, kMostBlock);
    check_range("group", group, 4, kMostGroup);
    if (group % 4 || block % group) refuse("group must be a multiple of 4 and a divisor of block, not ", group);
    check_range("low", low, -127, 0);
    check_range("high", high, 1, 127);
    if (curved && (low != kCurve[0] || high != kCurve[std::size(kCurve) - 1])) refuse("low and high must be the curve's ends");
    const auto [least, most] = scales.value_or(std::pair(0, 1));
    check_range("the least number", least, -128, 0);
    check_range("the largest number", most, 1, 127);
    return {block, group, low, high, minimum, scales.has_value(), least, most, curved};
}

void round_rows(const FloatRows& weights, const std::optional<FloatRows>& upper, int block, int group, int low, int high,
                bool minimum, std::optional<std::pair<int, int>> scales, bool curved, const CodesOut& codes,
                const FloatsOut& d, const FloatsOut& dmin, const NumbersOut& n, const NumbersOut& m,
                const std::optional<std::string>& isa) {
    const Kernels& kernel = kernels_or_refuse(isa);
    const Rule rule = rule_or_refuse(block, group, low, high, minimum, scales, curved);
    const int64_t rows = weights.shape(0), columns = weights.shape(1);
    check_range("rows", rows, 0, 1 << 30);
    check_range("columns", columns, block, 1 << 20);
    if (columns % block) refuse(columns, " columns are not whole blocks of ", block);
    check_shape("weights", weights, rows, columns);
    if (upper) check_shape("upper", *upper, columns, columns);
    check_shape("codes", codes, rows, columns);
    check_shape("d", d, rows, columns / block);
    check_shape("dmin", dmin, rows, columns / block);
    check_shape("n", n, rows, columns / group);
    check_shape("m", m, rows, columns / group);
    Arena arena;
    Rounding task{rule, weights.data(), upper ? upper->data() : nullptr, static_cast<int>(rows), static_cast<int>(columns),
                  codes.data(), d.data(), dmin.data(), n.data(), m.data(), nullptr};
    task.scratch = reinterpret_cast<float*>(arena.allocate(rounding_scratch(task.columns) * sizeof(float)));
    Released released;
    kernel.round_rows(task);
}

}  // namespace

void bind_rounding(nb::module_& module) {
    using nb::arg;
    module.def("round_rows", round_rows, arg("weights").noconvert(), arg("upper").noconvert().none(), arg("block"),
               arg("group"), arg("low"), arg("high"), arg("minimum"), arg("scales").none(), arg("curved"),
               arg("codes").noconvert(), arg("d").noconvert(), arg("dmin").noconvert(), arg("n").noconvert(), arg("m").noconvert(),
               arg("isa") = nb::none());
}

}  // namespace pronk
