// Tests of the native code that need no Python: sanitizers and emulators run them.
#include <cstdio>

#include "matrix.h"

using namespace pronk;

namespace {

int failures = 0;

#define CHECK(condition)                                                           \
    do {                                                                           \
        if (!(condition)) {                                                        \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);   \
            ++failures;                                                            \
        }                                                                          \
    } while (0)

void test_formats() {
    for (int i = 0; i <= static_cast<int>(Format::q4_0); ++i) {
        Format format;
        CHECK(format_from_name(format_name(static_cast<Format>(i)), format) && static_cast<int>(format) == i);
        CHECK(panel_bytes(format, 33) % 64 == 0);
    }
    Format format;
    CHECK(!format_from_name("q5", format));
    CHECK(padded_cols(Format::bf16, 33) == 34 && padded_cols(Format::q4, 33) == 64 && padded_cols(Format::f32, 33) == 33);
    CHECK(panel_bytes(Format::q4, 64) == 2 * (4 * 64 * 4 + 2 * 64 * 2));
}

}  // namespace

int main() {
    test_formats();
    std::printf(failures ? "%d failures\n" : "all passed\n", failures);
    return failures != 0;
}
