// Kernels against plain loops, without Python: sanitizers and emulators run this.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels.h"
#include "rows.h"
#include "test.h"
#include "turn.h"

using namespace pronk;

namespace {

void test_formats() {
    const auto panel_bytes = [](Format format, int cols) { return matrix_of(format, 1, cols).panel_bytes; };
    for (const FormatTraits& format : kFormats) {
        CHECK(find_named(kFormats, format.name) == &format);  // no two have one name
        CHECK(panel_bytes(format.id, 33) % 64 == 0);
    }
    for (const KVTraits& type : kKVTypes) CHECK(find_named(kKVTypes, type.name) == &type);
    for (const SourceTraits& source : kSources) {
        CHECK(find_named(kSources, source.name) == &source);
        bool held = false;
        for (const FormatTraits& format : kFormats) held |= format.holds_codes_of(source.id);
        CHECK(held == (source.pack_codes != nullptr));
    }
    CHECK(!find_named(kFormats, "q5"));
    CHECK(traits(Format::f32).padded(33) == 33 && traits(Format::bf16).padded(33) == 34 && traits(Format::q4).padded(33) == 64);
    CHECK(panel_bytes(Format::bf16, 3) == 2 * 64 * 2 * 2);
    CHECK(panel_bytes(Format::int8, 32) == 8 * 64 * 4 + 64 * 4);
    CHECK(panel_bytes(Format::llm_int8, 33) == panel_bytes(Format::int8, 33));
    CHECK(panel_bytes(Format::q8, 64) == 2 * (8 * 64 * 4 + 64 * 2));
    CHECK(panel_bytes(Format::q4, 64) == 2 * (4 * 64 * 4 + 2 * 64 * 2));
    CHECK(panel_bytes(Format::q4_0, 64) == 2 * (4 * 64 * 4 + 64 * 2));
}

void test_tables() {
    CHECK(kernels_named("no such") == nullptr);
    CHECK(kernels_named(kernels().name) == &kernels());
    CHECK(kernels_at(0) == &kernels() || std::getenv("PRONK_ISA"));
    int count = 0;
    while (kernels_at(count)) ++count;
    CHECK(kernels_at(count - 1) == kernels_named("portable"));
}

void test_argmax() {
    constexpr float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    const auto argmax = [](const std::vector<float>& x) { return kernels().argmax(x.data(), static_cast<int>(x.size())); };
    for (const int size : {1, 2, 15, 16, 17, 511, 512, 513, 1100}) {
        std::vector<float> x(size);
        for (int i = 0; i < size; ++i) x[i] = static_cast<float>(i * 7 % 5) - 9;
        for (int at = 0; at < size; at += 1 + size / 50) {
            std::vector<float> y = x;
            y[at] = -4;
            CHECK(argmax(y) == at);
            if (at + 3 < size) {
                y[at + 3] = -4;  // the first of several
                CHECK(argmax(y) == at);
            }
            y[at] = nan;
            CHECK(argmax(y) == -1);
            y[at] = inf;
            CHECK(argmax(y) == -1);
            y[at] = -inf;
            CHECK(argmax(y) == std::max_element(y.begin(), y.end()) - y.begin() || size == 1);
        }
        CHECK(argmax(std::vector<float>(size, -inf)) == -1);
        CHECK(argmax(std::vector<float>(size, -0.0f)) == 0);
    }
}

// Vectors turn in place what turn.h turns from half to half: the same bits, of zeros of both signs and numbers far apart too.
void test_turning() {
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    for (const int cols : {1, 8, 16, 24, 32, 48, 64, 128, 192, 256, 576, 1536, 5632}) {
        RowsBuffer buffer;
        buffer.reserve(ActivationFormat::int8, 1, cols, false);
        const Rows rows = buffer.rows(ActivationFormat::int8, cols, {});
        for (int round = 0; round < 4; ++round) {
            std::vector<float> x(cols);
            for (int i = 0; i < cols; ++i) {
                x[i] = normal(generator);
                if (round == 1 && i % 3) x[i] = i % 2 ? 0.0f : -0.0f;
                if (round == 2 && i % 7 == 0) x[i] *= 1e30f;
                if (round == 3) x[i] *= 1e-42f;
            }
            std::vector<float> turned = x;
            turn(turned.data(), cols, turned_together(cols));
            for (int i = 0; const Kernels* kernel = kernels_at(i); ++i) {
                kernel->convert(x.data(), cols, rows, 0);
                CHECK(std::memcmp(turned.data(), rows.turned, cols * sizeof(float)) == 0);
            }
        }
    }
}

}  // namespace

int main() {
    test_argmax();
    test_formats();
    test_tables();
    test_turning();
    return test_result();
}
