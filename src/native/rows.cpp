#include "rows.h"

#include "half.h"

namespace pronk {

namespace {

int padded(int cols) { return (cols + kGroup - 1) / kGroup * kGroup; }

// Number k of row t, as the kernels read it; of llm_int8 without outliers.
float element(const Rows& rows, int t, int k) {
    const uint8_t* row = rows.data + t * rows.stride;
    switch (rows.form) {
        case Form::f32: break;
        case Form::bf16: return bf16_to_f32(reinterpret_cast<const uint16_t*>(row)[k]);
        case Form::int8:
        case Form::llm_int8: return rows.scale[t] * static_cast<float>(reinterpret_cast<const int8_t*>(row)[k]);
        case Form::q8:
            return rows.scale[static_cast<size_t>(t) * rows.groups + k / kGroup] *
                   static_cast<float>(reinterpret_cast<const int8_t*>(row)[k]);
    }
    return reinterpret_cast<const float*>(row)[k];
}

}  // namespace

Rows RowsBuffer::rows(Form form, int cols, const OutlierRule& rule) {
    Rows r;
    r.form = form, r.rule = rule;
    r.padded = padded(cols);
    r.stride = aligned(r.padded * (form == Form::f32 ? sizeof(float) : form == Form::bf16 ? 2 : 1));
    r.groups = form == Form::q8 ? r.padded / kGroup : 1;
    r.data = bytes.data, r.scale = scales.data, r.sum = sums.data;
    r.outlier_x = outliers.data, r.outlier_k = places.data, r.outlier_sum = outlier_sums.data;
    r.outlier_begin = begins.data, r.outlier_count = counts.data;
    r.found_x = found.data, r.found_k = found_places.data, r.outliers_used = &used;
    used.store(0, std::memory_order_relaxed);
    return r;
}

void RowsBuffer::reserve(Form form, int tokens, int cols) {
    const Rows r = rows(form, cols, {});
    bytes.reserve(r.stride * tokens);
    if (form == Form::f32 || form == Form::bf16) return;
    scales.reserve(static_cast<size_t>(r.groups) * tokens);
    sums.reserve(static_cast<size_t>(r.groups) * tokens);
    if (form != Form::llm_int8) return;
    const int64_t most = static_cast<int64_t>(cols) * tokens;
    if (most > INT32_MAX) throw std::bad_alloc();
    outliers.reserve(most), places.reserve(most);
    begins.reserve(tokens), counts.reserve(tokens), outlier_sums.reserve(tokens);
    found.reserve(r.padded), found_places.reserve(r.padded);
}

void rest_of(const Rows& rows, int t, const float* x, int cols, float* rest) {
    for (int k = 0; k < cols; ++k) rest[k] = x[k] - element(rows, t, k);
    if (rows.form != Form::llm_int8) return;
    const Rows row = rows.at(t);
    for (int i = 0; i < row.outlier_count[0]; ++i) rest[row.outlier_k[row.outlier_begin[0] + i]] = 0;
}

}  // namespace pronk
