#include "threads.h"

#include <mutex>
#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <unistd.h>
#endif

namespace pronk {

namespace {

// Between two steps lie sampling and text: with luck the next step comes before the thread has gone to sleep.
constexpr std::chrono::microseconds kStepSpin{100};
constexpr std::chrono::microseconds kLeaveSpin{50};

}  // namespace

long process_id() {
#if defined(_WIN32)
    return 0;
#else
    return getpid();
#endif
}

struct ThreadPool::State {
    explicit State(int threads) : phases(threads) {
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
        for (uint32_t seen = 0;;) {
            step.wait_while(seen, kStepSpin);
            seen = step.load();
            if (stopping) return;
            if (!enter()) continue;
            (*body)(index);
            inside.add(-1);
        }
    }

    // False where the step is over already.
    bool enter() {
        uint32_t threads = inside.load();
        while (threads < kClosed)
            if (inside.compare_exchange(threads, threads + 1)) return true;
        return false;
    }

    void open(const std::function<void(int)>& of_step) {
        body = &of_step;
        phases.begin();
        inside.store(0);
        step.add(1);
    }

    bool close() {
        for (uint32_t threads = inside.add(kClosed); threads != kClosed; threads = inside.load())
            inside.wait_while(threads, kLeaveSpin);
        return !phases.abandoned();
    }

    bool run(const std::function<void(int)>& of_step) {
        give_up();
        open(of_step);
        of_step(0);
        return close();
    }

    uint64_t begin(std::function<void(int)> of_step) {
        static std::atomic<uint64_t> numbers{0};
        give_up();
        const std::lock_guard lock(mutex);
        begun_body = std::move(of_step), begun = ++numbers;
        open(begun_body);
        return begun;
    }

    std::optional<bool> finish() {
        {
            const std::lock_guard lock(mutex);
            if (!begun) return std::nullopt;
            begun = 0;
        }
        begun_body(0);
        return close();
    }

    // 0: any.
    void give_up(uint64_t step = 0) {
        const std::lock_guard lock(mutex);
        if (!begun || (step && begun != step)) return;
        phases.abandon();
        close();
        begun = 0;
    }

    void stop() {
        give_up();
        stopping = true;
        step.add(1);
        for (std::thread& worker : workers) worker.join();
    }

    const long owner = process_id();
    std::mutex caller;
    std::mutex mutex;  // held while a step is begun or given up, but not while one is run or finished
    uint64_t begun = 0;  // the number of a step; 0: none
    std::function<void(int)> begun_body;
    const std::function<void(int)>* body = nullptr;
    std::atomic<bool> stopping{false};
    Phases phases;
    Awaited step;  // how many there were
    static constexpr uint32_t kClosed = 1 << 30;
    Awaited inside{kClosed};  // threads other than the caller, and whether more may come
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

Phases& ThreadPool::phases() { return state_.load(std::memory_order_relaxed)->phases; }

bool ThreadPool::run(const std::function<void(int)>& body) {
    State& state = this->state();
    const std::lock_guard lock(state.caller);
    return state.run(body);
}

uint64_t ThreadPool::begin(std::function<void(int)> body) {
    State& state = this->state();
    const std::lock_guard lock(state.caller);
    return state.begin(std::move(body));
}

std::optional<bool> ThreadPool::finish() {
    State& state = this->state();
    const std::lock_guard lock(state.caller);
    return state.finish();
}

bool ThreadPool::idle() { return begun(0); }

bool ThreadPool::begun(uint64_t step) {
    State* state = state_.load(std::memory_order_acquire);
    if (state->owner != process_id()) return false;
    const std::lock_guard lock(state->mutex);
    return state->begun == step;
}

void ThreadPool::give_up() { give_up(0); }

void ThreadPool::give_up(uint64_t step) {
    State* state = state_.load(std::memory_order_acquire);
    if (state->owner == process_id()) state->give_up(step);
}

}  // namespace pronk
