#include "simd_avx2.h"
// The kernels are written over what comes before.
#include "kernels.inl"

PRONK_KERNELS(kernels_avx2, "avx2")
