#include "reserve.h"

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <sys/mman.h>
#endif

namespace pronk {

namespace {

constexpr size_t kHugePage = 2 << 20;

#if defined(_WIN32)
uint8_t* set_aside(size_t bytes) { return static_cast<uint8_t*>(VirtualAlloc(nullptr, bytes, MEM_RESERVE, PAGE_NOACCESS)); }
bool make_usable(uint8_t* data, size_t bytes) { return VirtualAlloc(data, bytes, MEM_COMMIT, PAGE_READWRITE) != nullptr; }
void give_back(uint8_t* data, size_t) { VirtualFree(data, 0, MEM_RELEASE); }
#else
#if !defined(MAP_NORESERVE)
#define MAP_NORESERVE 0
#endif
// What sticks out at both ends of whole huge pages is given back.
uint8_t* set_aside(size_t bytes) {
    void* mapped = mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    uint8_t* data = static_cast<uint8_t*>(mapped);
    const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(data) % kHugePage) % kHugePage;
    if (before) munmap(data, before);
    data += before;
    if (kHugePage > before) munmap(data + bytes, kHugePage - before);
#if defined(MADV_HUGEPAGE)
    madvise(data, bytes, MADV_HUGEPAGE);  // a wish: small pages do too
#endif
    return data;
}
bool make_usable(uint8_t* data, size_t bytes) { return mprotect(data, bytes, PROT_READ | PROT_WRITE) == 0; }
void give_back(uint8_t* data, size_t bytes) { munmap(data, bytes); }
#endif

}  // namespace

Reserve::Reserve(size_t most) {
    if (most > std::numeric_limits<size_t>::max() / 2) throw std::bad_alloc();
    if (most == 0) return;
    most = (most + kHugePage - 1) / kHugePage * kHugePage;
    data_ = set_aside(most);
    if (!data_) throw std::bad_alloc();
    most_ = most;
}

Reserve::~Reserve() {
    if (data_) give_back(data_, most_);
}

Reserve& Reserve::operator=(Reserve&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(most_, other.most_);
    std::swap(usable_, other.usable_);
    return *this;
}

void Reserve::grow(size_t bytes) {
    if (bytes > most_) throw std::bad_alloc();
    const size_t wanted = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    if (wanted <= usable_) return;
    if (!make_usable(data_ + usable_, wanted - usable_)) throw std::bad_alloc();
    usable_ = wanted;
}

}  // namespace pronk
