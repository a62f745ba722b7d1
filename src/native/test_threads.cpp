#include "threads.h"

#include <chrono>
#include <ctime>
#include <thread>
#include <vector>

#include "test.h"

#if !defined(_WIN32)
#include <sys/wait.h>
#include <unistd.h>
#endif

using namespace pronk;

namespace {

// Every thread adds to a sum of its own, meets the others, and reads all sums: what a layer does.
bool step_works(ThreadPool& pool, int rounds) {
    const int threads = pool.size();
    std::vector<int> sums(threads, 0), wrong(threads, 0);
    pool.run([&](int t) {
        for (int round = 1; round <= rounds; ++round) {
            ++sums[t];
            pool.barrier().wait();
            for (const int sum : sums) wrong[t] += sum != round;
            pool.barrier().wait();
        }
    });
    bool good = true;
    for (int t = 0; t < threads; ++t) good = good && sums[t] == rounds && wrong[t] == 0;
    return good;
}

void test_every_thread_runs_and_meets_the_others() {
    for (const int threads : {1, 2, 3, 8}) {
        ThreadPool pool(threads);
        CHECK(pool.size() == threads);
        for (int step = 0; step < 50; ++step) CHECK(step_works(pool, 20));
    }
}

void test_late_threads_and_sleepers() {
    ThreadPool pool(3);
    for (int step = 0; step < 6; ++step) {
        // Long enough for the others to go to sleep in the barrier, and for all to sleep between steps.
        pool.run([&](int t) {
            if (t == step % 3) std::this_thread::sleep_for(std::chrono::milliseconds(2));
            pool.barrier().wait();
        });
        if (step % 2) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        CHECK(step_works(pool, 3));
    }
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
    test_every_thread_runs_and_meets_the_others();
    test_late_threads_and_sleepers();
    test_callers_take_turns();
    test_nothing_spins_between_steps();
#if !defined(_WIN32) && !defined(__SANITIZE_THREAD__)
    test_a_fork_gets_threads_of_its_own();
    test_a_fork_amid_a_step();
#endif
    test_default_threads();
    return test_result();
}
