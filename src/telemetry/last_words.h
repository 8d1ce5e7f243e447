// Last words that a process leaves on its status page when it dies of an exception or a signal, and stacks written on
// request. The user's program is not changed: a terminate handler that hands over to the previous one, and signal
// handlers only where the disposition is the default one. Without an agent nothing is installed. Any thread may call;
// each part is done once per process. The alternate stack, for handlers after a stack overflow, is the first caller's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace cohort::status {

// Names of functions from a program file's own table of symbols. The dynamic linker knows exported ones only, which of
// a program are almost none. Pure, over any bytes of a file; any thread.
struct FunctionSymbol {
  std::string_view name;     ///< as the compiler writes it; points into the file. Empty: there is none
  std::uint64_t offset = 0;  ///< of the address in the function
};

/// The function that `address` lies in, as the file (64-bit ELF of this machine's byte order) counts addresses.
FunctionSymbol find_function(std::span<const std::byte> file, std::uint64_t address) noexcept;

/// Beginnings: of the last words for a C++ exception, of its stack, and of a crash's stack.
inline constexpr std::string_view kUncaught = "uncaught exception ", kThrowStack = "the stack at std::terminate:\n",
                                  kNativeStack = "the native stack:\n";

/// Uncaught exceptions (type, text, a cohort::Error's context, backtrace) and SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT
/// (address, backtrace), on the page. Exit status and core dump stay as they are.
void keep_last_words();

/// SIGQUIT writes this process's stacks to the page's file, and the process lives on. Not where something handles it.
void tell_stacks_when_asked();

/// Makes C's stdout show each line at once, although it is the agent's pipe, after flushing earlier output. Not if the
/// program wants no buffer at all. (std::cout goes with it, unless sync_with_stdio(false) has parted them.)
void show_lines_at_once();

/// After a fatal signal, the last words begin with the contents of this file: an interpreter writes its own stack
/// there. The descriptor stays the caller's, and open.
void add_to_last_words(int fd) noexcept;

}  // namespace cohort::status
