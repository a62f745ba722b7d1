#include "simd_avx512.h"
// The kernels are written over what comes before.
#include "kernels.inl"

PRONK_KERNELS(kernels_avx512_bf16, "avx512-bf16")
