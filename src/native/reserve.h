// Memory that grows where it is: its addresses are set aside at first, and the system gives pages as it grows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pronk {

class Reserve {
public:
    Reserve() = default;
    // Addresses for so many bytes, which take no memory; begins on a huge page. Throws std::bad_alloc.
    explicit Reserve(size_t most);
    ~Reserve();
    Reserve(Reserve&& other) noexcept { *this = static_cast<Reserve&&>(other); }
    Reserve& operator=(Reserve&& other) noexcept;

    uint8_t* data() const { return data_; }
    size_t most() const { return most_; }
    // The first so many bytes may be used from now on, and are zero where they could not be before. Throws std::bad_alloc,
    // having changed nothing.
    void grow(size_t bytes);

private:
    uint8_t* data_ = nullptr;
    size_t most_ = 0, usable_ = 0;
};

}  // namespace pronk
