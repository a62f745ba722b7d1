// Codes of 2 to 8 bits: where they lie in a panel, and what a file's block is made of.
//
// A block of a panel (256 columns, or 32 where each group has a half of its own) is its groups of 32 columns one after
// the other, and then a half for each row, [64]: a scale; and a second, where there are minima.
//
// A group is its planes, the whole numbers that are its parts' scales [32 / part][64], and those of their minima. A code of 6
// bits has 4 of them in one plane and 2 in another: 5 are 4 + 1, 3 are 2 + 1; 8 are one plane. A plane of b bits is b lines of [64][4] bytes;
// byte (line, row, i) holds columns 4 s + i of the steps s = line * 8 / b + f, f ascending from its lowest bits. So the codes of four
// columns are one field of one line in each plane, and what unpacks them masks and shifts whole lines.
#pragma once

#include "source.h"

namespace pronk {

constexpr int kSteps = kGroup / 4;  // of a group: four columns

// Planes from the lowest bits up.
constexpr int kPlaneBits[] = {8, 4, 2, 1};

// Whether codes of `bits` have a plane of `plane` bits, and what lies under it.
constexpr bool has_plane(int bits, int plane) { return bits & plane; }
constexpr int bits_under(int bits, int plane) { return bits & ~(2 * plane - 1); }

struct PlaneLayout {
    int codes, group, halves, block;  // bytes: of a group's codes, of all of a group, before the halves, of a block

    constexpr explicit PlaneLayout(const FormatTraits& format)
        : codes(format.bits * kLineBytes), group(codes + whole_bytes(format) * kPanelRows),
          halves(format.columns / kGroup * group), block(format.bytes * kPanelRows) {}

    // Of part h of a group's scales and minima, which may share bytes.
    constexpr int scale(int h) const { return codes + h * kPanelRows; }
    constexpr int minimum(const FormatTraits& format, int h) const {
        return scale(shares_bytes(format) ? h : kGroup / format.part + h);
    }
    constexpr int minimum_half() const { return halves + kPanelRows * 2; }
};

// A file's block taken apart. w = scale * scales[p] * (code - offset) + minimum * minima[p] of part p.
struct Taken {
    uint8_t codes[kChunk] = {};
    int8_t scales[16] = {}, minima[16] = {};  // none where each group has a half
    uint16_t scale = 0, minimum = 0;          // halves
};

using Take = void(const uint8_t* block, Taken& taken);
Take take_q6_k, take_q5_k, take_q4_k, take_q3_k, take_q2_k, take_q5_0, take_q5_1, take_iq4_nl, take_iq4_xs;

// What codes of IQ4_NL and IQ4_XS stand for.
inline constexpr int8_t kIQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

}  // namespace pronk
