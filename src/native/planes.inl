// Products of codes in planes (planes.h), which are bytes or are unpacked to such. Part of kernels_matmul.cpp.
//
// One token multiplies what it unpacks where it is, in registers, for it reads weights once; so do tiles with AVX-512 and VNNI, of
// codes that fill bytes or of at most four tokens. For others a few groups of a panel are unpacked into the first-level cache, and
// multiplied by many tokens: what unpacking costs is shared by all of them, and the tiles know nothing of formats but how many
// columns share a scale. What is summed in which order is the same.
//
// Codes are unsigned, and in a sum around half of their range: of each product's x that half is taken back at first (Simd::begin).
// So sums of 16 products of 6 bits, and of 32 of 5, fit in 16 bits for each pair of them. Beside minima codes of at most 4 bits are
// as they are, for those fit, too, and sums that begin with nothing are 4 to 14% faster.

struct Unpacked {  // of all rows of a panel
    alignas(64) uint8_t codes[kGroupsAtOnce][kSteps][kLineBytes];
    alignas(64) float scales[kGroupsAtOnce][2][kPanelRows], minima[kGroupsAtOnce][2][kPanelRows];
    alignas(64) int32_t factors[kGroupsAtOnce][2][kPanelRows];  // where parts are joined
};

constexpr uint8_t kRaisedIQ4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr int kRaised = 128;

// A format as tiles see it.
template <Format kFormat>
struct Planes {
    static constexpr const FormatTraits& format = traits(kFormat);
    static constexpr PlaneLayout layout{format};
    static constexpr int parts = kGroup / format.part, groups = format.columns / kGroup;
    static constexpr bool wide = format.table || format.bits == 8, minima = format.minima, whole = format.scales == Scales::part;
    static constexpr bool as_is = format.bits == 8;  // nothing is unpacked
    // Whether sums of both parts are added up, each times its whole scale, before they are floats. 4 x 32767 x 128 is under 2^24:
    // they are exact.
    static constexpr bool joined = parts == 2 && S::joins_parts;
    // Where registers are few, larger tiles are worth a sum of floats' way to memory and back, once a group but not twice.
    static constexpr bool sums_in_registers = kRoomy || (parts == 2 && !joined);
    static constexpr bool fills_bytes = fill_bytes(format.bits);
    static constexpr int period = fills_bytes && 8 / format.bits <= kSteps / parts ? 8 / format.bits : kSteps / parts;  // steps with a field each
    static constexpr int half = 1 << (format.bits - 1);
    static constexpr int middle = format.table ? kRaised : minima && format.bits <= 4 ? 0 : half;
    static_assert(minima || format.table || format.offset == middle);
    static_assert(!joined || !minima || !middle);  // a minimum knows no part's scale there
    static_assert(wide || (middle ? middle : 2 * half - 1) * 127 * 2 * (kSteps / parts) <= 32767);

    // Codes of step kStep of 16 rows, whose words in the group's first line are at p.
    template <int kStep>
    PRONK_INLINE S::Bytes codes(const uint8_t* p) {
        constexpr Pieces pieces = pronk::pieces(format.bits, kStep);
        // Lines that come up again are read again, from the first-level cache: kept, they would take the registers that sums need.
        if constexpr (kRoomy && whole && pieces.count > 1) asm("" : "+r"(p));
        const auto piece = [&]<int kPiece>(std::integral_constant<int, kPiece>) __attribute__((always_inline)) {
            constexpr Piece at = pieces.of[kPiece];
            static_assert(at.from >= at.to);
            return S::template field<at.from - at.to, ((1 << at.count) - 1) << at.to>(S::load_bytes(p + at.line * kLineBytes));
        };
        S::Bytes found = piece(std::integral_constant<int, 0>());
        if constexpr (pieces.count > 1) found = S::either(found, piece(std::integral_constant<int, 1>()));
        if constexpr (pieces.count > 2) found = S::either(found, piece(std::integral_constant<int, 2>()));
        if constexpr (format.table) return S::look_up(kRaisedIQ4, found);
        return found;
    }

    // Of part h of group g of a block, for 16 rows from `row` on.
    PRONK_INLINE F scale(const uint8_t* block, int g, int h, size_t row) {
        const F half = scale(block, row);
        if constexpr (!whole) return half;
        const uint8_t* p = block + g * layout.group + layout.scale(h) + row;
        return S::mul(half, shares_bytes(format) ? S::load_nibbles(p, 0) : S::load_int8(p));
    }

