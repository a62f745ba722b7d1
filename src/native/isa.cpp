// Which table of kernels runs here: the best one this processor has, or the one PRONK_ISA names.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

#if defined(PRONK_ARM) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(PRONK_ARM) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace pronk {

namespace {

#if defined(PRONK_X86)
// GCC's and Clang's own detection: CPUID, and XGETBV for whether the system saves the registers.
[[maybe_unused]] bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
[[maybe_unused]] bool has_avx2_vnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }
[[maybe_unused]] bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
[[maybe_unused]] bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
[[maybe_unused]] bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }
#elif defined(PRONK_ARM) && defined(__linux__)
// Two of these are newer than some systems' headers; the numbers are the kernel's.
constexpr unsigned long kI8mm = 1ul << 13, kBf16 = 1ul << 14;  // HWCAP2_I8MM, HWCAP2_BF16
[[maybe_unused]] bool has_neon_dotprod() {
    constexpr unsigned long wanted = HWCAP_ASIMDDP | HWCAP_ASIMDHP | HWCAP_FPHP;
    return (getauxval(AT_HWCAP) & wanted) == wanted;
}
[[maybe_unused]] bool has_neon_i8mm() {
    return has_neon_dotprod() && (getauxval(AT_HWCAP2) & (kI8mm | kBf16)) == (kI8mm | kBf16);
}
#elif defined(PRONK_ARM) && defined(__APPLE__)
bool has_feature(const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
[[maybe_unused]] bool has_neon_dotprod() {
    return has_feature("hw.optional.arm.FEAT_DotProd") && has_feature("hw.optional.arm.FEAT_FP16");
}
[[maybe_unused]] bool has_neon_i8mm() {
    return has_neon_dotprod() && has_feature("hw.optional.arm.FEAT_I8MM") && has_feature("hw.optional.arm.FEAT_BF16");
}
#elif defined(PRONK_ARM)
[[maybe_unused]] bool has_neon_dotprod() { return false; }
[[maybe_unused]] bool has_neon_i8mm() { return false; }
#endif

[[maybe_unused]] bool always() { return true; }

struct Isa {
    const char* name;
    bool (*runs_here)();
    const Kernels* (*table)();
};

// Best first. CMakeLists.txt defines PRONK_HAS_* for what the compiler could build.
constexpr Isa kIsas[] = {
#if defined(PRONK_HAS_AVX512_BF16)
    {"avx512-bf16", has_avx512_bf16, kernels_avx512_bf16},
#endif
#if defined(PRONK_HAS_AVX512_VNNI)
    {"avx512-vnni", has_avx512_vnni, kernels_avx512_vnni},
#endif
#if defined(PRONK_HAS_AVX512)
    {"avx512", has_avx512, kernels_avx512},
#endif
#if defined(PRONK_HAS_AVX2_VNNI)
    {"avx2-vnni", has_avx2_vnni, kernels_avx2_vnni},
#endif
#if defined(PRONK_HAS_AVX2)
    {"avx2", has_avx2, kernels_avx2},
#endif
#if defined(PRONK_HAS_NEON_I8MM)
    {"neon-i8mm", has_neon_i8mm, kernels_neon_i8mm},
#endif
#if defined(PRONK_HAS_NEON_DOTPROD)
    {"neon-dotprod", has_neon_dotprod, kernels_neon_dotprod},
#endif
#if defined(PRONK_HAS_NEON)
    {"neon", always, kernels_neon},
#endif
#if defined(PRONK_HAS_PORTABLE)
    {"portable", always, kernels_portable},
#endif
    {nullptr, nullptr, nullptr},
};

const Isa* find(const char* name) {
    for (const Isa* isa = kIsas; isa->name; ++isa)
        if (isa->runs_here() && (!name || std::strcmp(isa->name, name) == 0)) return isa;
    return nullptr;
}

const Kernels& choose() {
    const char* wanted = std::getenv("PRONK_ISA");
    if (wanted && !*wanted) wanted = nullptr;
    if (const Isa* isa = find(wanted)) return *isa->table();
    std::string names;
    for (const Isa* isa = kIsas; isa->name; ++isa)
        if (isa->runs_here()) names += (names.empty() ? "" : ", ") + std::string(isa->name);
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
