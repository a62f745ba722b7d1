// Which table of kernels runs here: the best one this processor has, or the one PRONK_ISA names.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "processor.h"

namespace pronk {

namespace {

struct Isa {
    const char* name;
    bool Processor::*needs;
    const Kernels* (*table)();
};

// Best first. CMakeLists.txt defines PRONK_HAS_* for what the compiler could build.
constexpr Isa kIsas[] = {
#if defined(PRONK_HAS_AVX512_BF16)
    {"avx512-bf16", &Processor::avx512_bf16, kernels_avx512_bf16},
#endif
#if defined(PRONK_HAS_AVX512_VNNI)
    {"avx512-vnni", &Processor::avx512_vnni, kernels_avx512_vnni},
#endif
#if defined(PRONK_HAS_AVX512)
    {"avx512", &Processor::avx512, kernels_avx512},
#endif
#if defined(PRONK_HAS_AVX2_VNNI)
    {"avx2-vnni", &Processor::avx2_vnni, kernels_avx2_vnni},
#endif
#if defined(PRONK_HAS_AVX2)
    {"avx2", &Processor::avx2, kernels_avx2},
#endif
#if defined(PRONK_HAS_NEON_I8MM)
    {"neon-i8mm", &Processor::neon_i8mm, kernels_neon_i8mm},
#endif
#if defined(PRONK_HAS_NEON_DOTPROD)
    {"neon-dotprod", &Processor::neon_dotprod, kernels_neon_dotprod},
#endif
#if defined(PRONK_HAS_NEON)
    {"neon", &Processor::any, kernels_neon},
#endif
#if defined(PRONK_HAS_PORTABLE)
    {"portable", &Processor::any, kernels_portable},
#endif
    {nullptr, nullptr, nullptr},
};

bool runs_here(const Isa& isa) { return processor().*isa.needs; }

const Isa* find(const char* name) {
    for (const Isa* isa = kIsas; isa->name; ++isa)
        if (runs_here(*isa) && (!name || std::strcmp(isa->name, name) == 0)) return isa;
    return nullptr;
}

const Kernels& choose() {
    const char* wanted = std::getenv("PRONK_ISA");
    if (wanted && !*wanted) wanted = nullptr;
    if (const Isa* isa = find(wanted)) return *isa->table();
    std::string names;
    for (const Isa* isa = kIsas; isa->name; ++isa)
        if (runs_here(*isa)) names += (names.empty() ? "" : ", ") + std::string(isa->name);
    throw std::runtime_error("PRONK_ISA=" + std::string(wanted ? wanted : "") + ": this processor can run " + names);
}

}  // namespace

const Kernels& kernels() {
    static const Kernels& chosen = choose();  // a throw leaves it unset: the next call tries again
    return chosen;
}

const Kernels* kernels_named(const char* name) {
    const Isa* isa = find(name);
    return isa ? isa->table() : nullptr;
}

}  // namespace pronk
