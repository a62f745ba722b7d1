// Which table of kernels runs here: the best one this processor has, or the one PRONK_ISA names.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "processor.h"
#include "targets.h"  // CMakeLists.txt writes it: PRONK_TARGETS(X) is X(name) for each instruction set, best first

namespace pronk {

#define PRONK_DECLARE(target) \
    namespace target {        \
    const Kernels* kernels(); \
    }
PRONK_TARGETS(PRONK_DECLARE)

namespace {

struct Isa {
    bool Processor::*needs;
    const Kernels* (*table)();
};

#define PRONK_ROW(target) {&Processor::target, target::kernels},
constexpr Isa kIsas[] = {PRONK_TARGETS(PRONK_ROW)};

const Kernels& choose() {
    const char* wanted = std::getenv("PRONK_ISA");
    if (!wanted || !*wanted) return *all_kernels().front();
    if (const Kernels* found = kernels_named(wanted)) return *found;
    std::string names;
    for (const Kernels* kernel : all_kernels()) names += (names.empty() ? "" : ", ") + std::string(kernel->name);
    throw std::runtime_error("PRONK_ISA=" + std::string(wanted) + ": this processor can run " + names);
}

}  // namespace

std::vector<const Kernels*> all_kernels() {
    std::vector<const Kernels*> tables;
    for (const Isa& isa : kIsas)
        if (processor().*isa.needs) tables.push_back(isa.table());
    return tables;
}

const Kernels& kernels() {
    static const Kernels& chosen = choose();  // a throw leaves it unset: the next call tries again
    return chosen;
}

const Kernels* kernels_named(std::string_view name) {
    for (const Kernels* kernel : all_kernels())
        if (name == kernel->name) return kernel;
    return nullptr;
}

}  // namespace pronk