    // The same in two: what parts are joined with, and of all of a block. V is S; a parameter, so that nobody asks who has none.
    template <class V = S>
    PRONK_INLINE I factors(const uint8_t* block, int g, int h, size_t row) {
        const uint8_t* p = block + g * layout.group + layout.scale(h) + row;
        if constexpr (shares_bytes(format)) return V::factors_nibbles(p);
        else return V::factors_int8(p);
    }
    PRONK_INLINE F scale(const uint8_t* block, size_t row) { return S::load_f16(block + layout.halves + row * 2); }

    // What a sum of x is multiplied with, that of codes being around their middle.
    PRONK_INLINE F minimum(const uint8_t* block, int g, int h, size_t row, F scale) {
        F minimum = S::load_f16(block + layout.minimum_half() + row * 2);
        if constexpr (whole) {
            const uint8_t* p = block + g * layout.group + layout.minimum(format, h) + row;
            minimum = S::mul(minimum, shares_bytes(format) ? S::load_nibbles(p, 4) : S::load_int8(p));
        }
        if constexpr (!middle) return minimum;
        return S::add(S::mul(scale, S::set(middle)), minimum);
    }

    // What comes after group g, by who reads R vectors of its rows at a time, from `first` on, in as many turns: so many lines at once
    // are more than a core can have on their way. Half a panel's rows lie in all of its lines.
    template <int R>
    PRONK_INLINE void prefetch(const uint8_t* block, int g, int v, int first, int vectors) {
        const auto ask = [=]<int kTurns>(std::integral_constant<int, kTurns>) __attribute__((always_inline)) {
            constexpr int size = layout.block / groups, lines = (size + 63) / 64, some = (lines + kTurns - 1) / kTurns * 64;
            const uint8_t* next = block + g * size + kPrefetch + (v - first) / R * some;
            for (int line = 0; line < some; line += 64) __builtin_prefetch(next + line);
        };
        if (vectors == kVectors) ask(std::integral_constant<int, kVectors / R>());
        else ask(std::integral_constant<int, kVectors / 2 / R>());
    }

    // Groups [from, to) of a panel.
    static void unpack(const uint8_t* panel, int from, int to, int first, int vectors, Unpacked& out) {
        for (int at = 0; from + at < to; ++at) {
            const int g = (from + at) % groups;
            const uint8_t* block = panel + (from + at) / groups * layout.block;
            const uint8_t* group = block + g * layout.group;
            for (int v = 0; v < vectors; ++v) {
                prefetch<1>(block, g, v, 0, vectors);
                const int row = (first + v) * 16;
                const uint8_t* p = group + row * 4;
                uint8_t* to_codes = out.codes[at][0] + row * 4;
                [&]<int... kStep>(std::integer_sequence<int, kStep...>) __attribute__((always_inline)) {
                    (S::store_bytes(to_codes + kStep * kLineBytes, codes<kStep>(p)), ...);
                }(std::make_integer_sequence<int, kSteps>());
                for (int h = 0; h < parts; ++h) {
                    const F of = joined ? scale(block, row) : scale(block, g, h, row);
                    if constexpr (joined) S::store_int(out.factors[at][h] + row, factors(block, g, h, row));
                    S::store(out.scales[at][h] + row, of);
                    if constexpr (minima) S::store(out.minima[at][h] + row, minimum(block, g, h, row, of));
                }
            }
        }
    }
};

// Of a panel as it is packed, one group, from row `row` on.
template <Format kFormat, bool kAhead = false>
struct InPanel {
    using Of = Planes<kFormat>;
    static constexpr int period = Of::period;
    const uint8_t* block;
    int group;   // of the block
    size_t row;  // as wide as a pointer: of rows side by side one address is kept, and lines are read in their order

    template <int kStep>
    __attribute__((always_inline)) S::Bytes codes(int r, size_t period) const {
        return Of::template codes<kStep>(words(r) + period * kLineBytes);
    }
    // For what comes next, line by line, by who reads them first.
    template <int kStep>
    __attribute__((always_inline)) void ask(int r, size_t period) const {
        constexpr Piece at = pieces(Of::format.bits, kStep).of[0];
        if (kAhead && at.from == 0) __builtin_prefetch(words(r) + kPrefetch + (at.line + period) * kLineBytes);
    }
    __attribute__((always_inline)) void ask_for_scales() const {
        const uint8_t* p = block + kPrefetch;
        for (int line = group * Of::layout.group + Of::layout.codes; line < (group + 1) * Of::layout.group; line += 64) __builtin_prefetch(p + line);
        if (group == 0)
            for (int line = Of::layout.halves; line < Of::layout.block; line += 64) __builtin_prefetch(p + line);
    }
    __attribute__((always_inline)) const uint8_t* words(int r) const { return block + group * Of::layout.group + row * 4 + r * 64; }
    __attribute__((always_inline)) F scale(int h, int r) const { return Of::scale(block, group, h, row + r * 16); }
    __attribute__((always_inline)) I factors(int h, int r) const { return Of::factors(block, group, h, row + r * 16); }
    __attribute__((always_inline)) F scale(int r) const { return Of::scale(block, row + r * 16); }
    __attribute__((always_inline)) F minimum(int h, int r, F scale) const { return Of::minimum(block, group, h, row + r * 16, scale); }
};

