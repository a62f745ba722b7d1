// SPMD threads: one call a step; every thread runs the same function and meets the others at barriers.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace pronk {

// How many threads to run by default: one a physical core of the affinity mask, no more than the cgroup's quota allows.
int default_threads();

// This process, so that the child of a fork can tell; 0 where there is no fork.
long process_id();

// Memory that a thread is about to read, and asks for while it has to wait, so that the memory itself need not.
struct Ahead {
    const uint8_t *next = nullptr, *end = nullptr;

    // One cache line more, or false where all were asked for.
    bool ask() {
        if (next >= end) return false;
        __builtin_prefetch(next, 0, 2);
        next += 64;
        return true;
    }
};

// All threads arrive before any leaves. Spins briefly, then sleeps. Reusable at once.
class Barrier {
public:
    explicit Barrier(int threads) : threads_(threads) {}
    void wait(Ahead& ahead);
    void wait() {
        Ahead nothing;
        wait(nothing);
    }

private:
    const int threads_;
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::atomic<uint32_t> sleepers_{0};
};

class ThreadPool {
public:
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;

    int size() const { return size_; }
    Barrier& barrier();  // inside a step

    // Runs body(thread index) on all threads and waits; the caller is thread 0. One caller at a time (others wait).
    // After a fork, the child's first call starts threads of its own. `body` must not throw.
    void run(const std::function<void(int)>& body);

private:
    struct State;
    State& state();

    const int size_;
    std::atomic<State*> state_;
};

}  // namespace pronk
