// Drives the real `cohort` in a folder of its own and finds every process that descends from it, by a variable in its
// environment. One Job per command; the destructor kills whatever a failed test has left.
#pragma once

#include "base/process.h"
#include "base/unique_fd.h"

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace cohort::test {

using namespace std::chrono_literals;

/// How long a loaded machine may take for what is usually a matter of milliseconds.
inline constexpr auto kPatience = 100s;

struct JobOptions {
  std::vector<std::string> arguments;         ///< after `cohort`
  std::vector<std::string> environment = {};  ///< over the test's
  std::string input = {};                     ///< stdin; nothing: /dev/null
  bool terminal = false;                      ///< stdin, stdout and stderr are a terminal
  bool pipe_output = false;                   ///< stdout is a pipe that the test reads
  std::string shell_before = {};              ///< e.g. "ulimit -n 64": run by sh, which then becomes cohort
  std::chrono::seconds patience = kPatience;  ///< until `wait` fails the test
};

class Job {
 public:
  explicit Job(JobOptions options);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  pid_t pid() const { return pid_; }
  const std::string& folder() const { return folder_; }
  /// Exit status as a shell gives it. Fails the test and kills once its patience is over.
  int wait();
  bool running();
  std::string out() const;
  std::string err() const;
  std::string log(const std::string& name) const;  ///< of the latest run
  std::string file(const std::string& name) const;
  void signal(int number) const;

  /// Living processes of the job, this command included.
  std::vector<pid_t> processes() const;
  /// The ones among them whose command line begins with `text`.
  std::vector<pid_t> processes(const std::string& text) const;
  /// The agent, and the guard around it.
  pid_t agent() const;
  pid_t guard() const;

  int terminal() const { return terminal_.get(); }  ///< the other side of the terminal
  void close_output() { output_.reset(); }
  int output() const { return output_.get(); }  ///< the pipe
  /// Everything the terminal has shown so far.
  const std::string& screen();

 private:
  std::chrono::seconds patience_;
  std::string mark_;
  std::string folder_;
  pid_t pid_ = -1;
  std::optional<int> status_;
  sys::UniqueFd terminal_;
  sys::UniqueFd output_;
  std::string screen_;
};

/// Runs to the end.
struct Finished {
  int status = -1;
  std::string out;
  std::string err;
};
Finished run(JobOptions options);

/// True once `condition` is; false when `patience` is over.
bool eventually(const std::function<bool()>& condition, std::chrono::milliseconds patience = kPatience);

std::string read_text(const std::string& path);
std::vector<std::string> lines_of(const std::string& text);

}  // namespace cohort::test
