#include "matrix.h"

#include <cstring>

#include "kernels.h"

namespace pronk {

namespace {

constexpr const char* kNames[] = {"f32", "f16", "bf16", "int8", "llm-int8", "q8", "q4", "q4_0"};

}  // namespace

const char* format_name(Format format) { return kNames[static_cast<int>(format)]; }

bool format_from_name(const char* name, Format& format) {
    for (int i = 0; i < static_cast<int>(sizeof kNames / sizeof *kNames); ++i)
        if (std::strcmp(name, kNames[i]) == 0) {
            format = static_cast<Format>(i);
            return true;
        }
    return false;
}

Form form_of(Format format) {
    switch (format) {
        case Format::f32:
        case Format::f16: return Form::f32;
        case Format::bf16: return Form::bf16;
        case Format::int8: return Form::int8;
        case Format::llm_int8: return Form::llm_int8;
        case Format::q8:
        case Format::q4:
        case Format::q4_0: break;
    }
    return Form::q8;
}

int padded_cols(Format format, int cols) {
    switch (format) {
        case Format::f32:
        case Format::f16: return cols;
        case Format::bf16: return (cols + 1) / 2 * 2;
        case Format::int8:
        case Format::llm_int8:
        case Format::q8:
        case Format::q4:
        case Format::q4_0: break;
    }
    return (cols + kGroup - 1) / kGroup * kGroup;
}

size_t panel_bytes(Format format, int cols) {
    const size_t padded = padded_cols(format, cols), groups = padded / kGroup;
    size_t bytes_a_row = 0;
    switch (format) {
        case Format::f32: bytes_a_row = 4 * padded; break;
        case Format::f16:
        case Format::bf16: bytes_a_row = 2 * padded; break;
        case Format::int8:
        case Format::llm_int8: bytes_a_row = padded + 4; break;
        case Format::q8: bytes_a_row = groups * (kGroup + 2); break;
        case Format::q4: bytes_a_row = groups * (kGroup / 2 + 4); break;
        case Format::q4_0: bytes_a_row = groups * (kGroup / 2 + 2); break;
    }
    return kPanelRows * bytes_a_row;
}

}  // namespace pronk
