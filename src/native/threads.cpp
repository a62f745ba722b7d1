#include "threads.h"

#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <unistd.h>
#endif
#if defined(PRONK_X86)
#include <immintrin.h>
#endif

namespace pronk {

namespace {

using std::chrono::microseconds;

// A thread that is late is mostly late by less than this; a sleep and a wake take about as long.
constexpr microseconds kBarrierSpin{50};
// Between two steps lie sampling and text: with luck the next step comes before the thread has gone to sleep.
constexpr microseconds kStepSpin{100};

void pause() {
#if defined(PRONK_X86)
    _mm_pause();
#elif defined(PRONK_ARM)
    asm volatile("yield");
#endif
}

// Waits until `value` is no longer `old`: spins first, asking for what is ahead, then sleeps as one of `sleepers`.
void wait_while(const std::atomic<uint32_t>& value, uint32_t old, std::atomic<uint32_t>& sleepers, microseconds spin,
                Ahead& ahead) {
    const auto end = std::chrono::steady_clock::now() + spin;
    do {
        for (int i = 0; i < 32; ++i) {
            if (value.load(std::memory_order_acquire) != old) return;
            if (!ahead.ask()) pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    sleepers.fetch_add(1);
    value.wait(old);
    sleepers.fetch_sub(1);
}

// Changes `value` and wakes who sleeps on it. The order of the two accesses, and of the two in wait_while, is what keeps
// a sleeper from being missed: both are sequentially consistent.
void advance(std::atomic<uint32_t>& value, const std::atomic<uint32_t>& sleepers) {
    value.fetch_add(1);
    if (sleepers.load() != 0) value.notify_all();
}

}  // namespace

long process_id() {
#if defined(_WIN32)
    return 0;
#else
    return getpid();
#endif
}

void Barrier::wait(Ahead& ahead) {
    if (threads_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(threads_)) {
        arrived_.store(0, std::memory_order_relaxed);
        advance(phase_, sleepers_);
    } else {
        wait_while(phase_, phase, sleepers_, kBarrierSpin, ahead);
    }
}

struct ThreadPool::State {
    explicit State(int threads) : barrier(threads), done(threads) {
        workers.reserve(threads - 1);
        try {
            for (int i = 1; i < threads; ++i) workers.emplace_back([this, i] { work(i); });
        } catch (...) {
            stop();
            throw;
        }
    }

    ~State() { stop(); }

    void work(int index) {
        for (uint32_t seen = 0;; ++seen) {
            Ahead nothing;
            wait_while(step, seen, sleepers, kStepSpin, nothing);
            if (stopping) return;
            (*body)(index);
            done.wait();
        }
    }

    void stop() {
        stopping = true;
        advance(step, sleepers);
        for (std::thread& worker : workers) worker.join();
    }

    const long owner = process_id();
    std::mutex caller;
    const std::function<void(int)>* body = nullptr;
    bool stopping = false;  // as `body`, written before a step begins
    Barrier barrier;  // the steps' own
    Barrier done;
    alignas(64) std::atomic<uint32_t> step{0};
    std::atomic<uint32_t> sleepers{0};
    std::vector<std::thread> workers;
};

ThreadPool::ThreadPool(int threads) : size_(threads), state_(new State(threads)) {}

// In a child that never called run, the threads are the parent's: there is nothing to join.
ThreadPool::~ThreadPool() {
    State* state = state_.load();
    if (state->owner == process_id()) delete state;
}

// This process's threads. A child's copy of its parent's has no threads, and a mutex that may be held for ever: it is
// left where it is.
ThreadPool::State& ThreadPool::state() {
    State* state = state_.load(std::memory_order_acquire);
    if (state->owner == process_id()) return *state;
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    state = state_.load(std::memory_order_relaxed);
    if (state->owner != process_id()) state_.store(state = new State(size_), std::memory_order_release);
    return *state;
}

Barrier& ThreadPool::barrier() { return state_.load(std::memory_order_relaxed)->barrier; }

void ThreadPool::run(const std::function<void(int)>& body) {
    if (size_ == 1) return body(0);
    State& state = this->state();
    const std::lock_guard lock(state.caller);
    state.body = &body;
    advance(state.step, state.sleepers);
    body(0);
    state.done.wait();
}

}  // namespace pronk
