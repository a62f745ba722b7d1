// Whether bytes are what they were: XXH64 of pieces, each on a core of its own, and of their sums.
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md. Against damage, not against malice.
#pragma once

#include <cstddef>
#include <cstdint>

#include "threads.h"

namespace pronk {

uint64_t xxh64(const uint8_t* data, size_t bytes);

uint64_t checksum(const uint8_t* data, size_t bytes, ThreadPool& pool);

}  // namespace pronk
