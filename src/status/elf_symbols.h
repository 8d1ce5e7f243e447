// Names of functions from a program file's own table of symbols. The dynamic linker knows exported ones only, which of
// a program are almost none. Pure, over the bytes of the file, whatever they are; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace cohort::status {

struct FunctionSymbol {
  std::string_view name;     ///< as the compiler writes it; points into the file. Empty: there is none
  std::uint64_t offset = 0;  ///< of the address in the function
};

/// The function that `address` lies in, as the file (64-bit ELF of this machine's byte order) counts addresses.
FunctionSymbol find_function(std::span<const std::byte> file, std::uint64_t address) noexcept;

}  // namespace cohort::status
