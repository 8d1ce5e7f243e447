// A real process under test: started with arguments and environment, its output read, killed, waited for, never left
// behind. One thread at a time.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cohort::test {

struct ChildOptions {
  std::vector<std::string> command;
  /// On top of this process's environment, from which what launchers set has been removed.
  std::map<std::string, std::string> environment;
  std::optional<uid_t> uid;  ///< run as this user (needs root)
};

class Child {
 public:
  explicit Child(const ChildOptions& options);
  ~Child();  // kills it if it still runs
  Child(Child&& other) noexcept;
  Child& operator=(Child&&) = delete;

  pid_t pid() const noexcept { return pid_; }
  void kill(int signal) const;
  /// Reads until `text` has come on stdout or stderr; false if it ended or `limit` passed first.
  bool wait_for_output(const std::string& text, std::chrono::seconds limit = std::chrono::seconds(60));
  /// Its end, as a shell tells it: the exit code, or 128 + signal; -1 if it did not end by then (it is killed).
  int wait(std::chrono::seconds limit = std::chrono::seconds(60));
  /// Standard output and standard error so far.
  const std::string& output() const noexcept { return output_; }

 private:
  bool read_some(std::chrono::steady_clock::time_point deadline);
  pid_t pid_ = -1;
  int pipe_ = -1;
  std::optional<int> status_;
  std::string output_;
};

}  // namespace cohort::test
