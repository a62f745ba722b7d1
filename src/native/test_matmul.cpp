// Products of every format under every instruction set, against plain loops in double over the unpacked weights.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "adapter.h"
#include "arena.h"
#include "kernels.h"
#include "rows.h"
#include "test.h"
#include "test_given.h"
#include "turn.h"

using namespace pronk;

namespace {

std::vector<float> normals(size_t count, float scale) {
    std::vector<float> x(count);
    for (float& v : x) v = scale * normal();
    return x;
}

float outlier(const Rows& row, int i) {
    const int at = row.outlier_begin[0] + i;
    return row.outlier_x[at] / kInPlace[row.outlier_k[at] % 4];
}

// T rows as a format has them, and what is in them after rounding.
struct Activations {
    RowsBuffer buffer;
    Rows rows;
    std::vector<double> value;  // [T][K], turned where the format is

    Activations(const Kernels& kernel, ActivationFormat format, const std::vector<float>& x, int tokens, int cols, OutlierRule rule = {}) {
        buffer.reserve(format, tokens, cols, kernel.sums_narrow && between(0, 3));  // both ways give the same bits
        rows = buffer.rows(format, cols, rule);
        for (int t = 0; t < tokens; ++t) kernel.convert(x.data() + (size_t)t * cols, cols, rows, t);
        for (int t = 0; t < tokens; ++t) {
            for (int k = 0; k < cols; ++k) value.push_back(at(t, k));
            if (format != ActivationFormat::llm_int8) continue;
            const Rows row = rows.at(t);
            for (int i = 0; i < row.outlier_count[0]; ++i) {
                double& place = value[(size_t)t * cols + row.outlier_k[row.outlier_begin[0] + i]];
                CHECK(place == 0);
                CHECK(i == 0 || row.outlier_k[row.outlier_begin[0] + i] > row.outlier_k[row.outlier_begin[0] + i - 1]);
                place = outlier(row, i);
            }
        }
    }
    double at(int t, int k) const {
        const uint8_t* row = rows.data + t * rows.stride;
        if (rows.format == ActivationFormat::f32) return ((const float*)row)[k];
        if (!traits(rows.format).grouped && traits(rows.format).scaled) return (double)rows.scale[t] * ((const int8_t*)row)[k];
        if (rows.format == ActivationFormat::q8) return (double)rows.scale[t * rows.groups + k / kGroup] * ((const int8_t*)row)[k];
        const uint32_t bits = (uint32_t)((const uint16_t*)row)[k] << 16;
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    }
};

OutlierRule some_rule() {
    const float thresholds[] = {0, 0.5f, 2, 6, INFINITY};
    const int counts[] = {0, 1, 8, 15, 16, 40, 1000};
    return {thresholds[between(0, 4)], counts[between(0, 6)]};
}

// `largest`: every number of x and every code is as large as it can be: of codes that are summed as they are, the most that sums of
// 16 bits have to hold.
void test_product(const Kernels& kernel, Format format, int tokens, int rows, int cols, bool largest = false) {
    Arena arena;
    Matrix w = matrix_of(format, rows, cols);
    w.data = arena.allocate(w.nbytes());
    const Given weights = given_rows(format, rows, cols, largest);
    std::vector<float> x = normals((size_t)tokens * cols, 1);
    for (size_t i = 0; largest && i < x.size(); ++i) x[i] = i / cols % 2 ? -1.0f : 1.0f;
    CHECK(pack_rows(w, weights.bytes.data(), weights.stride, weights.source, 0, rows, {}));
    pack_zero_rows(w, rows, (int64_t)w.panels * kPanelRows);
    std::vector<float> bias(w.panels * kPanelRows);
    for (int n = 0; n < rows; ++n) bias[n] = normal();
    if (between(0, 1)) w.bias = bias.data();

    const Activations a(kernel, traits(format).activations, x, tokens, cols, some_rule());
    const size_t stride = rows + 5;
    std::vector<float> y(stride * tokens, 3.0f);
    const Output out{y.data(), stride, between(0, 1) ? Epilogue::add : Epilogue::store, rows};
    const int halves = 2 * w.panels, middle = between(0, halves);
    kernel.matmul(w, a.rows, tokens, 0, middle, out);
    kernel.matmul(w, a.rows, tokens, middle, halves, out);

    std::vector<float> row(cols);
    for (int n = 0; n < rows; ++n) {
        unpack_row(w, n, row.data());
        if (is_turned(format)) turn(row.data(), cols, turned_together(cols));
        for (int t = 0; t < tokens; ++t) {
            double sum = w.bias ? bias[n] : 0, size = std::fabs(sum);
            for (int k = 0; k < cols; ++k) {
                const double product = (double)row[k] * a.value[(size_t)t * cols + k];
                sum += product, size += std::fabs(product);
            }
            if (out.epilogue == Epilogue::add) sum += 3, size += 3;
            // Each of K sums and products is off by half a unit of float at most.
            const double bound = (cols + 8) * size * 0x1p-23;
            if (!(std::fabs(y[t * stride + n] - sum) <= bound)) {
                std::fprintf(stderr, "%s %s T=%d N=%d K=%d: [%d][%d] is %g, not %g (within %g)\n", kernel.name,
                             traits(format).name, tokens, rows, cols, t, n, y[t * stride + n], sum, bound);
                CHECK(false);
                return;
            }
        }
    }
    for (int t = 0; t < tokens; ++t)
        for (size_t n = rows; n < stride; ++n) CHECK(y[t * stride + n] == 3.0f);  // nothing is written beside

    // Alone a token gets the same bits.
    std::vector<float> alone(rows, 3.0f);
    const int t = between(0, tokens - 1);
    kernel.matmul(w, a.rows.at(t), 1, 0, halves, {alone.data(), (size_t)rows, out.epilogue, rows});
    CHECK(std::memcmp(alone.data(), y.data() + t * stride, rows * sizeof(float)) == 0);
}

// In narrow panels an adapter's first factor has the bits that it has as any other matrix.
void test_first_factor(const Kernels& kernel, Format format, int tokens, int ranks, int cols) {
    Arena arena;
    Matrix wide = matrix_of(format, ranks, cols);
    wide.data = arena.allocate(wide.nbytes());
    const Given weights = given_rows(format, ranks, cols);
    CHECK(pack_rows(wide, weights.bytes.data(), weights.stride, weights.source, 0, ranks, {}));
    pack_zero_rows(wide, ranks, (int64_t)wide.panels * kPanelRows);
    const Matrix a = narrow(wide, arena);
    CHECK(a.panels == (ranks + kRankRows - 1) / kRankRows);
    const Activations x(kernel, traits(format).activations, normals((size_t)tokens * cols, 1), tokens, cols, some_rule());
    const size_t stride = ranks + 3;
    std::vector<float> expected(stride * tokens, 3.0f), u = expected;
    kernel.matmul(wide, x.rows, tokens, 0, 2 * wide.panels, {expected.data(), stride, Epilogue::store, ranks});
    kernel.first_factor(a, x.rows, tokens, u.data(), stride);
    if (u == expected) return;
    std::fprintf(stderr, "%s %s T=%d ranks=%d K=%d: first factors differ\n", kernel.name, traits(format).name, tokens, ranks, cols);
    CHECK(false);
}

// Against a plain reading of the rule, with many ties, zeros of either sign, and rows with fewer numbers than are wanted.
void test_outliers(const Kernels& kernel) {
    for (int round = 0; round < 300; ++round) {
        const int cols = between(1, 300), kinds = between(1, 40);
        const OutlierRule rule = some_rule();
        std::vector<float> x(cols);
        for (float& v : x) {
            v = round % 2 ? normal() * (between(0, 20) ? 1 : 20) : (float)between(-kinds, kinds) / 4;
            if (!between(0, 9)) v = between(0, 1) ? 0.0f : -0.0f;
        }
        std::vector<float> ordered(cols);
        for (int k = 0; k < cols; ++k) ordered[k] = std::fabs(x[k]);
        std::sort(ordered.begin(), ordered.end(), std::greater<>());
        const float nth = rule.count == 0 ? INFINITY : ordered[std::min(rule.count, cols) - 1];
        std::vector<int> expected;
        float rest = 0;
        for (int k = 0; k < cols; ++k) {
            const float size = std::fabs(x[k]);
            if (size > rule.threshold || (size >= nth && size > 0)) expected.push_back(k);
            else rest = std::max(rest, size);
        }
        const Activations a(kernel, ActivationFormat::llm_int8, x, 1, cols, rule);
        CHECK(a.rows.outlier_count[0] == (int)expected.size());
        if (a.rows.outlier_count[0] != (int)expected.size()) return;
        for (size_t i = 0; i < expected.size(); ++i)
            CHECK(a.rows.outlier_k[i] == expected[i] && outlier(a.rows, i) == x[expected[i]]);
        CHECK(a.rows.scale[0] == rest / 127);
        const int8_t* codes = (const int8_t*)a.rows.data;
        int32_t sum = 0;
        for (int k = 0; k < cols; ++k) sum += codes[k];
        CHECK(a.rows.sum[0] == sum);
        for (const int k : expected) CHECK(codes[k] == 0);
    }
    // What is not finite gives no number, whether or not it would be an outlier.
    for (const float wrong : {NAN, INFINITY, -INFINITY})
        for (const OutlierRule rule : {OutlierRule{}, OutlierRule{INFINITY, 0}, OutlierRule{0, 0}}) {
            std::vector<float> x(40, 1.0f);
            x[33] = wrong;
            const Activations a(kernel, ActivationFormat::llm_int8, x, 1, 40, rule);
            CHECK(std::isnan(a.rows.scale[0]) && a.rows.outlier_count[0] == 0);
        }
}

// Without outliers it is int8 that is not turned, to the bit; and it is another thing with them.
void test_llm_int8_is_int8(const Kernels& kernel) {
    const int n = 150, k = 200, tokens = 9;
    Arena arena;
    Matrix w = matrix_of(Format::int8_plain, n, k);
    w.data = arena.allocate(w.nbytes());
    const std::vector<float> weights = normals(n * k, 0.1f), x = normals(tokens * k, 1);
    CHECK(pack_rows(w, (const uint8_t*)weights.data(), k * 4, Source::f32, 0, n, {}));
    pack_zero_rows(w, n, 3 * kPanelRows);
    const auto product = [&](Format format, OutlierRule rule) {
        w.format = format;
        const Activations a(kernel, traits(format).activations, x, tokens, k, rule);
        std::vector<float> y(tokens * n);
        kernel.matmul(w, a.rows, tokens, 0, 6, {y.data(), (size_t)n, Epilogue::store, n});
        return y;
    };
    const std::vector<float> plain = product(Format::int8_plain, {});
    CHECK(product(Format::llm_int8, {INFINITY, 0}) == plain);
    CHECK(product(Format::llm_int8, {INFINITY, 1}) != plain);
    CHECK(product(Format::llm_int8, {2, 0}) != plain);
}

void test_swiglu(const Kernels& kernel) {
    const int f = 75, c = 40, tokens = 7;
    Arena arena;
    Matrix w = matrix_of(Format::f32, (f + 31) / 32 * kPanelRows, c);
    w.data = arena.allocate(w.nbytes());
    const std::vector<float> gate = normals(f * c, 0.3f), up = normals(f * c, 0.3f), x = normals(tokens * c, 1);
    CHECK(pack_rows(w, (const uint8_t*)gate.data(), c * 4, Source::f32, 0, f, {0, 32, 64}));
    CHECK(pack_rows(w, (const uint8_t*)up.data(), c * 4, Source::f32, 0, f, {32, 32, 64}));
    const Activations a(kernel, ActivationFormat::f32, x, tokens, c);
    std::vector<float> y(tokens * f);
    kernel.matmul(w, a.rows, tokens, 0, 2 * w.panels, {y.data(), (size_t)f, Epilogue::swiglu, f});
    for (int t = 0; t < tokens; ++t)
        for (int n = 0; n < f; ++n) {
            double g = 0, u = 0;
            for (int k = 0; k < c; ++k) g += (double)gate[n * c + k] * x[t * c + k], u += (double)up[n * c + k] * x[t * c + k];
            CHECK(std::fabs(y[t * f + n] - g / (1 + std::exp(-g)) * u) < 1e-4);
        }
}

// Rows in two parts give the sum of what the parts give, however many there are.
void test_pairs(const Kernels& kernel, Format format) {
    const int n = 70, k = traits(format).pack ? 45 : 256, tokens = 2 * between(1, 8);
    Arena arena;
    Matrix w = matrix_of(format, n, k);
    w.data = arena.allocate(w.nbytes());
    const Given weights = given_rows(format, n, k);
    const std::vector<float> x = normals(tokens * k, 1);
    CHECK(pack_rows(w, weights.bytes.data(), weights.stride, weights.source, 0, n, {}));
    pack_zero_rows(w, n, 2 * kPanelRows);
    const Activations a(kernel, traits(format).activations, x, tokens, k);
    std::vector<float> each(tokens * n), sums(tokens / 2 * n);
    kernel.matmul(w, a.rows, tokens, 0, 4, {each.data(), (size_t)n, Epilogue::store, n});
    kernel.matmul(w, a.rows, tokens, 0, 4, {sums.data(), (size_t)n, Epilogue::pairs, n});
    for (int t = 0; t < tokens / 2; ++t)
        for (int i = 0; i < n; ++i) CHECK(sums[t * n + i] == each[2 * t * n + i] + each[(2 * t + 1) * n + i]);
}

// Whole numbers are summed exactly: every instruction set gives the same. Of x all may be as large as they can be, or of sums
// around what 16 bits hold of them.
void test_extremes(const Kernels& kernel, Format format, int tokens) {
    constexpr int n = 70, k = 264;
    constexpr float large[] = {127, -127, 64, -64, 65, -65, 127, -127}, few[] = {32, 33, 32, 33, 32, -32, 0, -33};
    Arena arena;
    Matrix w = matrix_of(format, n, k);
    w.data = arena.allocate(w.nbytes());
    std::vector<float> weights(n * k), x(tokens * k);
    for (int i = 0; i < n; ++i)  // some rows of one sign alone
        for (int j = 0; j < k; ++j) weights[i * k + j] = i % 3 == 0 || (i % 3 == 1 && between(0, 1)) ? 127.0f : -127.0f;
    for (int t = 0; t < tokens; ++t)
        for (int j = 0; j < k; ++j) x[t * k + j] = j == 0 ? 127.0f : t % 2 ? few[between(0, 7)] : large[between(0, 7)];
    CHECK(pack_rows(w, (const uint8_t*)weights.data(), k * sizeof(float), Source::f32, 0, n, {}));
    pack_zero_rows(w, n, 2 * kPanelRows);
    const Activations a(kernel, traits(format).activations, x, tokens, k, {INFINITY, 0});  // no outliers
    std::vector<float> y(tokens * n);
    kernel.matmul(w, a.rows, tokens, 0, 4, {y.data(), n, Epilogue::store, n});
    for (int t = 0; t < tokens; ++t)
        for (int i = 0; i < n; ++i) {
            float sum = 0;
            for (int j = 0; j < k; ++j) sum += weights[i * k + j] * x[t * k + j];
            CHECK(y[t * n + i] == sum);
        }
}

void test_rows(const Kernels& kernel) {
    for (int size : {1, 15, 16, 17, 31, 64, 100}) {
        const std::vector<float> x = normals(size, 2), weight = normals(size, 1);
        std::vector<float> y(size);
        kernel.rmsnorm(x.data(), weight.data(), 1e-5f, size, y.data());
        double squares = 0;
        for (float v : x) squares += (double)v * v;
        for (int i = 0; i < size; ++i)
            CHECK(std::fabs(y[i] - x[i] / std::sqrt(squares / size + 1e-5) * weight[i]) <= 1e-5 * (1 + std::fabs(y[i])));
    }
    std::vector<float> x(32, 1.0f);
    x[5] = NAN;
    const Activations nan(kernel, ActivationFormat::int8, x, 1, 32);
    CHECK(std::isnan(nan.rows.scale[0]));
    std::fill(x.begin(), x.end(), 0.0f);
    const Activations zero(kernel, ActivationFormat::q8, x, 1, 32);
    CHECK(zero.rows.scale[0] == 0 && zero.rows.sum[0] == 0);
}

}  // namespace

