// Rows that a format can be packed from: floats, and of a format that floats are never rounded to random blocks.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "half.h"
#include "matrix.h"
#include "test_random.h"

// Where the halves of a block of a source begin: its scale, and behind it a minimum if it has one.
inline int halves_at(pronk::Source source) {
    switch (source) {
        case pronk::Source::q6_k: return 208;
        case pronk::Source::q3_k: return 108;
        case pronk::Source::q2_k: return 80;
        default: return 0;
    }
}

struct Given {
    pronk::Source source = pronk::Source::f32;
    size_t stride = 0;
    std::vector<uint8_t> bytes;
};

// Of weights that are some 0.05 large. `largest`: codes are the largest that there are, but for one of 32 where a minimum needs it.
inline Given given_rows(pronk::Format format, int rows, int cols, bool largest = false) {
    using namespace pronk;
    const FormatTraits& of = traits(format);
    Given given;
    if (of.pack) {
        given.stride = cols * sizeof(float);
        given.bytes.resize(rows * given.stride);
        for (int i = 0; i < rows * cols; ++i) {
            const float x = !largest ? 0.05f * normal() : i % cols % kGroup == kGroup - 1 ? 0 : 0.05f;
            std::memcpy(given.bytes.data() + i * sizeof x, &x, sizeof x);
        }
        return given;
    }
    given.source = static_cast<Source>(std::countr_zero(of.codes_of));
    const SourceTraits& source = traits(given.source);
    given.stride = static_cast<size_t>(cols) / source.elements * source.bytes;
    given.bytes.resize(rows * given.stride);
    for (uint8_t& byte : given.bytes) byte = static_cast<uint8_t>(between(largest ? 255 : 0, 255));
    for (size_t block = 0; block < given.bytes.size(); block += source.bytes)
        for (int half = 0; half < (of.minima ? 2 : 1); ++half) {
            const uint16_t scale = f32_to_f16(0.002f * (largest ? 1 : normal()));
            std::memcpy(given.bytes.data() + block + halves_at(given.source) + 2 * half, &scale, sizeof scale);
        }
    return given;
}
