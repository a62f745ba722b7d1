// LLM.int8() (arXiv 2208.07339): which activations are computed apart; kernels_matmul.cpp adds their part of a product.
//
// The paper takes a column out of all tokens if one of them has an outlier there, so that a token's result depends on
// its neighbours; here each token is judged alone. Part of kernels.cpp.

// The n-th largest of a few vectors' numbers, if it is over 0; 1 otherwise. Each is asked how many are not under it.
template <int kVectorsAsked>
int32_t nth_largest(const int32_t* x, int n) {
    int32_t nth = 1;
    for (int i = 0; i < 16 * kVectorsAsked; ++i) {
        int count = 0;
        for (int v = 0; v < kVectorsAsked; ++v) count += __builtin_popcount(S::at_least(S::load_int(x + 16 * v), S::set_int(x[i])));
        nth = (count >= n) & (x[i] > nth) ? x[i] : nth;
    }
    return nth;
}

// Bits, 1 or more, that part the n largest magnitudes of x (and what is tied with the last of them) from all others. They
// are ordered as the magnitudes are, of which none is over `largest`.
int32_t parting(const float* x, int size, int n, int32_t largest) {
    if (n >= size) return 1;
    if (size <= 32) {
        int32_t bits[32] = {};
        for (int i = 0; i < size; i += 16) S::store_int(bits + i, S::magnitude(load_part(x + i, size - i)));
        return size <= 16 ? nth_largest<1>(bits, n) : nth_largest<2>(bits, n);
    }
    int32_t low = 1, high = largest + 1;  // of which fewer than n are not under `high`
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        int count = 0;
        for (int i = 0; i < size; i += 16)
            count += __builtin_popcount(S::at_least(S::magnitude(load_part(x + i, size - i)), S::set_int(middle)));
        (count >= n ? low : high) = middle;
    }
    return low;
}

// Those of `mask`, one after the other; gives how many. Up to 16 places are written.
template <class Of>
PRONK_INLINE int append(uint32_t mask, F x, I k, float* to_x, int32_t* to_k) {
    if constexpr (requires { Of::compress; }) {
        return Of::compress(mask, x, k, to_x, to_k);
    } else {
        float xs[16];
        int32_t ks[16];
        Of::store(xs, x), Of::store_int(ks, k);
        int n = 0;
        for (; mask; mask &= mask - 1, ++n) to_x[n] = xs[__builtin_ctz(mask)], to_k[n] = ks[__builtin_ctz(mask)];
        return n;
    }
}

constexpr int32_t kCounting[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// As `quantize`, with zeros for outliers, which are added to the list.
float quantize_rest(const float* x, int size, const Rows& rows, int t, int8_t* out, int32_t* sum) {
    float* found_x = rows.found_x;
    int32_t *found_k = rows.found_k, &count = rows.outlier_count[t];
    count = rows.outlier_begin[t] = 0;
    I lanes = S::set_int(0);
    for (int i = 0; i < size; i += 16) lanes = S::max_int(lanes, S::magnitude(load_part(x + i, size - i)));
    const int32_t largest = S::maximum_int(lanes);
    if (largest >= 0x7f800000) return not_a_row(out, rows.padded, sum);

    // The n-th largest of 16 numbers is not over the n-th largest of all, and leaves few to choose among.
    const int32_t over = word(&rows.rule.threshold) + 1;
    const bool few = rows.rule.count > 0 && rows.rule.count < 16;
    int32_t least = over;
    if (few) {
        int32_t parts[16];
        S::store_int(parts, lanes);
        least = nth_largest<1>(parts, rows.rule.count);
    } else if (rows.rule.count > 0) {
        least = parting(x, size, rows.rule.count, largest);
    }
    const bool sure = !few || over <= least;
    least = over < least ? over : least;
    const auto list = [&](const float* from, int end, const auto& place) {  // gives the largest that is not listed
        I rest = S::set_int(0);
        int n = 0;
        for (int i = 0; i < end; i += 16) {
            const F v = load_part(from + i, end - i);
            rest = S::max_int(rest, S::magnitude(S::under(v, S::set_int(least))));
            if (const uint32_t found = S::at_least(S::magnitude(v), S::set_int(least)))
                n += append<S>(found, v, place(i), found_x + n, found_k + n);
        }
        count = n;
        return S::maximum_int(rest);
    };
    int32_t rest = list(x, size, [](int i) { return S::add_int(S::set_int(i), S::load_int(kCounting)); });
    if (!sure) {
        const int32_t nth = parting(found_x, count, rows.rule.count, largest);
        least = nth < least ? least : nth < over ? nth : over;
        const int32_t dropped = list(found_x, count, [&](int i) { return S::load_int(found_k + i); });
        rest = rest > dropped ? rest : dropped;
    }
    const int32_t begin = rows.outliers_used->fetch_add(count, std::memory_order_relaxed);
    rows.outlier_begin[t] = begin;
    float outlier_sum = 0;
    for (int i = 0; i < count; ++i) {
        rows.outlier_x[begin + i] = found_x[i] * kInPlace[found_k[i] & 3];
        rows.outlier_k[begin + i] = found_k[i];
        outlier_sum += found_x[i];
    }
    rows.outlier_sum[t] = outlier_sum;
    const I cut = S::set_int(least);
    return codes(x, size, rows.padded, rest, out, sum, [=](F v) { return S::under(v, cut); });
}