struct InCache {
    static constexpr int period = 1;
    const Unpacked& of;
    int group;
    size_t row;

    template <int kStep>
    __attribute__((always_inline)) S::Bytes codes(int r, size_t period) const {
        return S::load_bytes(of.codes[group][kStep + period] + (row + r * 16) * 4);
    }
    template <int>
    void ask(int, size_t) const {}
    __attribute__((always_inline)) F scale(int h, int r) const { return S::load(of.scales[group][h] + row + r * 16); }
    __attribute__((always_inline)) I factors(int h, int r) const { return S::load_int(of.factors[group][h] + row + r * 16); }
    __attribute__((always_inline)) F scale(int r) const { return scale(0, r); }
    __attribute__((always_inline)) F minimum(int h, int r, F) const { return S::load(of.minima[group][h] + row + r * 16); }
};

// One token, y [64]. Group by group through all rows, so that memory is read front to back.
template <Format kFormat, int R>
void one_token(const uint8_t* panel, int groups, int first, int vectors, const Rows& x, float* y) {
    using Of = Planes<kFormat>;
    for (int v = first; v < first + vectors; ++v) S::store(y + v * 16, S::zero());
    InPanel<kFormat> weights{panel, 0, 0};
    for (int g = 0; g < groups; ++g) {
        for (int v = first; v < first + vectors; v += R) {
            Of::template prefetch<R>(weights.block, weights.group, v, first, vectors);
            weights.row = v * 16;
            const InMemory sums{y + v * 16};
            if constexpr (Of::sums_in_registers) {
                F acc[1][R];
                for (int r = 0; r < R; ++r) acc[0][r] = sums.get(0, r);
                add_group_of<Of>(weights, x, g, acc);
                for (int r = 0; r < R; ++r) sums.put(0, r, acc[0][r]);
            } else {
                add_group<Of, 1, R>(weights, Brought<Of>{x, g}, x.data + g * kGroup, x.stride, sums);
            }
        }
        if (++weights.group == Of::groups) weights.group = 0, weights.block += Of::layout.block;
    }
}

// The same of bytes as they are. Not unrolled: processors foresee what a load will read by the stride of that one
// instruction, and many of them with long strides are not foreseen.
template <Format kFormat, int R>
void one_token_of_bytes(const uint8_t* panel, int groups, int first, const Rows& x, float* y) {
    using Of = Planes<kFormat>;
    for (int r = 0; r < R; ++r) S::store(y + (first + r) * 16, S::zero());
    for (int g = 0; g < groups; ++g, panel += Of::layout.block) {
        I sum[1][R];
        for (int r = 0; r < R; ++r) sum[0][r] = S::set_int(-Of::middle * x.sum[g]);
#pragma GCC unroll 1
        for (int step = 0; step < kSteps; ++step)
            accumulate<OpInt8, R, 1>(panel + step * kLineBytes + first * OpInt8::vector, x.data + g * kGroup + 4 * step, 0, 1, sum);
        __builtin_prefetch(panel + Of::layout.halves + kPrefetch), __builtin_prefetch(panel + Of::layout.halves + kPrefetch + 64);
        for (int r = 0; r < R; ++r) {
            const F scale = S::mul(Of::scale(panel, 0, 0, (first + r) * 16), S::set(x.scale[g]));
            float* to = y + (first + r) * 16;
            S::store(to, S::fma(S::to_float(sum[0][r]), scale, S::load(to)));
        }
    }
}

// Tiles of any size unpack for themselves where there are registers, and one instruction multiplies bytes. They are large without.
constexpr bool kUnpacksInTiles = kRoomy && S::sums_in_words;

// So many unpack for themselves all the same: once or twice is no more than once through the cache. Where codes are in pieces, once.
template <class Of>
PRONK_INLINE bool are_few(int tokens) {
    return tokens == 2 || tokens == 3 || tokens == 4 || (tokens == 8 && Of::fills_bytes);
}

