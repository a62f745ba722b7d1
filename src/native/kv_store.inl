// Part of kernels_attention.cpp: how keys and values are stored, but for those of 4 bits (kv_codes.inl).

// `count` numbers as a type has them, into `out`; times `inverse`, where it has scales.
template <KVType kType>
void store_as(const float* x, int count, float inverse, uint8_t* out) {
    constexpr const KVTraits& type = traits(kType);
    for (int i = 0; i < count; i += 16) {
        F v = load_part(x + i, count - i);
        if constexpr (type.scales) v = S::mul(v, S::set(inverse));
        alignas(64) uint8_t part[64] = {};
        KVOp<kType>::store(part, v);
        std::memcpy(out + i * type.bytes, part, (count - i < 16 ? count - i : 16) * type.bytes);
    }
}

// Element i of `from`, of so many bytes, goes to element i * stride of `to`.
template <int kBytes>
void scatter(const uint8_t* from, int count, uint8_t* to, int stride) {
    using T = std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>;
    static_assert(sizeof(T) == kBytes);
    for (int i = 0; i < count; ++i) ((T*)to)[(size_t)i * stride] = ((const T*)from)[i];
}

#define PRONK_ONCE __attribute__((noinline))  // in the library, not once for each number of query rows

// Pieces of a vector [d] once it is turned, of which the last is kept.
struct Turned {
    float numbers[kMostTurned];
    const float* filled = nullptr;

    const float* part(const float* x, int i, int d) {  // from number i to the end of its piece
        const int begin = i / kMostTurned * kMostTurned, count = d - begin < kMostTurned ? d - begin : kMostTurned;
        if (filled != x + begin) {
            turn_blocks(x + begin, count, turned_together(d), numbers);
            filled = x + begin;
        }
        return numbers + (i - begin);
    }
};

float inverse_scale(const float* x, int size, Turned& turned, float* scale) {
    float amax = 0;
    bool finite = true;
    for (int begin = 0; begin < size; begin += kMostTurned) {
        const float* part = turned.part(x, begin, size);
        for (int i = 0; i < size - begin && i < kMostTurned; ++i) {
            const float number = std::fabs(part[i]);
            amax = number > amax ? number : amax, finite &= number <= 3.4e38f;
        }
    }
    *scale = finite ? amax / 127 : NAN;
    const float inverse = amax > 0 ? 127 / amax : 0;
    return std::isfinite(inverse) ? inverse : 0;
}

// Whether all numbers are finite once stored.
bool fits(float most, const float* x, int count) {
    bool all = true;
    for (int i = 0; i < count; ++i) all &= std::fabs(x[i]) <= most;
    return all;
}

template <KVType kType>
void store_kv_as(const KVLayout& layout, uint8_t* block, int slot, const float* key, const float* value) {
    constexpr const KVTraits& type = traits(kType);
    constexpr int size = type.bytes, dims = type.dims;
    const int d = layout.head_dim;
    uint8_t *keys = block, *values = block + layout.keys_bytes;
    if (slot == 0) std::memset(values, 0, layout.values_bytes);
    // A value that is not finite would reach rows that may not see it, as 0 * infinity: its key carries the NaN instead.
    const bool sound = fits(type.most, value, d);
    Turned turned[2];
    constexpr float zeros[kPanelRows] = {};
    float* key_scale = (float*)(keys + (size_t)d * kKVBlock * size) + slot;
    float inverse = 0, value_inverse = 0;
    if constexpr (type.scales) {
        inverse = inverse_scale(key, d, turned[0], key_scale);
        float* value_scale = (float*)(values + (size_t)layout.padded_dim * kKVBlock * size) + slot;
        if (sound)
            value_inverse = inverse_scale(value, d, turned[1], value_scale);
        else
            *value_scale = 0;
    }
    alignas(64) uint8_t part[kPanelRows * sizeof(float)];
    for (int i = 0; i < d; i += kPanelRows) {
        const int count = d - i < kPanelRows ? d - i : kPanelRows;
        const float *keys_part = key + i, *values_part = value + i;
        if constexpr (type.turned) {
            keys_part = turned[0].part(key, i, d);
            if (sound) values_part = turned[1].part(value, i, d);
        }
        std::memset(part, 0, sizeof part);
        store_as<kType>(keys_part, count, inverse, part);
        scatter<dims * size>(part, (count + dims - 1) / dims, keys + (i * kKVBlock + slot * dims) * size, kKVBlock);
        uint8_t* group = values + (size_t)i * kKVBlock * size;
        store_as<kType>(sound ? values_part : zeros, count, value_inverse, part);
        if constexpr (dims > 1)
            scatter<size>(part, count, group + (slot / dims * dims * kPanelRows + slot % dims) * size, dims);
        else
            std::memcpy(group + slot * kPanelRows * size, part, count * size);
    }
    if (sound) return;
    const float nan = NAN;
    if constexpr (type.scales) {
        *key_scale = nan;
    } else {
        store_as<kType>(&nan, 1, 0, part);
        std::memcpy(keys + slot * dims * size, part, size);
    }
}
