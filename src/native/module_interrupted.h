// Whether a signal handler of Python's has raised while C++ was at work.
#pragma once

#include <chrono>
#include <stdexcept>

#include "module.h"
#include "module_gil.h"
#include "threads.h"

namespace pronk {

// A pass gives up when a Python signal handler raises: Ctrl-C. Asked often, and looks only now and then. Throws in a child
// that a handler forked off: the threads that share the pass stayed with the parent, and with them the units they had.
class Interrupted {
public:
    bool operator()() {
        const auto now = std::chrono::steady_clock::now();
        if (raised_ || now < next_) return raised_;
        next_ = now + std::chrono::milliseconds(50);
        Acquired acquired;
        raised_ = PyErr_CheckSignals() != 0;
        if (process_id() == process_) return raised_;
        if (raised_) throw nb::python_error();
        throw std::runtime_error("this process was forked off by a signal handler amid a pass, which cannot go on here");
    }

private:
    std::chrono::steady_clock::time_point next_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
    bool raised_ = false;
    const long process_ = process_id();
};

}  // namespace pronk
