// The least a test needs: CHECK reports and goes on, test_result() is what main returns.
#pragma once

#include <cstdio>

inline int failures = 0;

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            ++failures;                                                          \
        }                                                                        \
    } while (0)

inline int test_result() {
    if (failures) std::fprintf(stderr, "%d checks failed\n", failures);
    return failures != 0;
}
