// Part of a Simd whose dot_short adds up four products in 32 bits: sums of small codes are whole numbers like any other.

    static constexpr bool sums_in_words = true, joins_parts = false;
    PRONK_INLINE int32_t sums(I x) { return sum_int(x); }
    PRONK_INLINE int32_t total(int32_t sums) { return sums; }
    PRONK_INLINE int32_t plus(int32_t x, int32_t y) { return x + y; }
    PRONK_INLINE int32_t times(int32_t sums, int factor) { return factor * sums; }
    PRONK_INLINE I begin(int32_t sums, int factor) { return set_int(factor * sums); }
    PRONK_INLINE I add_short(I x, I y) { return add_int(x, y); }
    PRONK_INLINE I widened(I x) { return x; }
