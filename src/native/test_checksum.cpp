#include "checksum.h"

#include <algorithm>
#include <vector>

#include "test.h"

using namespace pronk;

namespace {

// What the reference implementation gives.
void test_sums_are_xxh64() {
    const auto of = [](const char* text) {
        const char* end = text;
        while (*end) ++end;
        return xxh64(reinterpret_cast<const uint8_t*>(text), end - text);
    };
    CHECK(of("") == 0xEF46DB3751D8E999);
    CHECK(of("a") == 0xD24EC4F1A98C6E5B);
    CHECK(of("abc") == 0x44BC2CF5AD770999);
    CHECK(of("Nobody inspects the spammish repetition") == 0xFBCEA83C8A378BF1);  // more than one stripe of 32
}

void test_a_sum_is_the_same_on_any_threads_and_another_for_any_change() {
    std::vector<uint8_t> bytes((3 << 20) + 77);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 2654435761u >> 13);
    ThreadPool one(1), three(3);
    const uint64_t sum = checksum(bytes.data(), bytes.size(), one);
    CHECK(checksum(bytes.data(), bytes.size(), three) == sum);
    for (const size_t at : {size_t{0}, size_t{1 << 20}, (size_t{1} << 20) - 1, bytes.size() - 1}) {
        bytes[at] ^= 1;
        CHECK(checksum(bytes.data(), bytes.size(), three) != sum);
        bytes[at] ^= 1;
    }
    CHECK(checksum(bytes.data(), bytes.size() - 1, three) != sum);
    std::swap_ranges(bytes.begin(), bytes.begin() + (1 << 20), bytes.begin() + (1 << 20));  // whole pieces
    CHECK(checksum(bytes.data(), bytes.size(), three) != sum);
}

}  // namespace

int main() {
    test_sums_are_xxh64();
    test_a_sum_is_the_same_on_any_threads_and_another_for_any_change();
    return test_result();
}