// Gives what is left to ask for: handed over by value, for a reference goes through memory with each line.
template <Format kFormat, int T, int R>
__attribute__((noinline)) Ahead planes_tile(const uint8_t* panel, int groups, int first, const Rows& x, float* y, Ahead ahead) {
    using Of = Planes<kFormat>;
    F acc[T][R];
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[t][r] = S::zero();
    InPanel<kFormat, (T <= kWhole)> weights{panel, 0, size_t(first) * 16};
    for (int g = 0; g < groups; ++g) {
        if constexpr (T > kWhole) ahead.ask();
        add_group_of<Of>(weights, x, g, acc);
        if constexpr (T <= kWhole) weights.ask_for_scales();  // after codes, for processors foresee what is read in order
        if (++weights.group == Of::groups) weights.group = 0, weights.block += Of::layout.block;
    }
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) S::store(y + t * kPanelRows + (first + r) * 16, acc[t][r]);
    return ahead;
}

// How often tiles of at most so many tokens, and of two vectors of rows, go over a panel.
PRONK_INLINE int rounds(int tokens, int most, int vectors) { return (tokens + most - 1) / most * (vectors / 2); }

template <Format kFormat, int kMost>  // kMost: tokens of a tile
void planes_in_tiles(const uint8_t* panel, size_t next, int groups, int first, int vectors, const Rows& x, int tokens, float* y) {
    Ahead ahead(panel + next, next, groups * rounds(tokens, kMost, kVectors));
    in_tiles<kMost, kWhole == 3>(tokens, [&]<int T>(std::integral_constant<int, T>, int t) {
        const auto with = [&]<int R>(std::integral_constant<int, R>) {
            for (int v = first; v < first + vectors; v += R)
                ahead = planes_tile<kFormat, T, R>(panel, groups, v, x.at(t), y + t * kPanelRows, ahead);
        };
        if constexpr (T == 1 && Planes<kFormat>::as_is) {
            if (vectors == 1) return with(std::integral_constant<int, 1>());
        }
        if constexpr (T <= kWhole) {
            if (vectors == kVectors) return with(std::integral_constant<int, kVectors>());
        }
        with(std::integral_constant<int, kVectors / 2>());
    });
}

// Four or eight tokens: tiles of four, and of half of the rows, take turns at a few groups. So what the second one reads is in the
// first-level cache, and lines are read almost in their order.
template <Format kFormat>
void fours_in_turn(const uint8_t* panel, size_t next, int groups, int first, int vectors, const Rows& x, int tokens, float* y) {
    using Of = Planes<kFormat>;
    constexpr int T = 4, R = kVectors / 2, turn = 8;
    static_assert(turn % Of::groups == 0);
    Ahead ahead(panel + next, next, groups * rounds(tokens, T, kVectors));
    for (int from = 0; from < groups; from += turn, panel += turn / Of::groups * Of::layout.block)
        for (int t = 0; t < tokens; t += T)
            for (int v = first; v < first + vectors; v += R) {
                float* to = y + t * kPanelRows + v * 16;
                F acc[T][R];
#pragma GCC unroll 4
                for (int i = 0; i < T; ++i)
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) acc[i][r] = from ? S::load(to + i * kPanelRows + r * 16) : S::zero();
                InPanel<kFormat> weights{panel, 0, size_t(v) * 16};
                for (int g = from; g < groups && g < from + turn; ++g) {
                    ahead.ask();
                    add_group_of<Of>(weights, x.at(t), g, acc);
                    if (++weights.group == Of::groups) weights.group = 0, weights.block += Of::layout.block;
                }
#pragma GCC unroll 4
                for (int i = 0; i < T; ++i)
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) S::store(to + i * kPanelRows + r * 16, acc[i][r]);
            }
}

