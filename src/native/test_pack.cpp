// 16-bit floats against arithmetic in double; every source into every format, in memory that sanitizers watch.
// tests/native/test_pack.py compares the numbers.
#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <vector>

#include "half.h"
#include "matrix.h"
#include "test_given.h"
#include "test.h"

using namespace pronk;

namespace {

void test_f16() {
    for (int h = 0; h < 0x7c00; ++h) {
        const int exponent = h >> 10, fraction = h & 1023;
        const double value = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
        CHECK(f16_to_f32(h) == value && f16_to_f32(h | 0x8000) == -value);
        CHECK(f32_to_f16(f16_to_f32(h)) == h && f32_to_f16(f16_to_f32(h | 0x8000)) == (h | 0x8000));
        const double next = h + 1 == 0x7c00 ? 65536 : f16_to_f32(h + 1);
        const float middle = static_cast<float>((value + next) / 2);
        CHECK(f32_to_f16(middle) == (h & 1 ? h + 1 : h));  // ties to even, and to infinity after the greatest
        CHECK(f32_to_f16(std::nextafter(middle, 0.0f)) == h);
        CHECK(f32_to_f16(std::nextafter(middle, INFINITY)) == h + 1);
    }
    CHECK(f16_to_f32(0x7c00) == INFINITY && f16_to_f32(0xfc00) == -INFINITY);
    CHECK(f32_to_f16(INFINITY) == 0x7c00 && f32_to_f16(-1e30f) == 0xfc00 && !f16_is_finite(0x7c00));
    for (int h : {0x7c01, 0x7e00, 0xffff}) CHECK(std::isnan(f16_to_f32(h)));
    for (uint32_t bits : {0x7f800001u, 0x7fc00000u, 0xffffffffu}) {
        const uint16_t h = f32_to_f16(std::bit_cast<float>(bits));
        CHECK(std::isnan(f16_to_f32(h)) && h >> 15 == static_cast<int>(bits >> 31));
    }
}

void test_bf16() {
    for (int h = 0; h < 0x7f80; ++h) {
        CHECK(f32_to_bf16(bf16_to_f32(h)) == h && f32_to_bf16(bf16_to_f32(h | 0x8000)) == (h | 0x8000));
        const float middle = std::bit_cast<float>(static_cast<uint32_t>(h) << 16 | 0x8000);
        CHECK(f32_to_bf16(middle) == (h & 1 ? h + 1 : h));
        CHECK(f32_to_bf16(std::nextafter(middle, 0.0f)) == h);
        CHECK(f32_to_bf16(std::nextafter(middle, INFINITY)) == h + 1);
    }
    CHECK(f32_to_bf16(-INFINITY) == 0xff80 && !bf16_is_finite(0xff80));
    for (uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xffffffffu})
        CHECK(std::isnan(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(bits)))));
}

void test_rows(Source source, Format format, bool wild) {
    const int block = traits(source).elements, bytes = traits(source).bytes, before = traits(source).before;
    const int whole = traits(format).pack ? block : std::max(block, traits(format).columns);
    const int rows = between(1, 140), cols = whole * between(1, 600 / whole);
    const size_t stride = before + static_cast<size_t>(cols / block) * bytes;
    const auto src = std::make_unique<uint8_t[]>(rows * stride);  // random, with finite scales unless `wild`
    for (size_t i = 0; i < rows * stride; ++i) {
        const size_t at = i % stride;
        const size_t first = halves_at(source) + (bytes == 4 ? 3 : 1);
        const bool high = before ? at == 3 : at % bytes == first || (at % bytes == first + 2 && block > 1);
        src[i] = static_cast<uint8_t>(between(0, 255) & (high && !wild ? 0xb7 : 0xff));
    }
    Matrix w = matrix_of(format, rows, cols);
    const auto data = std::make_unique<uint8_t[]>(w.nbytes());
    w.data = data.get();
    std::fill_n(w.data, w.nbytes(), uint8_t{0xa5});
    const int middle = between(0, rows), end = w.panels * kPanelRows;
    const bool first = pack_rows(w, src.get(), stride, source, 0, middle, {});
    const bool second = pack_rows(w, src.get() + middle * stride, stride, source, middle, rows, {});
    const bool takes = traits(format).pack || traits(format).holds_codes_of(source);
    CHECK(wild || (first && second) == takes);
    pack_zero_rows(w, rows, end);
    if (!first || !second) return;
    std::vector<float> out(cols);
    for (int r = 0; r < end; ++r) {
        unpack_row(w, r, out.data());
        // Of rows of int8, a scale near the greatest float is one that only its products show.
        for (const float x : out) CHECK(r < rows ? std::isfinite(x) || (wild && before) : x == 0);
    }
}

}  // namespace

int main() {
    test_f16();
    test_bf16();
    for (const SourceTraits& source : kSources)
        for (const FormatTraits& format : kFormats)
            for (int round = 0; round < 16; ++round) test_rows(source.id, format.id, round % 4 == 3);
    return test_result();
}
