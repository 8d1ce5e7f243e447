// The page of a run for browsers, served by a process of its own (`cohort watch --page`) that ends with this one: what
// strangers do to it, the job does not notice. Belongs to the supervisor and its thread.
#pragma once

#include "base/result.h"
#include "launch/loop.h"
#include "launch/show/lines.h"
#include "sys/process.h"
#include "sys/unique_fd.h"

#include <functional>
#include <memory>
#include <string>

namespace cohort::launch {

class PageProcess {
 public:
  /// `say` gets what it prints: its address. Fails with Unavailable.
  static Result<std::unique_ptr<PageProcess>> start(Loop& loop, const std::string& run_folder,
                                                    std::function<void(const std::string&)> say);
  /// Ends it.
  ~PageProcess();
  PageProcess(const PageProcess&) = delete;
  PageProcess& operator=(const PageProcess&) = delete;

 private:
  PageProcess() = default;
  void on_readable();

  sys::ChildProcess child_;
  sys::UniqueFd output_;
  Watch watch_;
  LineSplitter lines_;
  std::function<void(const std::string&)> say_;
};

}  // namespace cohort::launch
