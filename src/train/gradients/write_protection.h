// A debugging aid: parameters that the ranks of a host share cannot be written to but while the optimizer steps. Who
// writes all the same dies of SIGSEGV, after a line on stderr that names the rank and the parameter; the handler
// before, which is called then, has the stack. One thread at a time; the handler is for any thread.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace cohort::gradients {

class WriteProtection {
 public:
  /// A named range of the memory, for the message.
  struct Named {
    const void* begin = nullptr;
    std::size_t bytes = 0;
    std::size_t element = 1;
    std::string name;
  };

  /// `memory` begins on a page, has the last one to itself, and outlives this. It is protected from now on. Throws
  /// Unavailable where the kernel refuses, or where there are too many of these at once.
  WriteProtection(void* memory, std::size_t bytes, std::vector<Named> named, int rank);
  ~WriteProtection();  ///< it may be written to again
  WriteProtection(const WriteProtection&) = delete;
  WriteProtection& operator=(const WriteProtection&) = delete;

  void allow();
  void forbid();

  struct Entry;

 private:
  std::unique_ptr<Entry> entry_;
};

}  // namespace cohort::gradients
