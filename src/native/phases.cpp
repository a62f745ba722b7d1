#include "phases.h"

namespace pronk {

namespace {

// A thread that is late is mostly late by less than this; a sleep and a wake take about as long.
constexpr std::chrono::microseconds kSpin{50};

// Of what is left of a stretch a thread takes so much at once: the last pieces are small, and there are few in all.
int piece(int left, int most) { return std::min(most, left - left / 4); }

}  // namespace

Phases::Phases(int threads) : threads_(threads), stretches_(new Stretch[threads]) {}

void Phases::begin() {
    for (int i = 0; i < threads_; ++i) stretches_[i].left.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    abandoned_.store(false, std::memory_order_relaxed);
    over_.store(0);
}

int Phases::take(int owner, uint32_t phase, int& first, int end, int most) {
    std::atomic<uint64_t>& left = stretches_[owner].left;
    const uint64_t mark = static_cast<uint64_t>(phase) + 1;
    uint64_t old = left.load(std::memory_order_relaxed);
    for (;;) {
        if (old >> 32 > mark) return 0;
        const int next = old >> 32 == mark ? static_cast<int>(old & UINT32_MAX) : first;  // else: none was taken
        if (next >= end) return 0;
        const int taken = abandoned() ? end - next : piece(end - next, most);
        if (left.compare_exchange_weak(old, mark << 32 | static_cast<uint32_t>(next + taken), std::memory_order_relaxed)) {
            first = next;
            return taken;
        }
    }
}

void Phases::finish(Cursor& cursor, int done, int count) {
    const uint32_t phase = cursor.phase++;
    if (done > 0 && done_.fetch_add(done, std::memory_order_acq_rel) + done == count) {
        done_.store(0, std::memory_order_relaxed);
        over_.add(1);
    } else {
        over_.wait_while(phase, kSpin, cursor.next);
    }
}

}  // namespace pronk
