// How a thread waits for what another one writes: it spins briefly, then sleeps.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace pronk {

// Memory that a thread is about to read, and asks for while it has to wait, so that the memory itself need not.
struct Prefetch {
    const uint8_t *next = nullptr, *end = nullptr;

    // One cache line more, or false where all were asked for.
    bool ask() {
        if (next >= end) return false;
        __builtin_prefetch(next, 0, 2);
        next += 64;
        return true;
    }
};

// A number that threads wait for, and how many of them are asleep.
class Awaited {
public:
    explicit Awaited(uint32_t value = 0) : value_(value) {}

    uint32_t load() const { return value_.load(std::memory_order_acquire); }
    void store(uint32_t value) { value_.store(value, std::memory_order_release); }  // wakes nobody
    bool compare_exchange(uint32_t& expected, uint32_t value) { return value_.compare_exchange_weak(expected, value); }
    uint32_t add(int change);  // wakes all; gives what it has become

    // Returns when the value is no longer `old`. Fetches memory while it spins.
    void wait_while(uint32_t old, std::chrono::microseconds spin, Prefetch& prefetch);
    void wait_while(uint32_t old, std::chrono::microseconds spin) {
        Prefetch nothing;
        wait_while(old, spin, nothing);
    }

private:
    alignas(64) std::atomic<uint32_t> value_;
    std::atomic<uint32_t> sleepers_{0};
};

}  // namespace pronk
