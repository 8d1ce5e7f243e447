// A debugging aid: parameters that the ranks of a host share can be written only while the optimizer steps. Any other
// write ends the process with SIGSEGV, after a line on stderr that names the rank and the parameter. The previous
// signal handler runs next, on the stack of the write. One thread at a time; the handler: any thread.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace cohort::gradients {

class WriteProtection {
 public:
  /// A named range of memory, for the message.
  struct Named {
    const void* begin = nullptr;
    std::size_t bytes = 0;
    std::size_t element = 1;
    std::string name;
  };

  /// Protects `memory` from now on. `memory` begins at a page boundary, shares its last page with nothing else, and
  /// outlives this object. Throws Unavailable if the kernel refuses, or if there are too many such objects.
  WriteProtection(void* memory, std::size_t bytes, std::vector<Named> named, int rank);
  ~WriteProtection();  ///< makes the memory writable again
  WriteProtection(const WriteProtection&) = delete;
  WriteProtection& operator=(const WriteProtection&) = delete;

  void allow();
  void forbid();

  struct Entry;

 private:
  std::unique_ptr<Entry> entry_;
};

}  // namespace cohort::gradients
