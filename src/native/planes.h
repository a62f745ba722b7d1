// Codes of 2 to 8 bits: where they lie in a panel, and what a file's block is made of.
//
// A block of a panel (256 columns, or 32 where each group has a half of its own) is its groups of 32 columns one after
// the other, and then a half for each row, [64]: a scale; and a second, where there are minima.
//
// A group is a plane of codes, one of the whole numbers that are its parts' scales [32 / part][64], and one of those of their minima.
// Codes of b bits are b lines of [64][4] bytes. Byte (line, row, i) holds columns 4 s + i of one step s or of several: as many
// whole codes as fit, from its lowest bits up. What it has left on top is part of another: of 6 bits two, of 5 three, of 3 two.
// So the codes of four columns are whole lines shifted and masked, and those in pieces two or three of such.
#pragma once

#include "source.h"

namespace pronk {

constexpr int kSteps = kGroup / 4;  // of a group: four columns

// Bits of a code: `count` from bit `from` on of a byte of line `line` are the code's from bit `to` on.
struct Piece {
    int line, from, count, to;
};
struct Pieces {
    Piece of[3] = {};
    int count = 1;
};

// Where codes of `bits` lie of step `step`.
constexpr Pieces pieces(int bits, int step) {
    const int fields = 8 / bits;  // whole codes of a byte
    if (bits == 6) {
        const int line = step / 4 * 3;
        if (step % 4 == 3) return {{{line, 6, 2, 0}, {line + 1, 6, 2, 2}, {line + 2, 6, 2, 4}}, 3};
        return {{{line + step % 4, 0, 6, 0}}};
    }
    if (step < bits * fields) return {{{step / fields, step % fields * bits, bits, 0}}};
    if (bits == 5) {
        if (step == 7) return {{{2, 5, 3, 0}, {3, 7, 1, 3}, {4, 7, 1, 4}}, 3};
        return {{{step - 5, 5, 3, 0}, {step - 2, 5, 2, 3}}, 2};
    }
    return {{{step - 6, 6, 2, 0}, {2, step, 1, 2}}, 2};  // 3 bits
}

// Whether none are in pieces.
constexpr bool fill_bytes(int bits) { return 8 % bits == 0; }

// Whether every bit of a group's codes has a place, and no two have one.
constexpr bool have_places(int bits) {
    int taken[8] = {};  // bits of a line
    for (int step = 0; step < kSteps; ++step) {
        const Pieces found = pieces(bits, step);
        int code = 0;
        for (int i = 0; i < found.count; ++i) {
            const int mask = (1 << found.of[i].count) - 1, from = mask << found.of[i].from, to = mask << found.of[i].to;
            if (found.of[i].line >= bits || from > 255 || taken[found.of[i].line] & from || code & to) return false;
            taken[found.of[i].line] |= from, code |= to;
        }
        if (code != (1 << bits) - 1) return false;
    }
    return true;
}
static_assert(have_places(2) && have_places(3) && have_places(4) && have_places(5) && have_places(6) && have_places(8));

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
