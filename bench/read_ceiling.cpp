// What this machine can do at best, to hold engines against: bytes read and multiply-adds a second.
//
//   read_ceiling THREADS MIB_PER_THREAD SECONDS_PER_WINDOW WINDOWS [STREAMS PREFETCH HUGE]
//
// Prints one JSON object. Reading: every thread, pinned, goes through memory that it touched first, much larger than the
// caches, as 1 to 8 streams with and without prefetching, in 2 MB and in 4 KB pages; the ceiling is the best of that grid,
// measured again WINDOWS times. A naive loop finds less, and would flatter whatever is compared with it. Arithmetic: loops
// over registers alone, so their ratio between one thread and two also tells cores from hyperthreads.
// With STREAMS PREFETCH HUGE only that point of the grid is measured: for a look before and after something else.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kBlock = 8 << 20;  // bytes between two looks at the clock
volatile uint64_t sink;             // what keeps the compiler from dropping the loops

double since(Clock::time_point begun) { return std::chrono::duration<double>(Clock::now() - begun).count(); }

void pin([[maybe_unused]] int number) {
#if defined(__linux__)
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    CPU_ZERO(&one);
    for (int cpu = 0, seen = 0; cpu < CPU_SETSIZE; ++cpu)
        if (CPU_ISSET(cpu, &allowed) && seen++ == number) CPU_SET(cpu, &one);
    if (CPU_COUNT(&one)) sched_setaffinity(0, sizeof one, &one);
#endif
}

// `work(thread)` gives a rate; the sum over threads that run at the same time.
double together(int threads, const std::function<double(int)>& work) {
    std::barrier start(threads);
    std::vector<double> rates(threads);
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; ++t)
        pool.emplace_back([&, t] {
            pin(t);
            start.arrive_and_wait();
            rates[t] = work(t);
        });
    for (auto& thread : pool) thread.join();
    double sum = 0;
    for (double rate : rates) sum += rate;
    return sum;
}

// ---- reading ----

#if defined(__AVX512F__)
// `bytes` from each of S places, 4 cache lines of each in turn, into 8 accumulators.
template <int S, bool Prefetch>
__m512i read_streams(const char* const* at, size_t bytes, size_t ahead) {
    __m512i sums[8] = {};
    for (size_t i = 0; i < bytes; i += 256)
#pragma GCC unroll 8
        for (int s = 0; s < S; ++s) {
            const char* p = at[s] + i;
#pragma GCC unroll 4
            for (int line = 0; line < 4; ++line) {
                if constexpr (Prefetch) _mm_prefetch(p + 64 * line + ahead, _MM_HINT_T0);
                __m512i& sum = sums[(4 * s + line) % 8];
                sum = _mm512_or_si512(sum, _mm512_load_si512(p + 64 * line));
            }
        }
    for (int i = 1; i < 8; ++i) sums[0] = _mm512_or_si512(sums[0], sums[i]);
    return sums[0];
}

template <int S>
uint64_t read_block(const char* const* at, size_t bytes, size_t ahead) {
    const __m512i all = ahead ? read_streams<S, true>(at, bytes, ahead) : read_streams<S, false>(at, bytes, 0);
    return _mm512_test_epi64_mask(all, all);
}
#else
template <int S>
uint64_t read_block(const char* const* at, size_t bytes, size_t ahead) {
    uint64_t sums[8] = {};
    for (size_t i = 0; i < bytes; i += 256)
        for (int s = 0; s < S; ++s) {
            const char* p = at[s] + i;
            for (int line = 0; line < 4; ++line) {
                if (ahead) __builtin_prefetch(p + 64 * line + ahead);
                const uint64_t* words = reinterpret_cast<const uint64_t*>(p + 64 * line);
                for (int w = 0; w < 8; ++w) sums[w] |= words[w];
            }
        }
    uint64_t all = 0;
    for (uint64_t sum : sums) all |= sum;
    return all;
}
#endif

struct Region {
    char* data;
    size_t bytes;
};

struct Point {
    int streams;
    size_t prefetch;
    bool huge;
};

