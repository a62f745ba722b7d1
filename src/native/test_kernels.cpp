// Kernels against plain loops, without Python: sanitizers and emulators run this.
#include <cstring>

#include "kernels.h"
#include "test.h"

using namespace pronk;

namespace {

void test_formats() {
    Format format;
    for (int i = 0; i <= static_cast<int>(Format::q4_0); ++i) {
        CHECK(format_from_name(format_name(static_cast<Format>(i)), format) && static_cast<int>(format) == i);
        CHECK(panel_bytes(format, 33) % 64 == 0);
    }
    CHECK(!format_from_name("q5", format));
    CHECK(padded_cols(Format::f32, 33) == 33 && padded_cols(Format::bf16, 33) == 34 && padded_cols(Format::q4, 33) == 64);
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
}

}  // namespace

int main() {
    test_formats();
    test_tables();
    return test_result();
}
