#include "source.h"

namespace pronk {

namespace {

template <class T, class Convert>
void convert(const uint8_t* row, int at, int count, float* out, Convert to_float) {
    row += at * sizeof(T);
    for (size_t line = 0; line < kChunk * sizeof(T); line += 64) __builtin_prefetch(row + kChunk * sizeof(T) + line);
    for (int i = 0; i < count; ++i) out[i] = to_float(read<T>(row + i * sizeof(T)));
}

}  // namespace

void read_f32(const uint8_t* row, int at, int count, float* out) {
    convert<float>(row, at, count, out, [](float x) { return x; });
}

void read_f16(const uint8_t* row, int at, int count, float* out) { convert<uint16_t>(row, at, count, out, f16_to_f32); }

void read_bf16(const uint8_t* row, int at, int count, float* out) { convert<uint16_t>(row, at, count, out, bf16_to_f32); }

void read_int8(const uint8_t* row, int at, int count, float* out) {
    const float scale = read<float>(row);
    row += sizeof scale + at;
    for (int i = 0; i < count; ++i) out[i] = scale * static_cast<int8_t>(row[i]);
}

void read_q8_0(const uint8_t* row, int at, int count, float* out) {
    for (int i = 0; i < count; i += 32) {
        const uint8_t* block = row + (at + i) / 32 * 34;
        const float d = f16_to_f32(read<uint16_t>(block));
        for (int k = 0; k < 32; ++k) out[i + k] = d * static_cast<int8_t>(block[2 + k]);
    }
}

void read_q4_0(const uint8_t* row, int at, int count, float* out) {
    for (int i = 0; i < count; i += 32) {
        const uint8_t* block = row + (at + i) / 32 * 18;
        const float d = f16_to_f32(read<uint16_t>(block));
        for (int k = 0; k < 16; ++k) {
            out[i + k] = d * ((block[2 + k] & 15) - 8);
            out[i + 16 + k] = d * ((block[2 + k] >> 4) - 8);
        }
    }
}

void read_q4_1(const uint8_t* row, int at, int count, float* out) {
    for (int i = 0; i < count; i += 32) {
        const uint8_t* block = row + (at + i) / 32 * 20;
        const float d = f16_to_f32(read<uint16_t>(block)), m = f16_to_f32(read<uint16_t>(block + 2));
        for (int k = 0; k < 16; ++k) {
            out[i + k] = d * (block[4 + k] & 15) + m;
            out[i + 16 + k] = d * (block[4 + k] >> 4) + m;
        }
    }
}

void read_q4_k(const uint8_t* row, int at, int count, float* out) {
    for (int i = 0; i < count; i += 32) {
        const Q4K block{row + (at + i) / 256 * 144};
        const int group = (at + i) / 32 % 8, shift = group % 2 * 4;
        const float d = block.d() * block.scale(group), m = block.dmin() * block.minimum(group);
        for (int k = 0; k < 32; ++k) out[i + k] = d * (block.codes(group)[k] >> shift & 15) - m;
    }
}

}  // namespace pronk