int main() {
    for (int i = 0; const Kernels* kernel = kernels_at(i); ++i) {
        std::printf("%s\n", kernel->name);
        for (const FormatTraits& format : kFormats)
            for (int round = 0; round < 25; ++round) {
                const int cols = format.pack ? between(1, 200) : format.columns * between(1, 256 / format.columns + 1);
                test_product(*kernel, format.id, between(1, round % 5 ? 14 : 130), between(1, 200), cols, round % 5 == 1);
            }
        for (const FormatTraits& format : kFormats)
            for (const int tokens : {4, 8, 33, 61, 97}) test_product(*kernel, format.id, tokens, 130, 512);  // in turns; a piece of few tokens
        for (const Format format : {Format::f32, Format::bf16, Format::int8, Format::int8_plain, Format::llm_int8, Format::q8})
            for (int round = 0; round < 25; ++round)
                test_first_factor(*kernel, format, between(1, round % 5 ? 14 : 70), between(1, round % 5 ? 40 : 150), between(1, 700));
        for (const FormatTraits& format : kFormats) test_pairs(*kernel, format.id);
        test_swiglu(*kernel);
        for (const Format format : {Format::int8_plain, Format::llm_int8})
            for (const int tokens : {1, 2, 4, 7, 61}) test_extremes(*kernel, format, tokens);
        test_outliers(*kernel);
        test_llm_int8_is_int8(*kernel);
        test_rows(*kernel);
    }
    return test_result();
}
