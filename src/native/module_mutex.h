// A lock that refuses where waiting would never end, and that Ctrl-C ends the wait for.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "module.h"

namespace pronk {

// In the child of a fork what another thread of the parent had locked stays so for ever; and a signal handler of Python
// runs in the middle of the very pass that holds the lock.
class Mutex {
public:
    // Without the GIL. Throws what a signal handler of Python raises meanwhile: another thread's pass may be long.
    void lock() {
        if (!mutex_.try_lock()) {
            const long process = process_;
            if (process && process != process_id())
                throw std::runtime_error("the model was at work when this process was forked off: load it again here");
            if (thread_ == std::this_thread::get_id())
                throw std::runtime_error("the model is at work in the pass that this signal handler interrupts: it can be "
                                         "called again when the handler has returned");
            while (!mutex_.try_lock_for(std::chrono::milliseconds(50))) {
                const Acquired acquired;
                if (PyErr_CheckSignals() != 0) throw nb::python_error();
            }
        }
        hold();
    }
    bool try_lock() {
        if (!mutex_.try_lock()) return false;
        hold();
        return true;
    }
    void unlock() {
        process_ = 0, thread_ = std::thread::id();
        mutex_.unlock();
    }

private:
    void hold() { process_ = process_id(), thread_ = std::this_thread::get_id(); }

    std::timed_mutex mutex_;
    std::atomic<long> process_{0};  // of the holder; 0: nobody
    std::atomic<std::thread::id> thread_{};
};

// Waits without the GIL, and holds on with it.
class Unlocked {
public:
    explicit Unlocked(Mutex& mutex) : mutex_(mutex) {
        const Released released;
        mutex_.lock();
    }
    ~Unlocked() { mutex_.unlock(); }

private:
    Mutex& mutex_;
};

}  // namespace pronk
