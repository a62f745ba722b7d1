// Random input for tests, the same in every run.
#pragma once

#include <random>

inline std::mt19937 random_bits(7);

inline float normal() {
    static std::normal_distribution<float> distribution;
    return distribution(random_bits);
}

inline int between(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_bits); }
