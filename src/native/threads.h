// SPMD threads: one call a step; every thread that comes in time runs the same function, and they share out its phases.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>

#include "phases.h"

namespace pronk {

// How many threads to run by default: one a physical core of the affinity mask, no more than the cgroup's quota allows.
int default_threads();

// This process, so that the child of a fork can tell; 0 where there is no fork.
long process_id();

class ThreadPool {
public:
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;

    int size() const { return size_; }
    Phases& phases();  // inside a step

    // Runs body(thread index) on the caller, which is thread 0, and on those of the others that wake before it is done
    // there, some perhaps twice: what has to be done must be shared out, not left to one of them. Returns when none is
    // inside any more. One caller at a time (others wait). After a fork, the child's first call starts threads of its own.
    // `body` must not throw, unless in a child that was forked off within it, by the caller. False where the step was
    // abandoned.
    bool run(const std::function<void(int)>& body);

    // Begins a step on the other threads alone: its caller may come to finish() it, or not. Any other step gives it up.
    // Gives its number, which no other step of this program has.
    uint64_t begin(std::function<void(int)> body);
    // What run() gives, of the step that was begun; nothing where there is none: given up, or begun before a fork.
    std::optional<bool> finish();
    // Whether there is no such step.
    bool idle();
    // Whether that one was begun, and neither finished nor given up.
    bool begun(uint64_t step);
    // Gives up what was begun, or only that one, and returns when no thread is inside. From any thread: a step that is
    // run, or being finished, is not waited for.
    void give_up();
    void give_up(uint64_t step);

private:
    struct State;
    State& state();

    const int size_;
    std::atomic<State*> state_;
};

}  // namespace pronk
