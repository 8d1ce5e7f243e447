// The names of C++ functions in a stack, as a person reads them: a dying process leaves them as its symbol table has
// them, since making them readable takes memory. Pure; any thread.
#pragma once

#include <string>
#include <string_view>

namespace cohort::launch {

/// `text` with "_ZN1a1bEv" as "a::b()". Names that are none, or too long to be trusted, stay as they are.
std::string demangled(std::string_view text);

}  // namespace cohort::launch
