// Attention of every KV type under every instruction set, against plain loops in double; and that what shares a pass
// with a row changes none of its bits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "arena.h"
#include "kernels.h"
#include "test.h"
#include "test_random.h"

using namespace pronk;

namespace {

// How far a stored number may be from what was given, relative to the largest of its vector. A type left out is a failure.
double precision(KVType type) {
    switch (type) {
        case KVType::f32: return 0x1p-22;
        case KVType::f16: return 0x1p-11;
        case KVType::bf16: return 0x1p-8;
        case KVType::int8: return 1 / 254.0;
        case KVType::q4: return 1 / 30.0;
    }
    return NAN;
}

struct Keys {
    KVLayout layout;
    std::vector<uint8_t> memory;
    uint8_t* data;
    size_t stride;
    std::vector<int32_t> table;
    std::vector<std::vector<float>> keys, values;

    Keys(const Kernels& kernel, KVType type, int head_dim, int count) : layout(kv_layout(type, head_dim)) {
        const int blocks = (count + kKVBlock - 1) / kKVBlock;
        stride = layout.keys_bytes + layout.values_bytes;
        memory.assign(stride * blocks + 64, 0xff);  // what was never written is NaN
        data = (uint8_t*)(((uintptr_t)memory.data() + 63) / 64 * 64);
        for (int b = 0; b < blocks; ++b) table.push_back(b);
        std::shuffle(table.begin(), table.end(), random_bits);
        for (int i = 0; i < count; ++i) {
            keys.emplace_back(), values.emplace_back();
            for (int d = 0; d < head_dim; ++d) keys[i].push_back(normal()), values[i].push_back(normal());
            kernel.store_kv(layout, data + table[i / kKVBlock] * stride, i % kKVBlock, keys[i].data(), values[i].data());
        }
    }
};

void test(const Kernels& kernel, KVType type, int head_dim, int count) {
    const Keys kv(kernel, type, head_dim, count);
    const int rows = between(1, kernel.attention_rows);
    std::vector<std::vector<float>> q(rows), out(rows, std::vector<float>(head_dim, 9));
    std::vector<int32_t> limit;
    for (int r = 0; r < rows; ++r) {
        for (int d = 0; d < head_dim; ++d) q[r].push_back(normal());
        limit.push_back(between(std::max(1, count - 80), count));
    }
    std::sort(limit.begin(), limit.end());
    std::vector<const float*> q_pointers;
    std::vector<float*> out_pointers;
    for (int r = 0; r < rows; ++r) q_pointers.push_back(q[r].data()), out_pointers.push_back(out[r].data());
    Arena arena;
    float* scratch = (float*)arena.allocate(attention_scratch(head_dim) * sizeof(float));
    const float scale = 1 / std::sqrt((float)head_dim);
    AttentionTask task{q_pointers.data(), out_pointers.data(), limit.data(), rows, kv.data, kv.stride, kv.table.data(),
                       scale, scratch};
    kernel.attention(kv.layout, task);

    for (int r = 0; r < rows; ++r) {
        std::vector<double> weight(limit[r]), expected(head_dim);
        double most = -1e30, mass = 0, widest = 0;
        for (int i = 0; i < limit[r]; ++i) {
            for (int d = 0; d < head_dim; ++d) weight[i] += (double)q[r][d] * kv.keys[i][d] * scale;
            most = std::max(most, weight[i]);
        }
        for (double& w : weight) mass += w = std::exp(w - most);
        for (int i = 0; i < limit[r]; ++i)
            for (int d = 0; d < head_dim; ++d) {
                expected[d] += weight[i] / mass * kv.values[i][d];
                widest = std::max(widest, (double)std::fabs(kv.values[i][d]));
            }
        // Scores of |q| |k| / sqrt(D), a few units, are off by their precision, and probabilities by e to that.
        const double bound = 40 * precision(type) * widest + 1e-5;
        for (int d = 0; d < head_dim; ++d)
            if (!(std::fabs(out[r][d] - expected[d]) <= bound)) {
                std::fprintf(stderr, "%s KV type %s D=%d %d keys: row %d [%d] is %g, not %g (within %g)\n", kernel.name,
                             traits(type).name, head_dim, count, r, d, out[r][d], expected[d], bound);
                CHECK(false);
                return;
            }
    }

    // In tiles scores have another order: a weight is rounded to the next bfloat16 at most.
    if (const Kernels* plain = kernels_named("avx512-bf16"); plain && std::strcmp(kernel.name, "amx") == 0) {
        std::vector<std::vector<float>> other = out;
        for (int r = 0; r < rows; ++r) out_pointers[r] = other[r].data();
        float largest = 0;
        for (const std::vector<float>& value : kv.values)
            for (const float v : value) largest = std::max(largest, std::fabs(v));
        plain->attention(kv.layout, task);
        for (int r = 0; r < rows; ++r)
            for (int d = 0; d < head_dim; ++d) CHECK(std::fabs(other[r][d] - out[r][d]) <= 0x1p-8f * largest);
    }

    std::vector<float> alone(head_dim);
    const int r = between(0, rows - 1);
    float* alone_pointer = alone.data();
    task.q = q_pointers.data() + r, task.out = &alone_pointer, task.limit = limit.data() + r, task.rows = 1;
    kernel.attention(kv.layout, task);
    CHECK(std::memcmp(alone.data(), out[r].data(), head_dim * sizeof(float)) == 0);
}

// What cannot be stored makes NaN of the rows that see it, and of no other.
void test_overflow(const Kernels& kernel, KVType type) {
    const int d = 20, count = 70, bad = 30;
    Keys kv(kernel, type, d, count);
    kv.values[bad][7] = type == KVType::f16 ? 1e6f : INFINITY;
    kernel.store_kv(kv.layout, kv.data + kv.table[0] * kv.stride, bad, kv.keys[bad].data(), kv.values[bad].data());
    const std::vector<float> q(d, 0.5f);
    std::vector<float> before(d), after(d);
    const float* queries[] = {q.data(), q.data()};
    float* out[] = {before.data(), after.data()};
    const int32_t limit[] = {bad, bad + 1};
    Arena arena;
    float* scratch = (float*)arena.allocate(attention_scratch(d) * sizeof(float));
    kernel.attention(kv.layout, {queries, out, limit, 2, kv.data, kv.stride, kv.table.data(), 1, scratch});
    for (int i = 0; i < d; ++i) CHECK(std::isfinite(before[i]) && std::isnan(after[i]));
}

}  // namespace

int main() {
    for (int i = 0; const Kernels* kernel = kernels_at(i); ++i) {
        std::printf("%s\n", kernel->name);
        for (const KVTraits& type : kKVTypes) test_overflow(*kernel, type.id);
        for (const KVTraits& type : kKVTypes)
            for (int head_dim : {2, 6, 16, 50, 64, 80, 128, 130})
                for (int count : {1, 63, 64, 65, 255, 256, 257, between(1, 900)})
                    test(*kernel, type.id, head_dim, count);
    }
    return test_result();
}
