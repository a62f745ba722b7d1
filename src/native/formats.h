// One record for each weight format, for each form of activations, and for each type that files store weights in. Nothing
// outside these tables asks for a format by name, but the kernels that are its own.
//
// A new block type is a record of each table that it belongs to, the functions that its records name, the register tiles
// that multiply by it (TilesOf in kernels_matmul.cpp), and its name in tests/native.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>

namespace pronk {

struct Chunk;
struct Matrix;
struct Tile;

constexpr int kPanelRows = 64;
constexpr int kGroup = 32;  // columns that share a scale, of weights as of activations

// Tables are indexed by their records' ids, and searched by name.
template <class Record, size_t kCount>
constexpr bool is_in_order(const Record (&table)[kCount]) {
    for (size_t i = 0; i < kCount; ++i)
        if (static_cast<size_t>(table[i].id) != i) return false;
    return true;
}

template <class Record, size_t kCount>
const Record* find_named(const Record (&table)[kCount], const char* name) {
    for (const Record& record : table)
        if (std::strcmp(record.name, name) == 0) return &record;
    return nullptr;
}

template <class Record, size_t kCount>
constexpr int count_of(const Record (&)[kCount]) {
    return kCount;
}

// -- what weights are multiplied with ---------------------------------------------------------------------------------

enum class ActivationFormat : int { f32, bf16, int8, int8_plain, q8, llm_int8 };

struct ActivationTraits {
    ActivationFormat id;
    const char* name;
    int bytes;              // of a number
    bool scaled = false;    // integers, with a scale a token, and with their sum
    bool grouped = false;   // with both for each 32 of them instead
    bool turned = false;    // before they are rounded: see turn.h
    bool outliers = false;  // zeros for outliers, which stand beside as floats