// y [tokens][64] of some rows of a panel.
template <Format kFormat>
void planes_through_cache(const uint8_t* panel, size_t next, int groups, int first, int vectors, const Rows& x, int tokens, float* y) {
    using Of = Planes<kFormat>;
    if (tokens == 1) {
        constexpr int R = tile_vectors(1, 2);
        if constexpr (!Of::as_is) return one_token<kFormat, (R < kVectors / 2 ? R : kVectors / 2)>(panel, groups, first, vectors, x, y);
        if (vectors == 1) return one_token_of_bytes<kFormat, 1>(panel, groups, first, x, y);
        if (vectors == kVectors) return one_token_of_bytes<kFormat, kVectors>(panel, groups, 0, x, y);
        constexpr int half = R < kVectors / 2 ? R : kVectors / 2;
        for (int v = first; v < first + vectors; v += half) one_token_of_bytes<kFormat, half>(panel, groups, v, x, y);
        return;
    }
    for (int t = 0; t < tokens; ++t)
        for (int v = first; v < first + vectors; ++v) S::store(y + t * kPanelRows + v * 16, S::zero());
    const auto in_panel = [=](int g, size_t row) { return InPanel<kFormat>{panel + g / Of::groups * Of::layout.block, g % Of::groups, row}; };
    constexpr std::integral_constant<int, Of::sums_in_registers ? tile_tokens(2) : kTokensInMemory> most;
    Ahead ahead(panel + next, next, groups * rounds(tokens, most, Of::sums_in_registers ? kVectors : 2));
    [[maybe_unused]] const auto ask = [&]<int>(int, int, int v) __attribute__((always_inline)) {
        if (Of::sums_in_registers || v == first) ahead.ask();
    };
    // Of few tokens the first tile asks for what it will read itself. A panel further on, long rows are out of the second-level cache again.
    [[maybe_unused]] const auto ask_near = [&]<int R>(int t, int g, int v) __attribute__((always_inline)) {
        if (t) return;
        Of::template prefetch<R>(panel + g / Of::groups * Of::layout.block, g % Of::groups, v, first, vectors);
    };
    [[maybe_unused]] Unpacked unpacked;
    for (int from = 0; from < groups; from += kGroupsAtOnce) {
        const int to = from + kGroupsAtOnce < groups ? from + kGroupsAtOnce : groups;
        const auto add = [&](const auto& weights, const auto& ask, auto most) {
            if constexpr (Of::sums_in_registers) add_groups_in_registers<Of, most.value>(weights, ask, from, to, first, vectors, x, tokens, y);
            else add_groups<Of, most.value>(weights, ask, from, to, first, vectors, x, tokens, y);
        };
        if constexpr (Of::wide && S::widens_bytes) {
            if constexpr (Of::as_is) {
                const auto block = [=](int g) { return panel + g * Of::layout.block; };
                add_words<S, true>(block, [=](int g, int row) { return Of::scale(block(g), 0, 0, row); }, from, to, first, vectors, Of::middle, x, tokens, y);
            } else {
                Of::unpack(panel, from, to, first, vectors, unpacked);
                add_words<S, false>([&](int g) { return unpacked.codes[g - from][0]; },
                                    [&](int g, int row) { return S::load(unpacked.scales[g - from][0] + row); }, from, to, first, vectors,
                                    Of::middle, x, tokens, y);
            }
        } else if constexpr (Of::as_is) {
            add(in_panel, ask, most);
        } else {
            if constexpr (!Of::sums_in_registers && most.value >= 4) {
                if (are_few<Of>(tokens)) {
                    if (tokens == 3) add(in_panel, ask_near, std::integral_constant<int, 3>());
                    else add(in_panel, ask_near, std::integral_constant<int, 4>());
                    continue;
                }
            }
            Of::unpack(panel, from, to, first, vectors, unpacked);
            const auto in_cache = [&](int g, size_t row) { return InCache{unpacked, g - from, row}; };
            // Where sums of floats go through memory, even a look whether to ask costs a twentieth.
            if constexpr (Of::sums_in_registers) add(in_cache, ask, most);
            else add(in_cache, []<int>(int, int, int) {}, most);
        }
    }
}

// y [tokens][64] of some rows of a panel; of what lies behind it, `next` bytes are asked for.
template <Format kFormat>
void planes_of_panel(const uint8_t* panel, int cols, size_t next, int first, int vectors, const Rows& x, int tokens, float* y) {
    using Of = Planes<kFormat>;
    const int groups = (cols + kGroup - 1) / kGroup;
    if constexpr (kUnpacksInTiles) {
        if (tokens == 8 ? Of::fills_bytes : tokens == 4 && !Of::as_is)
            return fours_in_turn<kFormat>(panel, next, groups, first, vectors, x, tokens, y);
        // Codes in pieces cost too much to be unpacked by more than one tile.
        constexpr int most = Of::fills_bytes ? tile_tokens(2) : kWhole;
        if (Of::fills_bytes || (tokens > 1 && tokens <= most)) return planes_in_tiles<kFormat, most>(panel, next, groups, first, vectors, x, tokens, y);
    }
    planes_through_cache<kFormat>(panel, next, groups, first, vectors, x, tokens, y);
}
