#include "threads.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "test.h"

#if !defined(_WIN32)
#include <sys/wait.h>
#include <unistd.h>
#endif

using namespace pronk;

namespace {

// What a layer does: in one phase every unit writes, in the next every unit reads what all have written.
bool step_works(ThreadPool& pool, int rounds, int units = 40, int most = 3) {
    std::vector<int> written(units, 0), wrong(units, 0);
    const bool done = pool.run([&](int t) {
        Cursor cursor{t};
        for (int round = 1; round <= rounds; ++round) {
            pool.phases().parallel_for(cursor, units, most, [&](int begin, int end) {
                for (int i = begin; i < end; ++i) ++written[i];
            });
            pool.phases().parallel_for(cursor, units, most, [&](int begin, int end) {
                for (int i = begin; i < end; ++i)
                    for (const int sum : written) wrong[i] += sum != round;
            });
        }
    });
    bool good = done;
    for (int i = 0; i < units; ++i) good = good && written[i] == rounds && wrong[i] == 0;
    return good;
}

void test_units_are_done_once_and_phases_one_after_another() {
    for (const int threads : {1, 2, 3, 8}) {
        ThreadPool pool(threads);
        CHECK(pool.size() == threads);
        for (const int units : {1, 2, 7, 40})
            for (int step = 0; step < 20; ++step) CHECK(step_works(pool, 20, units, 1 + step));
    }
}

void test_pieces_are_of_the_size_asked_for() {
    ThreadPool pool(2);
    std::atomic<int> longest{0}, calls{0};
    pool.run([&](int t) {
        Cursor cursor{t};
        pool.phases().parallel_for(cursor, 100, 7, [&](int begin, int end) {
            int known = longest;
            while (end - begin > known && !longest.compare_exchange_weak(known, end - begin)) {
            }
            ++calls;
        });
        pool.phases().parallel_for(cursor, 0, 7, [&](int, int) { ++calls; });
    });
    CHECK(longest == 7);
    CHECK(calls >= 100 / 7);
}

// The caller does all that there is while the others are kept from coming, and waits for none of them.
void test_nobody_waits_for_who_sleeps() {
    ThreadPool pool(3);
    for (int step = 0; step < 20; ++step) {
        std::vector<int> by(30, -1);
        std::atomic<bool> over{false};
        pool.run([&](int t) {
            while (t != 0 && !over) std::this_thread::yield();  // later than all phases
            Cursor cursor{t};
            for (int phase = 0; phase < 3; ++phase)
                pool.phases().parallel_for(cursor, 30, 4, [&](int begin, int end) { std::fill(by.begin() + begin, by.begin() + end, t); });
            over = true;
        });
        CHECK(over && by == std::vector<int>(30, 0));
    }
}

void test_an_abandoned_step_ends() {
    for (const int threads : {1, 3}) {
        ThreadPool pool(threads);
        std::atomic<int> done{0};
        CHECK(!pool.run([&](int t) {
            Cursor cursor{t};
            for (int phase = 0; phase < 100; ++phase)
                pool.phases().parallel_for(cursor, 1 << 24, 1, [&](int, int) {
                    if (++done == 10) pool.phases().abandon();
                });
        }));
        CHECK(done >= 10 && done < 1000);
        CHECK(step_works(pool, 3));  // the next one is whole
    }
}

void test_late_threads_and_sleepers() {
    ThreadPool pool(3);
    for (int step = 0; step < 6; ++step) {
        // Long enough for the others to go to sleep within a phase, and for all to sleep between steps.
        std::vector<int> done(3, 0);
        pool.run([&](int t) {
            Cursor cursor{t};
            for (int phase = 0; phase < 2; ++phase)
                pool.phases().parallel_for(cursor, 3, 1, [&](int i, int) {
                    if (i == step % 3) std::this_thread::sleep_for(std::chrono::milliseconds(2));
                    ++done[i];
                });
        });
        CHECK(done == std::vector<int>(3, 2));
        if (step % 2) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        CHECK(step_works(pool, 3));
    }
}

// A step that counts, in phases as many as the units of each, so that each unit may see what the phases before it did.
struct Counting {
    explicit Counting(ThreadPool& pool) : pool(pool) {}

    void operator()(int t) const {
        Cursor cursor{t};
        for (int phase = 0; phase < 50; ++phase)
            pool.phases().parallel_for(cursor, 50, 2, [&](int begin, int end) { *done += end - begin; });
    }