    constexpr bool exact() const { return id == ActivationFormat::f32; }  // nothing is rounded
};

inline constexpr ActivationTraits kActivations[] = {
    {.id = ActivationFormat::f32, .name = "f32", .bytes = 4},
    {.id = ActivationFormat::bf16, .name = "bf16", .bytes = 2},  // rounded to nearest even
    {.id = ActivationFormat::int8, .name = "int8", .bytes = 1, .scaled = true, .turned = true},
    {.id = ActivationFormat::int8_plain, .name = "int8_plain", .bytes = 1, .scaled = true},
    {.id = ActivationFormat::q8, .name = "q8", .bytes = 1, .scaled = true, .grouped = true},
    {.id = ActivationFormat::llm_int8, .name = "llm-int8", .bytes = 1, .scaled = true, .outliers = true},
};
static_assert(is_in_order(kActivations));
constexpr int kActivationFormats = count_of(kActivations);
static constexpr const ActivationTraits& traits(ActivationFormat format) { return kActivations[static_cast<int>(format)]; }

// -- what rows are packed from: little-endian, as files have them --------------------------------------------------------

// Blocks are GGUF's. int8 and its like: a float scale, and then an int8 for each weight.
enum class Source : int {
    f32, f16, bf16, q4_0, q4_1, q4_k, q8_0, int8, llm_int8, turned_int8, q6_k, q5_k, q3_k, q2_k, q5_0, q5_1, iq4_nl, iq4_xs
};

// Columns [at, at + count) of a row as floats; `at` is a multiple of kChunk, `count` at most kChunk and whole blocks. Sums
// and products are those of checkpoint/containers/gguf_blocks.py.
using Read = void(const uint8_t* row, int at, int count, float* out);
Read read_f32, read_f16, read_bf16, read_q4_0, read_q4_1, read_q4_k, read_q8_0, read_int8;
Read read_q6_k, read_q5_k, read_q3_k, read_q2_k, read_q5_0, read_q5_1, read_iq4_nl, read_iq4_xs;

// Codes into panels as they are, for a format that holds them. False where a scale is not finite, or does not fit.
using PackCodes = bool(const Matrix& matrix, const Tile& tile);
PackCodes pack_codes_q4_0, pack_codes_q4_1, pack_codes_q4_k, pack_codes_q8_0, pack_codes_int8, pack_codes_q6_k,
    pack_codes_q5_k, pack_codes_q3_k, pack_codes_q2_k, pack_codes_q5_0, pack_codes_q5_1, pack_codes_iq4_nl, pack_codes_iq4_xs;

struct SourceTraits {
    Source id;
    const char* name;
    int elements, bytes;  // of a block
    Read* read;
    PackCodes* pack_codes = nullptr;
    int before = 0;  // bytes that a row has before its first block
    bool turned = false;  // what is read is: see turn.h
};

inline constexpr SourceTraits kSources[] = {
    {Source::f32, "F32", 1, 4, read_f32},
    {Source::f16, "F16", 1, 2, read_f16},
    {Source::bf16, "BF16", 1, 2, read_bf16},
    {Source::q4_0, "Q4_0", 32, 18, read_q4_0, pack_codes_q4_0},
    {Source::q4_1, "Q4_1", 32, 20, read_q4_1, pack_codes_q4_1},
    {Source::q4_k, "Q4_K", 256, 144, read_q4_k, pack_codes_q4_k},
    {Source::q8_0, "Q8_0", 32, 34, read_q8_0, pack_codes_q8_0},
    {Source::int8, "INT8", 1, 1, read_int8, pack_codes_int8, sizeof(float)},
    {Source::llm_int8, "LLM_INT8", 1, 1, read_int8, pack_codes_int8, sizeof(float)},
    {Source::turned_int8, "TURNED_INT8", 1, 1, read_int8, pack_codes_int8, sizeof(float), true},
    {Source::q6_k, "Q6_K", 256, 210, read_q6_k, pack_codes_q6_k},
    {Source::q5_k, "Q5_K", 256, 176, read_q5_k, pack_codes_q5_k},
    {Source::q3_k, "Q3_K", 256, 110, read_q3_k, pack_codes_q3_k},
    {Source::q2_k, "Q2_K", 256, 84, read_q2_k, pack_codes_q2_k},
    {Source::q5_0, "Q5_0", 32, 22, read_q5_0, pack_codes_q5_0},
    {Source::q5_1, "Q5_1", 32, 24, read_q5_1, pack_codes_q5_1},
    {Source::iq4_nl, "IQ4_NL", 32, 18, read_iq4_nl, pack_codes_iq4_nl},
    {Source::iq4_xs, "IQ4_XS", 256, 136, read_iq4_xs, pack_codes_iq4_xs},
};
static_assert(is_in_order(kSources));
static constexpr const SourceTraits& traits(Source source) { return kSources[static_cast<int>(source)]; }

// -- weights in panels ------------------------------------------------------------------------------------------------

//   format   a panel of K columns
//   f32      [K][64] float
//   f16      [K][64] half
//   bf16     [K/2][64][2] bfloat16
//   int8     [K/4][64][4] uint8 (w + 128), then float scale[64]
//   int8_plain, llm_int8  as int8; what they are multiplied with differs, and their rows are not turned
//   and codes of 2 to 8 bits in planes: planes.h. Of these q8 (w = scale * (code - 128)), q4 (scale * code + minimum) and q4_0
//   (scale * (code - 8)) are made of floats too; all others keep GGUF's own codes and scales.
enum class Format : int {
    f32, f16, bf16, int8, int8_plain, llm_int8, q8, q4, q4_0, q6_k, q5_k, q4_k, q3_k, q2_k, q5_0, q5_1, iq4_nl, iq4_xs
};

// Of a row a float; of a group a half; of a part of a group a whole number, times a half a block of 256.
enum class Scales { none, row, group, part };

// Floats of a chunk of columns into panels. False where a scale is not finite.
using Pack = bool(const Tile& tile, const Chunk& chunk);
Pack pack_f32, pack_f16, pack_bf16, pack_int8, pack_q8, pack_q4, pack_q4_0;

// The numbers of row `row` of a panel, [K].
using Unpack = void(const Matrix& matrix, const uint8_t* panel, size_t row, float* out);
Unpack unpack_f32, unpack_f16, unpack_bf16, unpack_int8, unpack_planes;

constexpr uint32_t set_of(std::initializer_list<Source> sources) {
    uint32_t bits = 0;
    for (const Source source : sources) bits |= 1u << static_cast<int>(source);
    return bits;
}

struct FormatTraits {
    Format id;
    const char* name;
    ActivationFormat activations = ActivationFormat::f32;  // what it is multiplied with
    int columns = 1, bytes = 0;            // of a group: K is padded to whole ones, of each of which a row has so many bytes
    Pack* pack = nullptr;          // null: floats are never rounded to it, it holds codes of files alone
    Unpack* unpack = nullptr;
    Scales scales = Scales::none;  // of rows: a float behind all groups; of groups: a half behind the group's codes
    int bits = 8;                  // of a code
    int offset = 0;                // what codes are raised by, to be unsigned
    bool minima = false;           // one beside each scale
    int part = kGroup;             // columns that share a scale; of planes
    bool planes = false;
    bool table = false;            // codes stand for the numbers of kIQ4
    uint32_t codes_of = 0;         // the sources whose codes it holds as they are
    float limit = std::numeric_limits<float>::infinity();  // the least number too large for it; scales have their own
    int longest_row = 1 << 22;     // offsets within a panel are ints

