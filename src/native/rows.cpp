#include "rows.h"

#include "half.h"
#include "turn.h"

namespace pronk {

namespace {

// Number k of row t, as the kernels read it, without outliers.
float element(const Rows& rows, int t, int k) {
    const uint8_t* row = rows.data + t * rows.stride;
    const ActivationTraits& format = traits(rows.format);
    if (format.exact()) return reinterpret_cast<const float*>(row)[k];
    if (!format.scaled) return bf16_to_f32(reinterpret_cast<const uint16_t*>(row)[k]);
    const float scale = rows.scale[static_cast<size_t>(t) * rows.groups + (format.grouped ? k / kGroup : 0)];
    return scale * static_cast<float>(reinterpret_cast<const int8_t*>(row)[k]);
}

}  // namespace

Rows RowsBuffer::rows(ActivationFormat format, int cols, const OutlierRule& rule) {
    Rows r;
    r.format = format, r.rule = rule;
    r.padded = (cols + kGroup - 1) / kGroup * kGroup;
    r.stride = aligned(static_cast<size_t>(r.padded) * traits(format).bytes);
    r.groups = traits(format).grouped ? r.padded / kGroup : 1;
    r.data = bytes.data, r.scale = scales.data, r.sum = sums.data, r.turned = turned.data;
    if (traits(format).grouped) r.half_sums = half_sums.data, r.words = words.data, r.scaled_sum = scaled_sums.data;
    r.narrow = narrow.data, r.spilled = spilled.data, r.spilled_count = spilled_counts.data;
    r.outlier_x = outliers.data, r.outlier_k = places.data, r.outlier_sum = outlier_sums.data;
    r.outlier_begin = begins.data, r.outlier_count = counts.data;
    r.found_x = found.data, r.found_k = found_places.data, r.outliers_used = &used;
    used.store(0, std::memory_order_relaxed);
    return r;
}

void RowsBuffer::reserve(ActivationFormat format, int tokens, int cols, bool narrowed) {
    const Rows r = rows(format, cols, {});
    bytes.reserve(r.stride * tokens);
    if (!traits(format).scaled) return;
    scales.reserve(static_cast<size_t>(r.groups) * tokens);
    sums.reserve(static_cast<size_t>(r.groups) * tokens);
    if (traits(format).grouped) {
        const size_t count = static_cast<size_t>(r.groups) * tokens;
        half_sums.reserve(2 * count), words.reserve(count), scaled_sums.reserve(count);
    } else if (narrowed) {
        narrow.reserve(r.stride * tokens), spilled.reserve(r.most_spilled() * tokens), spilled_counts.reserve(tokens);
    }
    if (traits(format).turned) turned.reserve(r.padded);
    if (!traits(format).outliers) return;
    const int64_t most = static_cast<int64_t>(cols) * tokens;
    if (most > INT32_MAX) throw std::bad_alloc();
    outliers.reserve(most), places.reserve(most);
    begins.reserve(tokens), counts.reserve(tokens), outlier_sums.reserve(tokens);
    found.reserve(r.padded), found_places.reserve(r.padded);
}

void rest_of(const Rows& rows, int t, const float* x, int cols, float* rest) {
    const bool turned = traits(rows.format).turned;
    if (turned) x = rows.turned;
    for (int k = 0; k < cols; ++k) rest[k] = x[k] - element(rows, t, k);
    if (turned) turn(rest, cols, turned_together(cols));
    if (!traits(rows.format).outliers) return;
    const Rows row = rows.at(t);
    for (int i = 0; i < row.outlier_count[0]; ++i) rest[row.outlier_k[row.outlier_begin[0] + i]] = 0;
}

}  // namespace pronk
