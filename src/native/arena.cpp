#include "arena.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <sys/mman.h>
#endif

// AddressSanitizer knows nothing of pages from the system: what no piece has of a chunk is told to it.
#if defined(__SANITIZE_ADDRESS__)
#define PRONK_ASAN
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PRONK_ASAN
#endif
#endif
#if defined(PRONK_ASAN)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(data, bytes) ((void)0)
#define ASAN_UNPOISON_MEMORY_REGION(data, bytes) ((void)0)
#endif

namespace pronk {

namespace {

constexpr size_t kAlign = 64;
constexpr size_t kChunk = 32 << 20;
constexpr size_t kPage = 64 << 10;  // no system here has larger ones
constexpr size_t kHugePage = 2 << 20;

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Pages from the system: zeroed, and counted against the process only once they are touched.
#if defined(_WIN32)
uint8_t* map(size_t bytes) {
    return static_cast<uint8_t*>(VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE));
}

void unmap(uint8_t* data, size_t) { VirtualFree(data, 0, MEM_RELEASE); }
#else
// A large chunk begins on a huge page, which the system does not see to by itself: what sticks out is given back.
uint8_t* map(size_t bytes) {
    const size_t slack = bytes >= kHugePage ? kHugePage : 0;
    void* mapped = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    uint8_t* data = static_cast<uint8_t*>(mapped);
    if (slack) {
        const size_t before = round_up(reinterpret_cast<uintptr_t>(data), kHugePage) - reinterpret_cast<uintptr_t>(data);
        if (before) munmap(data, before);
        data += before;
        if (slack > before) munmap(data + bytes, slack - before);
    }
#if defined(MADV_HUGEPAGE)
    madvise(data, bytes, MADV_HUGEPAGE);  // a wish: small pages do too
#endif
    return data;
}

void unmap(uint8_t* data, size_t bytes) { munmap(data, bytes); }
#endif

}  // namespace

Arena::~Arena() { release(); }

Arena::Arena(Arena&& other) noexcept : chunks_(std::move(other.chunks_)), total_(std::exchange(other.total_, 0)) {
    other.chunks_.clear();
}

Arena& Arena::operator=(Arena&& other) noexcept {
    std::swap(chunks_, other.chunks_);
    std::swap(total_, other.total_);
    return *this;
}

uint8_t* Arena::allocate(size_t bytes) {
    if (bytes > std::numeric_limits<size_t>::max() / 2) throw std::bad_alloc();
    const size_t size = std::max(round_up(bytes, kAlign), kAlign);
    for (Chunk& chunk : chunks_)
        if (chunk.size - chunk.used >= size) {
            uint8_t* data = chunk.data + chunk.used;
            ASAN_UNPOISON_MEMORY_REGION(data, size);
            chunk.used += size;
            total_ += size;
            return data;
        }
    chunks_.reserve(chunks_.size() + 1);  // nothing may throw between the system's pages and their place here
    const size_t mapped = round_up(std::max(size, kChunk), kPage);
    uint8_t* data = map(mapped);
    if (!data) throw std::bad_alloc();
    ASAN_POISON_MEMORY_REGION(data + size, mapped - size);
    chunks_.push_back({data, mapped, size});
    total_ += size;
    return data;
}

void Arena::release() {
    for (const Chunk& chunk : chunks_) {
        ASAN_UNPOISON_MEMORY_REGION(chunk.data, chunk.size);  // others may get these addresses
        unmap(chunk.data, chunk.size);
    }
    chunks_.clear();
    total_ = 0;
}

}  // namespace pronk