    ThreadPool& pool;
    std::shared_ptr<std::atomic<int>> done = std::make_shared<std::atomic<int>>(0);
    static constexpr int kAll = 50 * 50;
};

void test_a_step_can_be_begun_ahead() {
    for (const int threads : {1, 2, 5}) {
        ThreadPool pool(threads);
        CHECK(!pool.finish());
        for (int i = 0; i < 40; ++i) {
            const Counting first(pool), second(pool);
            pool.begin(first);
            if (i % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            if (i % 4 == 1) CHECK(step_works(pool, 3));  // which gives it up
            if (i % 4 == 2) pool.begin(second);          // so does this
            if (i % 4 == 3) pool.give_up();
            const int done = *first.done;
            const std::optional<bool> finished = pool.finish();
            if (i % 4 == 0) CHECK(finished == true && *first.done == Counting::kAll);
            if (i % 4 == 2) CHECK(finished == true && *second.done == Counting::kAll);
            if (i % 2) CHECK(!finished);
            if (i % 4) CHECK(*first.done == done);  // nobody is in it any more
            CHECK(!pool.finish());
        }
        pool.begin(Counting(pool));  // and ends with its threads
    }
}

void test_a_step_begun_ahead_can_be_given_up_by_anybody() {
    ThreadPool pool(3);
    std::atomic<bool> over{false};
    std::thread other([&] {
        while (!over) pool.give_up();
    });
    for (int i = 0; i < 500; ++i) {
        const Counting step(pool);
        pool.begin(step);
        const std::optional<bool> done = pool.finish();
        CHECK(!done || (*done && *step.done == Counting::kAll));
        CHECK(step_works(pool, 2));
    }
    over = true;
    other.join();
}

void test_callers_take_turns() {
    ThreadPool pool(2);
    std::vector<std::thread> callers;
    std::vector<int> good(4, 0);
    for (int c = 0; c < 4; ++c)
        callers.emplace_back([&, c] {
            for (int step = 0; step < 50; ++step) good[c] += step_works(pool, 5);
        });
    for (std::thread& caller : callers) caller.join();
    for (const int steps : good) CHECK(steps == 50);
}

void test_nothing_spins_between_steps() {
    ThreadPool pool(4);
    CHECK(step_works(pool, 10));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const std::clock_t before = std::clock();  // of the processor, all threads
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    CHECK(std::clock() - before < CLOCKS_PER_SEC / 20);
}

// ThreadSanitizer does not allow threads in the child of a process with threads.
#if !defined(_WIN32) && !defined(__SANITIZE_THREAD__)
template <class Body>
bool child_succeeds(Body body) {
    const pid_t child = fork();
    if (child == 0) _exit(body() ? 0 : 1);
    int status = 1;
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void test_a_fork_gets_threads_of_its_own() {
    ThreadPool pool(3);
    CHECK(step_works(pool, 5));
    CHECK(child_succeeds([&] { return step_works(pool, 5) && child_succeeds([&] { return step_works(pool, 5); }); }));
    CHECK(step_works(pool, 5));
    CHECK(child_succeeds([] {
        ThreadPool own(2);
        return step_works(own, 5);
    }));
    auto* unused = new ThreadPool(2);
    CHECK(child_succeeds([&] {
        delete unused;  // joins nothing
        return true;
    }));
    delete unused;
}

void test_a_fork_amid_a_step_begun_ahead() {
    ThreadPool pool(2);
    for (int i = 0; i < 20; ++i) {
        const Counting step(pool);
        pool.begin(step);
        CHECK(child_succeeds([&] {
            pool.give_up();
            const bool nothing = !pool.finish();
            pool.begin(step);
            return nothing && pool.finish() == true && step_works(pool, 5);
        }));
        CHECK(pool.finish() == true && *step.done == Counting::kAll);
    }
}

void test_a_fork_amid_a_step() {
    ThreadPool pool(2);
    std::atomic<bool> running{false}, stop{false};
    std::thread caller([&] {
        pool.run([&](int) {
            running = true;
            while (!stop) std::this_thread::yield();
        });
    });
    while (!running) std::this_thread::yield();
    CHECK(child_succeeds([&] { return step_works(pool, 5); }));
    stop = true;
    caller.join();
}
#endif

void test_default_threads() {
    const int hardware = static_cast<int>(std::thread::hardware_concurrency());
    CHECK(default_threads() >= 1);
    CHECK(hardware == 0 || default_threads() <= hardware);
}

}  // namespace

int main() {
    test_units_are_done_once_and_phases_one_after_another();
    test_pieces_are_of_the_size_asked_for();
    test_nobody_waits_for_who_sleeps();
    test_an_abandoned_step_ends();
    test_late_threads_and_sleepers();
    test_a_step_can_be_begun_ahead();
    test_a_step_begun_ahead_can_be_given_up_by_anybody();
    test_callers_take_turns();
    test_nothing_spins_between_steps();
#if !defined(_WIN32) && !defined(__SANITIZE_THREAD__)
    test_a_fork_gets_threads_of_its_own();
    test_a_fork_amid_a_step_begun_ahead();
    test_a_fork_amid_a_step();
#endif
    test_default_threads();
    return test_result();
}
