// Memory for weights and keys: zeroed, 64-byte aligned, on huge pages where the system has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pronk {

class Arena {
public:
    Arena() = default;
    ~Arena();
    Arena(Arena&& other) noexcept;
    Arena& operator=(Arena&& other) noexcept;

    // Zeroed and 64-byte aligned; lives as long as the arena. Throws std::bad_alloc.
    uint8_t* allocate(size_t bytes);
    size_t nbytes() const { return total_; }
    void release();

private:
    struct Chunk {
        uint8_t* data;
        size_t size, used;
    };
    std::vector<Chunk> chunks_;
    size_t total_ = 0;
};

}  // namespace pronk
