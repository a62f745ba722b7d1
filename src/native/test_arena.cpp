#include "arena.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "test.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

using pronk::Arena;

namespace {

constexpr size_t kMiB = 1 << 20;

bool zeroed(const uint8_t* data, size_t bytes) {
    return std::all_of(data, data + bytes, [](uint8_t byte) { return byte == 0; });
}

void test_small_pieces_share_a_chunk() {
    Arena arena;
    uint8_t* first = arena.allocate(1);
    uint8_t* second = arena.allocate(100);
    CHECK(second == first + 64);
    CHECK(arena.allocate(64) == second + 128);
    CHECK(arena.nbytes() == 64 + 128 + 64);
    CHECK(arena.allocate(0) != arena.allocate(0));
}

void test_pieces_are_zeroed_aligned_and_apart() {
    Arena arena;
    for (const size_t bytes : {size_t{1}, 63 * kMiB + 5, 5 * kMiB, 31 * kMiB, size_t{4097}, 2 * kMiB}) {
        uint8_t* data = arena.allocate(bytes);
        CHECK(reinterpret_cast<uintptr_t>(data) % 64 == 0);
        CHECK(zeroed(data, bytes));
        std::memset(data, 0xff, bytes);
    }
}

void test_what_starts_a_chunk_starts_a_huge_page() {
#if !defined(_WIN32)
    Arena arena;
    CHECK(reinterpret_cast<uintptr_t>(arena.allocate(33 * kMiB)) % (2 * kMiB) == 0);
#endif
}

// Or else no test would see a kernel read past the end of a matrix.
void test_a_sanitizer_sees_what_lies_behind_the_last_piece() {
#if defined(__SANITIZE_ADDRESS__)
    Arena arena;
    for (const size_t bytes : {size_t{640}, size_t{64}, 33 * kMiB + 64}) {
        uint8_t* data = arena.allocate(bytes);
        CHECK(!__asan_region_is_poisoned(data, bytes));
        CHECK(__asan_address_is_poisoned(data + bytes));
    }
#endif
}

void test_moves_and_release() {
    Arena first;
    uint8_t* data = first.allocate(10);
    Arena second(std::move(first));
    CHECK(first.nbytes() == 0 && second.nbytes() == 64);
    first = std::move(second);
    data[9] = 1;
    CHECK(first.nbytes() == 64 && second.nbytes() == 0);
    first.release();
    CHECK(first.nbytes() == 0);
    CHECK(zeroed(first.allocate(10), 10));
}

void test_too_much_changes_nothing() {
    Arena arena;
    arena.allocate(1);
    constexpr size_t most = std::numeric_limits<size_t>::max();
    for (const size_t bytes : {most, most / 2, most / 4}) {
        bool thrown = false;
        try {
            arena.allocate(bytes);
        } catch (const std::bad_alloc&) {
            thrown = true;
        }
        CHECK(thrown);
    }
    CHECK(arena.nbytes() == 64);
    CHECK(zeroed(arena.allocate(100), 100));
}

}  // namespace

int main() {
    test_small_pieces_share_a_chunk();
    test_pieces_are_zeroed_aligned_and_apart();
    test_what_starts_a_chunk_starts_a_huge_page();
    test_a_sanitizer_sees_what_lies_behind_the_last_piece();
    test_moves_and_release();
    test_too_much_changes_nothing();
    return test_result();
}
