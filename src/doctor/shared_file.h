// A file in the working folder, for the moment in which `cohort doctor` has other hosts look for it. It goes with the
// SharedFile; and if this process is killed, a small shell that waits for that removes it. One thread; the shell is a
// child, which whoever owns this process's children reaps.
#pragma once

#include "sys/unique_fd.h"

#include <string>

namespace cohort::doctor {

class SharedFile {
 public:
  SharedFile();
  ~SharedFile() { remove(); }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;
  /// False where nothing could be written.
  explicit operator bool() const noexcept { return made_; }
  const std::string& path() const noexcept { return path_; }
  const std::string& content() const noexcept { return content_; }

 private:
  void remove() noexcept;

  std::string content_, path_;
  sys::UniqueFd lifeline_;  ///< of the shell
  bool made_ = false;
};

}  // namespace cohort::doctor
