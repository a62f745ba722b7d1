#include "waiting.h"

#if defined(PRONK_X86)
#include <immintrin.h>
#endif

namespace pronk {

namespace {

void pause() {
#if defined(PRONK_X86)
    _mm_pause();
#elif defined(PRONK_ARM)
    asm volatile("yield");
#endif
}

}  // namespace

// The order of the two accesses, and of those in wait_while, is what keeps a sleeper from being missed: all are
// sequentially consistent.
uint32_t Awaited::add(int change) {
    const uint32_t value = value_.fetch_add(static_cast<uint32_t>(change)) + static_cast<uint32_t>(change);
    if (sleepers_.load() != 0) value_.notify_all();
    return value;
}

void Awaited::wait_while(uint32_t old, std::chrono::microseconds spin, Prefetch& prefetch) {
    if (load() != old) return;
    const auto end = std::chrono::steady_clock::now() + spin;
    do {
        for (int i = 0; i < 32; ++i) {
            if (load() != old) return;
            if (!prefetch.ask()) pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    sleepers_.fetch_add(1);
    value_.wait(old);
    sleepers_.fetch_sub(1);
}

}  // namespace pronk
