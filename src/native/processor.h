// What this processor can run, as far as the kernels care.
#pragma once

namespace pronk {

// Each includes what the ones before it in its line need.
struct Processor {
    bool portable = true, neon = true;
    bool avx2 = false, avx2_vnni = false;  // avx2 with fma and f16c
    bool avx512 = false, avx512_vnni = false, avx512_bf16 = false, amx = false;  // avx512 f, bw, vl and dq; amx tile, int8 and bf16
    bool neon_dotprod = false, neon_i8mm = false;  // fp16 with dotprod; bf16 with i8mm
};

const Processor& processor();

// Asks for tiles: they are 8 KB of a thread's state, which Linux saves only for processes that ask (its documentation of x86/xstate).
// It says no where a thread has too small a stack for signals, and lets nobody have one afterwards.
bool may_use_tiles();

}  // namespace pronk
