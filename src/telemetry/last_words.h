// Last words that a process leaves on its status page when it dies of an exception or a signal, and stacks written on
// request. The user's program is not affected, since the terminate handler calls the previous one, and signal handlers
// are installed only if the disposition is the default. Without an agent nothing is installed. Any thread may call;
// repeated calls have no effect. Only the first caller's thread gets an alternate stack, for handlers after a stack
// overflow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace cohort::status {

// Names of functions from a program file's own table of symbols. (The dynamic linker knows only exported functions, of
// which a program has almost none.) Pure, and safe on any bytes; any thread.
struct FunctionSymbol {
  std::string_view name;     ///< mangled; points into the file. Empty if not found
  std::uint64_t offset = 0;  ///< offset of the address in the function
};

/// Finds the function that contains `address`, an address in the file's own numbering (64-bit ELF, native byte order).
FunctionSymbol find_function(std::span<const std::byte> file, std::uint64_t address) noexcept;

/// Texts with which the last words of a C++ exception, its stack, and a crash's stack begin.
inline constexpr std::string_view kUncaught = "uncaught exception ", kThrowStack = "the stack at std::terminate:\n",
                                  kNativeStack = "the native stack:\n";

/// Writes to the page, from now on, uncaught exceptions (type, text, a cohort::Error's context, backtrace) and SIGSEGV,
/// SIGBUS, SIGFPE, SIGILL, SIGABRT (address, backtrace). Exit status and core dump do not change.
void keep_last_words();

/// Makes SIGQUIT, if its action is the default, write this process's stacks to the page's file without ending it.
void tell_stacks_when_asked();

/// Makes C's stdout line-buffered, although it is the agent's pipe, after flushing earlier output. Does nothing if
/// stdout is unbuffered. (Also affects std::cout, unless sync_with_stdio(false) has separated them.)
void show_lines_at_once();

/// After a fatal signal, the last words begin with the contents of this file, to which an interpreter writes its own
/// stack. The caller keeps the descriptor open.
void add_to_last_words(int fd) noexcept;

}  // namespace cohort::status
