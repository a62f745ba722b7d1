// Which table of kernels runs here: the best one this processor has, or the one PRONK_ISA names.
#include <cstdlib>
#include <cstring>
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

    bool runs() const { return processor().*needs && (needs != &Processor::amx || may_use_tiles()); }
};

#define PRONK_ROW(target) {&Processor::target, target::kernels},
constexpr Isa kIsas[] = {PRONK_TARGETS(PRONK_ROW)};

const Kernels& choose() {
    const char* wanted = std::getenv("PRONK_ISA");
    if (!wanted || !*wanted) return *kernels_at(0);
    if (const Kernels* found = kernels_named(wanted)) return *found;
    std::string names;
    for (int i = 0; const Kernels* kernel = kernels_at(i); ++i)
        names += (names.empty() ? "" : ", ") + std::string(kernel->name);
    throw std::runtime_error("PRONK_ISA=" + std::string(wanted) + ": this processor can run " + names + (processor().amx && !may_use_tiles() ? ", and the system lets it have no amx" : ""));
}

}  // namespace

const Kernels* kernels_at(int index) {
    for (const Isa& isa : kIsas)
        if (isa.runs() && index-- == 0) return isa.table();
    return nullptr;
}

const Kernels& kernels() {
    static const Kernels& chosen = choose();  // a throw leaves it unset: the next call tries again
    return chosen;
}

const Kernels* kernels_named(const char* name) {
    for (const Isa& isa : kIsas)  // of others nothing is asked
        if (std::strcmp(name, isa.table()->name) == 0) return isa.runs() ? isa.table() : nullptr;
    return nullptr;
}

}  // namespace pronk
