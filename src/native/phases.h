// The work of a step: one phase after another, each of units that are dealt out to the threads as they come.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "waiting.h"

namespace pronk {

// Where a thread is in a step. All threads go through the same phases; one that comes late finds them over.
struct Cursor {
    int thread;
    uint32_t phase = 0;
    Prefetch next{};  // what it will read next
};

// Every thread has a stretch of a phase's units, which it takes from in ever smaller pieces; when nothing is left of its
// own it helps the others. So memory is read in long runs, and a thread that sleeps holds up no more than the units that
// it took.
class Phases {
public:
    explicit Phases(int threads);

    // Begins a step. No thread may be in the one before.
    void begin();

    // Does a phase: body(first, end) over [0, count), each unit by one thread, at most `most` at once. Returns when all of
    // them are done, whoever did them; what they wrote is then visible.
    template <class Body>
    void parallel_for(Cursor& cursor, int count, int most, const Body& body) {
        if (count == 0) return;
        int done = 0;
        for (int i = 0; i < threads_; ++i) {
            const int owner = (cursor.thread + i) % threads_, end = cut(count, owner + 1);
            for (int first = cut(count, owner), taken; (taken = take(owner, cursor.phase, first, end, most)) > 0; first += taken) {
                if (!abandoned()) body(first, first + taken);
                done += taken;
            }
        }
        finish(cursor, done, count);
    }

    // Where a thread's stretch begins.
    int cut(int count, int thread) const { return static_cast<int>(static_cast<int64_t>(count) * thread / threads_); }

    // From now on units are counted as done that nobody did, to the end of the step.
    void abandon() { abandoned_.store(true, std::memory_order_relaxed); }
    bool abandoned() const { return abandoned_.load(std::memory_order_relaxed); }

private:
    // What of a thread's stretch was not taken yet: the phase above, the unit below; 0 before a step's first phase.
    struct alignas(64) Stretch {
        std::atomic<uint64_t> left{0};
    };

    // Takes units of a stretch that ends at `end`, and of which those before `first` are known to be taken. Moves `first`
    // to what was taken, and gives how many; none where the phase is over.
    int take(int owner, uint32_t phase, int& first, int end, int most);
    void finish(Cursor& cursor, int done, int count);

    const int threads_;
    const std::unique_ptr<Stretch[]> stretches_;
    std::atomic<bool> abandoned_{false};
    alignas(64) std::atomic<int> done_{0};  // units of the phase under way
    Awaited over_;                          // phases of this step
};

}  // namespace pronk
