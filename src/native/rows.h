// Memory that a step's rows lie in, grown before the step begins.
#pragma once

#include <cstdint>
#include <new>

#include "kernels.h"

namespace pronk {

inline size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

template <class T>
struct Buffer {
    T* data = nullptr;
    size_t size = 0;

    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    Buffer(Buffer&& other) noexcept : data(other.data), size(other.size) { other.data = nullptr, other.size = 0; }
    ~Buffer() { release(); }
    void release() { ::operator delete[](data, std::align_val_t{64}), data = nullptr, size = 0; }
    void reserve(size_t count) {
        if (count <= size) return;
        release();
        data = static_cast<T*>(::operator new[](aligned(count * sizeof(T)), std::align_val_t{64}));
        size = count;
    }
};

// Some rows in one activation format.
struct RowsBuffer {
    Buffer<uint8_t> bytes, narrow;
    Buffer<Spilled> spilled;
    Buffer<float> scales, scaled_sums, turned, outliers, outlier_sums, found;
    Buffer<int32_t> sums, half_sums, words, places, found_places, begins, counts, spilled_counts;
    std::atomic<int32_t> used{0};

    // Without any outliers in them.
    Rows rows(ActivationFormat format, int cols, const OutlierRule& rule);
    // narrowed: with room for Rows::narrow, always or never. Throws std::bad_alloc.
    void reserve(ActivationFormat format, int tokens, int cols, bool narrowed);
};

// What rounding left of row t, which was converted last: x - row, [cols].
void rest_of(const Rows& rows, int t, const float* x, int cols, float* rest);

}  // namespace pronk
