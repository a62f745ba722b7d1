// PRONK_ISA chooses, and what cannot be chosen is an error that says what can.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "test.h"

using namespace pronk;

namespace {

void choose(const char* name) {
#if defined(_WIN32)
    _putenv_s("PRONK_ISA", name);
#else
    setenv("PRONK_ISA", name, 1);
#endif
}

}  // namespace

int main() {
    choose("mmx");
    std::string message;
    try {
        kernels();
    } catch (const std::runtime_error& error) {
        message = error.what();
    }
    CHECK(message.find("PRONK_ISA=mmx") != std::string::npos);
    CHECK(message.find("portable") != std::string::npos);
    CHECK(kernels_named("mmx") == nullptr);

    choose("portable");  // not the best here, and not too late
    CHECK(std::strcmp(kernels().name, "portable") == 0);
    CHECK(kernels_named("portable") == &kernels());

    choose("");
    CHECK(std::strcmp(kernels().name, "portable") == 0);  // chosen once
    return test_result();
}
