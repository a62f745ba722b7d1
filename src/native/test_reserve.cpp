#include "reserve.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "test.h"

using pronk::Reserve;

namespace {

constexpr size_t kMiB = 1 << 20;

bool all(const uint8_t* data, size_t bytes, uint8_t value) {
    return std::all_of(data, data + bytes, [value](uint8_t byte) { return byte == value; });
}

template <class Do>
bool throws(const Do& what) {
    try {
        what();
    } catch (const std::bad_alloc&) {
        return true;
    }
    return false;
}

void test_it_grows_where_it_is() {
    Reserve memory(100 * kMiB);
    uint8_t* data = memory.data();
    CHECK(reinterpret_cast<uintptr_t>(data) % 64 == 0);
    size_t filled = 0;
    for (const size_t bytes : {size_t{1}, 3 * kMiB, 3 * kMiB + 1, 40 * kMiB, 100 * kMiB}) {
        memory.grow(bytes);
        CHECK(memory.data() == data);
        CHECK(all(data, filled, 7) && all(data + filled, bytes - filled, 0));
        std::memset(data, 7, bytes);
        filled = bytes;
    }
    memory.grow(5);
    CHECK(all(data, filled, 7));
}

void test_no_more_than_was_set_aside() {
    Reserve memory(3 * kMiB);
    memory.grow(1);
    CHECK(throws([&] { memory.grow(memory.most() + 1); }));
    CHECK(throws([] { Reserve{std::numeric_limits<size_t>::max()}; }));
    CHECK(throws([] { Reserve{std::numeric_limits<size_t>::max() / 4}; }));
    memory.data()[0] = 1;
    memory.grow(memory.most());
    CHECK(memory.data()[0] == 1 && memory.data()[memory.most() - 1] == 0);
    Reserve none;
    none.grow(0);
    CHECK(none.most() == 0 && throws([&] { none.grow(1); }));
}

void test_moves() {
    Reserve first(kMiB), second;
    first.grow(10);
    first.data()[9] = 1;
    second = std::move(first);
    CHECK(second.data()[9] == 1 && first.data() == nullptr);
    const Reserve third(std::move(second));
    CHECK(third.data()[9] == 1 && second.data() == nullptr);
}

}  // namespace

int main() {
    test_it_grows_where_it_is();
    test_no_more_than_was_set_aside();
    test_moves();
    return test_result();
}
