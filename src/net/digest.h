// SHA-256, for names that have to be the same on all ranks. A pure function.
#pragma once

#include <string>
#include <string_view>

namespace cohort::net {

/// 64 lower-case hexadecimal digits.
std::string sha256_hex(std::string_view bytes);

}  // namespace cohort::net
