// The one exception that Cohort throws at its public boundary, with the context a person needs: what failed, where
// (rank, host, peer, operation), why, and what to try. Errors are values: copy them freely between threads. `ErrorCode`
// says what a program can do about it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace cohort {

enum class ErrorCode : std::uint8_t {
  InvalidArgument,  // the request has no meaning; nothing was done
  Unavailable,      // a resource or a service is not there (memory, a port, a file, a backend)
  Timeout,          // a deadline passed; the communicator is unusable afterwards
  PeerLost,         // a peer died or left; the communicator is unusable afterwards
  Mismatch,         // ranks asked for different things; refused on all, the communicator stays usable
  Aborted,          // another rank failed first or `abort` was called; unusable afterwards
  Io,               // the operating system refused to read or write
  Corrupt,          // bytes from outside are damaged or not of the expected format
  NonFinite,        // a value is NaN or infinite and must not be; refused on all, the communicator stays usable
  Internal,         // a bug in Cohort
};

/// The name as it stands in messages and logs, e.g. "PeerLost".
std::string_view to_string(ErrorCode code) noexcept;

/// Origin of an error. Fields that do not apply are -1, 0 or empty.
struct ErrorContext {
  int rank = -1;               ///< the rank that reports
  std::string host;            ///< host of that rank
  int peer = -1;               ///< the other rank of the failed operation
  std::string operation;       ///< e.g. "all_reduce(float32[1024], sum)"
  std::uint64_t sequence = 0;  ///< number of the operation on its communicator, from 1
  std::string cause;           ///< errno's text, or the first failing rank's message
  int system_error = 0;        ///< errno, where the operating system refused
  bool tagged = false;         ///< for Mismatch: the operations of all ranks had a tag, or were grouped
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message, ErrorContext context = {});

  ErrorCode code() const noexcept { return code_; }
  const ErrorContext& context() const noexcept { return context_; }

 private:
  ErrorCode code_;
  ErrorContext context_;
};

}  // namespace cohort