// Each thread's memory in one kind of page. It is never given back: it lives as long as the program needs it.
std::vector<Region> touched(int threads, size_t bytes, bool huge) {
    std::vector<Region> regions(threads);
    together(threads, [&](int t) {
        void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED) {
            std::fprintf(stderr, "read_ceiling: no memory for %zu bytes a thread\n", bytes);
            std::exit(1);
        }
#if defined(MADV_HUGEPAGE)
        madvise(data, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
        std::memset(data, t + 1, bytes);
        regions[t] = {static_cast<char*>(data), bytes};
        return 0.0;
    });
    return regions;
}

double read_gb_s(const std::vector<Region>& regions, const Point& point, double seconds) {
    return together(static_cast<int>(regions.size()), [&](int t) {
        const Region& region = regions[t];
        const size_t stream = region.bytes / point.streams, step = kBlock / point.streams;
        const auto begun = Clock::now();
        double done = 0;
        uint64_t all = 0;
        for (size_t offset = 0;; offset = offset + 2 * step > stream ? 0 : offset + step) {
            const char* at[8];
            for (int s = 0; s < point.streams; ++s) at[s] = region.data + s * stream + offset;
            switch (point.streams) {
                case 1: all |= read_block<1>(at, step, point.prefetch); break;
                case 2: all |= read_block<2>(at, step, point.prefetch); break;
                case 4: all |= read_block<4>(at, step, point.prefetch); break;
                default: all |= read_block<8>(at, step, point.prefetch);
            }
            done += static_cast<double>(step) * point.streams;
            if (const double passed = since(begun); passed >= seconds) {
                sink = all;
                return done / passed / 1e9;
            }
        }
    });
}

// ---- arithmetic ----

#if defined(__AVX512F__)
constexpr int kRounds = 20000;

// `step` on 12 independent accumulators (latency up to 6, one or two a cycle), kRounds times. They have names, not
// indices, and no call is near them, or GCC keeps them on the stack; the asm keeps rounds from being folded into one.
template <class Vector, class Step>
[[gnu::noinline]] void registers_only(Vector zero, Step step) {
    Vector a = zero, b = zero, c = zero, d = zero, e = zero, f = zero;
    Vector g = zero, h = zero, i = zero, j = zero, k = zero, l = zero;
    for (int round = 0; round < kRounds; ++round) {
        a = step(a), b = step(b), c = step(c), d = step(d), e = step(e), f = step(f);
        g = step(g), h = step(h), i = step(i), j = step(j), k = step(k), l = step(l);
        asm volatile("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f));
        asm volatile("" : "+v"(g), "+v"(h), "+v"(i), "+v"(j), "+v"(k), "+v"(l));
    }
}

// `macs`: multiply-adds that one step makes.
template <class Vector, class Step>
double gmac_s(int threads, double seconds, double macs, Vector zero, Step step) {
    return together(threads, [&](int) {
        const auto begun = Clock::now();
        for (double done = 0;;) {
            registers_only(zero, step);
            done += 12.0 * kRounds * macs;
            if (const double passed = since(begun); passed >= seconds) return done / passed / 1e9;
        }
    });
}

double int8_gmac_s([[maybe_unused]] int threads, [[maybe_unused]] double seconds) {
#if defined(__AVX512VNNI__)
    const __m512i ones = _mm512_set1_epi8(1);
    return gmac_s(threads, seconds, 64, _mm512_setzero_si512(),
                  [=](__m512i sum) { return _mm512_dpbusd_epi32(sum, ones, ones); });
#else
    return 0;
#endif
}

double bf16_gmac_s([[maybe_unused]] int threads, [[maybe_unused]] double seconds) {
#if defined(__AVX512BF16__)
    const __m512bh ones = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1), _mm512_set1_ps(1));
    return gmac_s(threads, seconds, 32, _mm512_setzero_ps(),
                  [=](__m512 sum) { return _mm512_dpbf16_ps(sum, ones, ones); });
#else
    return 0;
#endif
}

