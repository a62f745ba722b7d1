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

// All threads arrive before any leaves. Spins briefly, then sleeps. Reusable at once.
class Barrier {
public:
    explicit Barrier(int threads) : threads_(threads) {}
    void wait();

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
