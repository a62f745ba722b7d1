#include "processor.h"

#include <cstddef>
#include <cstdint>

#if defined(PRONK_X86)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(PRONK_ARM) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(PRONK_ARM) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace pronk {

namespace {

#if defined(PRONK_X86)
struct Registers {
    uint32_t a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
    Registers r;
    __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);  // leaves zeros where the leaf does not exist
    return r;
}

// Which registers the system saves when it switches threads: without that, an instruction set does not exist.
uint32_t saved_registers() {
    uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

bool all(uint32_t value, uint32_t bits) { return (value & bits) == bits; }
constexpr uint32_t bit(int number) { return uint32_t{1} << number; }

// Bits: Intel's manual, volume 2, CPUID, tables 3-8 and 3-10.
Processor detect() {
    Processor p;
    const Registers basic = cpuid(1, 0), extended = cpuid(7, 0), more = cpuid(7, 1);
    constexpr uint32_t fma_osxsave_avx_f16c = bit(12) | bit(27) | bit(28) | bit(29);
    if (!all(basic.c, fma_osxsave_avx_f16c)) return p;
    const uint32_t saved = saved_registers();
    constexpr uint32_t ymm = 0x06, zmm = 0xe6, f_dq_bw_vl = bit(16) | bit(17) | bit(30) | bit(31);
    p.avx2 = all(saved, ymm) && all(extended.b, bit(5));
    p.avx2_vnni = p.avx2 && all(more.a, bit(4));
    p.avx512 = p.avx2 && all(saved, zmm) && all(extended.b, f_dq_bw_vl);
    p.avx512_vnni = p.avx512 && all(extended.c, bit(11));
    p.avx512_bf16 = p.avx512_vnni && all(more.a, bit(5));
    constexpr uint32_t tiles = 0x60000, bf16_tile_int8 = bit(22) | bit(24) | bit(25);
    p.amx = p.avx512_bf16 && all(saved, tiles) && all(extended.d, bf16_tile_int8);
    return p;
}
#elif defined(PRONK_ARM) && defined(__linux__)
// The kernel's numbers: <asm/hwcap.h> is older than some of them on systems that wheels are built on.
Processor detect() {
    constexpr unsigned long fphp = 1ul << 9, asimdhp = 1ul << 10, asimddp = 1ul << 20;  // AT_HWCAP
    constexpr unsigned long i8mm = 1ul << 13, bf16 = 1ul << 14;                         // AT_HWCAP2
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    Processor p;
    p.neon_dotprod = (~first & (fphp | asimdhp | asimddp)) == 0;
    p.neon_i8mm = p.neon_dotprod && (~second & (i8mm | bf16)) == 0;
    return p;
}
#elif defined(PRONK_ARM) && defined(__APPLE__)
bool has(const char* feature) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}

Processor detect() {
    Processor p;
    p.neon_dotprod = has("hw.optional.arm.FEAT_DotProd") && has("hw.optional.arm.FEAT_FP16");
    p.neon_i8mm = p.neon_dotprod && has("hw.optional.arm.FEAT_I8MM") && has("hw.optional.arm.FEAT_BF16");
    return p;
}
#else
Processor detect() { return {}; }
#endif

}  // namespace

bool may_use_tiles() {
#if defined(PRONK_X86) && defined(__linux__)
    constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return false;
#endif
}

const Processor& processor() {
    static const Processor detected = detect();
    return detected;
}

}  // namespace pronk