    constexpr bool holds_codes_of(Source source) const { return codes_of >> static_cast<int>(source) & 1; }
    constexpr int padded(int cols) const { return (cols + columns - 1) / columns * columns; }  // K as stored
    constexpr size_t row_bytes(int cols) const {
        return static_cast<size_t>(padded(cols)) / columns * bytes + (scales == Scales::row ? sizeof(float) : 0);
    }
};

// Bytes that a row has of a group's whole numbers; those of 2 bits come with minima of 4 bits, and share bytes with them.
constexpr bool shares_bytes(const FormatTraits& format) { return format.bits == 2; }
constexpr int whole_bytes(const FormatTraits& format) {
    if (format.scales != Scales::part) return 0;
    return kGroup / format.part * (format.minima && !shares_bytes(format) ? 2 : 1);
}

// A record of planes: what follows from the rest of it.
constexpr FormatTraits planes(FormatTraits format, uint32_t codes_of) {
    format.activations = ActivationFormat::q8;
    format.scales = format.columns == kGroup ? Scales::group : Scales::part;
    format.planes = true;
    format.bytes = format.columns / kGroup * (kGroup * format.bits / 8 + whole_bytes(format)) + (format.minima ? 4 : 2);
    format.unpack = unpack_planes;
    format.codes_of = codes_of;
    return format;
}

constexpr uint32_t kInt8Sources = set_of({Source::int8, Source::llm_int8});
constexpr int kLongestInt8Row = 1 << 16;  // 127 * 255 * 65536 is the most that int32 holds

inline constexpr FormatTraits kFormats[] = {
    {.id = Format::f32, .name = "f32", .activations = ActivationFormat::f32, .columns = 1, .bytes = 4, .pack = pack_f32,
     .unpack = unpack_f32},
    {.id = Format::f16, .name = "f16", .activations = ActivationFormat::f32, .columns = 1, .bytes = 2, .pack = pack_f16,
     .unpack = unpack_f16, .limit = 65520},  // half a step over the greatest
    {.id = Format::bf16, .name = "bf16", .activations = ActivationFormat::bf16, .columns = 2, .bytes = 4, .pack = pack_bf16,
     .unpack = unpack_bf16, .limit = 0x1.ffp127f},
    {.id = Format::int8, .name = "int8", .activations = ActivationFormat::int8, .columns = kGroup, .bytes = kGroup,
     .pack = pack_int8, .unpack = unpack_int8, .scales = Scales::row, .offset = 128,
     .codes_of = set_of({Source::turned_int8}), .longest_row = kLongestInt8Row},
    {.id = Format::int8_plain, .name = "int8_plain", .activations = ActivationFormat::int8_plain, .columns = kGroup,
     .bytes = kGroup, .pack = pack_int8, .unpack = unpack_int8, .scales = Scales::row, .offset = 128,
     .codes_of = kInt8Sources, .longest_row = kLongestInt8Row},
    {.id = Format::llm_int8, .name = "llm-int8", .activations = ActivationFormat::llm_int8, .columns = kGroup, .bytes = kGroup,
     .pack = pack_int8, .unpack = unpack_int8, .scales = Scales::row, .offset = 128, .codes_of = kInt8Sources,
     .longest_row = kLongestInt8Row},
    planes({.id = Format::q8, .name = "q8", .columns = kGroup, .pack = pack_q8, .offset = 128}, set_of({Source::q8_0})),
    planes({.id = Format::q4, .name = "q4", .columns = kGroup, .pack = pack_q4, .bits = 4, .minima = true},
           set_of({Source::q4_0, Source::q4_1, Source::q4_k})),
    planes({.id = Format::q4_0, .name = "q4_0", .columns = kGroup, .pack = pack_q4_0, .bits = 4, .offset = 8},
           set_of({Source::q4_0})),
    planes({.id = Format::q6_k, .name = "q6_k", .columns = 256, .bits = 6, .offset = 32, .part = 16}, set_of({Source::q6_k})),
    planes({.id = Format::q5_k, .name = "q5_k", .columns = 256, .bits = 5, .minima = true}, set_of({Source::q5_k})),
    planes({.id = Format::q4_k, .name = "q4_k", .columns = 256, .bits = 4, .minima = true}, set_of({Source::q4_k})),
    planes({.id = Format::q3_k, .name = "q3_k", .columns = 256, .bits = 3, .offset = 4, .part = 16}, set_of({Source::q3_k})),
    planes({.id = Format::q2_k, .name = "q2_k", .columns = 256, .bits = 2, .minima = true, .part = 16}, set_of({Source::q2_k})),
    planes({.id = Format::q5_0, .name = "q5_0", .columns = kGroup, .bits = 5, .offset = 16}, set_of({Source::q5_0})),
    planes({.id = Format::q5_1, .name = "q5_1", .columns = kGroup, .bits = 5, .minima = true}, set_of({Source::q5_1})),
    planes({.id = Format::iq4_nl, .name = "iq4_nl", .columns = kGroup, .bits = 4, .table = true}, set_of({Source::iq4_nl})),
    planes({.id = Format::iq4_xs, .name = "iq4_xs", .columns = 256, .bits = 4, .table = true}, set_of({Source::iq4_xs})),
};
static_assert(is_in_order(kFormats));
static constexpr const FormatTraits& traits(Format format) { return kFormats[static_cast<int>(format)]; }
static constexpr bool is_turned(Format format) { return traits(traits(format).activations).turned; }

}  // namespace pronk
