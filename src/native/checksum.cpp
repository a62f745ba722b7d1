#include "checksum.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

namespace pronk {

namespace {

constexpr size_t kPiece = 1 << 20;
constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                   kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;

template <class T>
T read(const uint8_t* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

uint64_t round(uint64_t acc, uint64_t lane) { return std::rotl(acc + lane * kPrime2, 31) * kPrime1; }

}  // namespace

uint64_t xxh64(const uint8_t* data, size_t bytes) {
    const uint8_t *p = data, *const end = data + bytes;
    uint64_t acc = kPrime5;
    if (bytes >= 32) {
        uint64_t lanes[] = {kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1};
        for (; end - p >= 32; p += 32)
            for (int i = 0; i < 4; ++i) lanes[i] = round(lanes[i], read<uint64_t>(p + 8 * i));
        acc = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
        for (const uint64_t lane : lanes) acc = (acc ^ round(0, lane)) * kPrime1 + kPrime4;
    }
    acc += bytes;
    for (; end - p >= 8; p += 8) acc = std::rotl(acc ^ round(0, read<uint64_t>(p)), 27) * kPrime1 + kPrime4;
    if (end - p >= 4) acc = std::rotl(acc ^ read<uint32_t>(p) * kPrime1, 23) * kPrime2 + kPrime3, p += 4;
    for (; p < end; ++p) acc = std::rotl(acc ^ *p * kPrime5, 11) * kPrime1;
    acc = (acc ^ acc >> 33) * kPrime2;
    acc = (acc ^ acc >> 29) * kPrime3;
    return acc ^ acc >> 32;
}

uint64_t checksum(const uint8_t* data, size_t bytes, ThreadPool& pool) {
    std::vector<uint64_t> sums((bytes + kPiece - 1) / kPiece);
    pool.run([&](int thread) {
        Cursor cursor{thread};
        pool.phases().parallel_for(cursor, static_cast<int>(sums.size()), 1, [&](int piece, int) {
            const size_t at = piece * kPiece;
            sums[piece] = xxh64(data + at, std::min(kPiece, bytes - at));
        });
    });
    return xxh64(reinterpret_cast<const uint8_t*>(sums.data()), sums.size() * sizeof(uint64_t));
}

}  // namespace pronk