double f32_gmac_s(int threads, double seconds) {
    const __m512 half = _mm512_set1_ps(0.5f);
    return gmac_s(threads, seconds, 16, _mm512_setzero_ps(),
                  [=](__m512 sum) { return _mm512_fmadd_ps(half, half, sum); });
}
#else
double int8_gmac_s(int, double) { return 0; }
double bf16_gmac_s(int, double) { return 0; }
double f32_gmac_s(int, double) { return 0; }
#endif

// ---- the report ----

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

std::string list(const std::vector<double>& values) {
    std::string text = "[";
    for (size_t i = 0; i < values.size(); ++i) {
        char number[32];
        std::snprintf(number, sizeof number, "%s%.2f", i ? ", " : "", values[i]);
        text += number;
    }
    return text + "]";
}

template <class Measure>
void print(const char* name, const char* unit, const std::string& conditions, int windows, Measure measure) {
    std::vector<double> taken;
    for (int i = 0; i < windows; ++i) taken.push_back(measure());
    std::printf("\"%s\": {\"%s\": %.2f, \"max\": %.2f, \"windows\": %s%s}", name, unit, median(taken),
                *std::max_element(taken.begin(), taken.end()), list(taken).c_str(), conditions.c_str());
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 5 && argc != 8) {
        std::fprintf(stderr, "usage: read_ceiling THREADS MIB_PER_THREAD SECONDS WINDOWS [STREAMS PREFETCH HUGE]\n");
        return 2;
    }
    const int threads = std::atoi(argv[1]), windows = std::atoi(argv[4]);
    const size_t bytes = std::strtoull(argv[2], nullptr, 10) << 20;
    const double seconds = std::atof(argv[3]);
    const bool known = argc == 8;
    if (threads < 1 || windows < 1 || bytes < 8 * kBlock || seconds <= 0) {
        std::fprintf(stderr, "read_ceiling: needs a thread, a window, 64 MiB and some time at least\n");
        return 2;
    }

    double best = 0;
    Point chosen{4, 0, true};
    if (known) chosen = {std::atoi(argv[5]), std::strtoull(argv[6], nullptr, 10), std::atoi(argv[7]) != 0};
    std::vector<Region> regions[2];  // small pages, huge pages
    for (const bool huge : {true, false}) {
        if (known && huge != chosen.huge) continue;
        regions[huge] = touched(threads, bytes, huge);
    }
    std::string grid;
    for (const bool huge : {true, false})
        for (const int streams : {1, 2, 4, 8})
            for (const size_t prefetch : {0, 512, 1024, 2048, 4096}) {
                if (known) continue;
                const Point point{streams, prefetch, huge};
                const double rate = read_gb_s(regions[huge], point, std::min(seconds, 0.3));
                char text[128];
                std::snprintf(text, sizeof text, "%s{\"streams\": %d, \"prefetch\": %zu, \"huge\": %s, \"gb_s\": %.2f}",
                              grid.empty() ? "" : ", ", streams, prefetch, huge ? "true" : "false", rate);
                grid += text;
                if (rate > best) best = rate, chosen = point;
            }
    char conditions[128];
    std::snprintf(conditions, sizeof conditions, ", \"streams\": %d, \"prefetch\": %zu, \"huge\": %s", chosen.streams,
                  chosen.prefetch, chosen.huge ? "true" : "false");
    std::printf("{\"threads\": %d, \"mib_per_thread\": %zu, ", threads, bytes >> 20);
    print("read", "gb_s", conditions, windows, [&] { return read_gb_s(regions[chosen.huge], chosen, seconds); });
    if (!known) {
        const double shorter = std::min(seconds, 0.5);
        const int some = std::min(windows, 5);
        std::printf(", ");
        print("int8", "gmac_s", "", some, [&] { return int8_gmac_s(threads, shorter); });
        std::printf(", ");
        print("bf16", "gmac_s", "", some, [&] { return bf16_gmac_s(threads, shorter); });
        std::printf(", ");
        print("f32", "gmac_s", "", some, [&] { return f32_gmac_s(threads, shorter); });
        std::printf(", \"grid\": [%s]", grid.c_str());
    }
    std::printf("}\n");
}
