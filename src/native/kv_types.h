// One record for each type that keys and values are stored in, and how a block of them is laid out.
//
// A new type is a record here, its register tiles and how 16 numbers are stored (KVOp in kernels_attention.cpp), and its
// name in tests/native.
#pragma once

#include "formats.h"

namespace pronk {

constexpr int kSumsOf = 16;   // numbers of a query whose sum is kept, where keys have groups of that many
constexpr int kKVBlock = 64;  // tokens in a block of the KV cache

enum class KVType : int { f32, f16, bf16, int8, q4 };

struct KVTraits {
    KVType id;
    const char* name;
    int bytes;            // of a number
    float most;           // no larger magnitude is sure to be finite once stored
    int dims = 1;         // of a key that lie together, and keys of a value
    bool scales = false;  // a float for each key and each value, of which numbers are 127ths, or steps of groups multiples
    bool turned = false;  // each head: what attends is turned too, and what comes of it turned back (turn.h)
    int group = 0;        // numbers of half a byte that share a step and a least number, each a byte (kv_codes.inl); or none
};

inline constexpr KVTraits kKVTypes[] = {
    {.id = KVType::f32, .name = "f32", .bytes = 4, .most = 3.4e38f},
    {.id = KVType::f16, .name = "f16", .bytes = 2, .most = 65519.0f},
    {.id = KVType::bf16, .name = "bf16", .bytes = 2, .most = 3.38e38f, .dims = 2},
    // Turning sums up to 256 numbers.
    {.id = KVType::int8, .name = "int8", .bytes = 1, .most = 1e36f, .scales = true, .turned = true},
    {.id = KVType::q4, .name = "q4", .bytes = 1, .most = 1e36f, .scales = true, .turned = true, .group = 16},
};
static_assert(is_in_order(kKVTypes));
static constexpr const KVTraits& traits(KVType type) { return kKVTypes[static_cast<int>(type)]; }

// Keys and values of one head in one block, laid out as panels whose "rows" are keys, and head dimensions:
//   keys    f32, f16 [D][64]; bf16 [D/2][64][2]; int8 [D][64], float scale[64]
//   values  for each 64 of D: f32, f16 [64][64]; bf16 [32][64][2]; int8 [64][64]; then, int8 only, float scale[64]
// q4 has two numbers in a byte, the first in its low half, and then what its groups share:
//   keys    [D/2][64]; [D/16][64] steps; [D/16][64] least numbers; float scale[64]
//   values  for each 64 of D: [64/2][64]; then [D/16][64] steps; [D/16][64] least numbers; float scale[64]
struct KVLayout {
    KVType type;
    int head_dim, padded_dim;         // the latter a multiple of 64: values come in panels
    size_t keys_bytes, values_bytes;  // of one head in one block; multiples of 64
};

KVLayout kv_layout(KVType type, int head_dim);

}  // namespace pronk
