// Python's lock, let go of and taken again. Daemon threads are still at work when a program ends; until Python 3.14 one
// that then asks for the lock is torn down in the middle of C++, which aborts the whole process: here it sleeps instead.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include <nanobind/nanobind.h>

namespace pronk {

class Ending {
public:
    // Called as Python ends, by the thread that ends it and with the lock, which those that wait for it still get.
    static void begin() {
        thread_ = std::this_thread::get_id();
        ending_ = true;
        const nanobind::gil_scoped_release released;
        // Bounded: in the child of a fork those that waited may be threads of the parent.
        for (int i = 0; i < 200 && asking_ > 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }

    // Around taking the lock. The order of the two accesses, and of the two above, is what lets none slip through.
    static void ask() {
        ++asking_;
        if (!ending_ || thread_.load() == std::this_thread::get_id()) return;
        --asking_;
        for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
    static void asked() { --asking_; }

private:
    static inline std::atomic<bool> ending_{false};
    static inline std::atomic<int> asking_{0};
    static inline std::atomic<std::thread::id> thread_{};
};

// nanobind::gil_scoped_release and gil_scoped_acquire, for threads that may outlive Python.
class Released {
public:
    Released() : state_(PyEval_SaveThread()) {}
    Released(const Released&) = delete;
    ~Released() {
        Ending::ask();
        PyEval_RestoreThread(state_);
        Ending::asked();
    }

private:
    PyThreadState* const state_;
};

class Acquired {
public:
    Acquired() : state_((Ending::ask(), PyGILState_Ensure())) { Ending::asked(); }
    Acquired(const Acquired&) = delete;
    ~Acquired() { PyGILState_Release(state_); }

private:
    const PyGILState_STATE state_;
};

}  // namespace pronk
