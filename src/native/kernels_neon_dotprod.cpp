#include "simd_neon.h"
// The kernels are written over what comes before.
#include "kernels.inl"

PRONK_KERNELS(kernels_neon_dotprod, "neon-dotprod")
