// For tests: ranks as processes, forked from a test that has no threads. Each child forms a communicator through a
// store in a temporary folder and runs a body; the parent collects how they ended and leaves nothing behind.
#pragma once

#include "comm/api/communicator_impl.h"
#include "comm/hosts/world.h"
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>
#include <cohort/error.h>
#include "net/store.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace cohort::testing {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

/// The least a Store needs: one file per key, made complete by a rename or a link.
class FolderStore final : public store::Store {
 public:
  explicit FolderStore(std::filesystem::path folder) : folder_(std::move(folder)) {}

  void set(std::string_view key, std::string_view value) override { std::filesystem::rename(write(value), path(key)); }
  Gathered get_all(std::span<const std::string> keys, std::span<const std::string> unless, Deadline deadline) override {
    while (true) {
      Gathered found;
      for (const std::string& key : keys) found.values.push_back(read(key));
      if (!keys.empty() && found.missing().empty()) return found;
      for (std::size_t i = 0; i < unless.size(); ++i) {
        if (auto value = read(unless[i])) return {{}, Found{i, *std::move(value)}};
      }
      if (Clock::now() > deadline) return found;
      std::this_thread::sleep_for(2ms);
    }
  }
  std::int64_t add(std::string_view, std::int64_t) override { throw Error(ErrorCode::Internal, "not needed here"); }
  std::optional<std::string> compare_and_set(std::string_view key, std::optional<std::string_view> expected,
                                             std::string_view desired) override {
    if (expected) throw Error(ErrorCode::Internal, "not needed here");
    const std::filesystem::path made = write(desired);
    static_cast<void>(::link(made.c_str(), path(key).c_str()));
    std::filesystem::remove(made);
    return read(key);
  }
  bool delete_key(std::string_view key) override { return std::filesystem::remove(path(key)); }
  std::string name() const override { return "folder"; }

 private:
  std::optional<std::string> read(std::string_view key) const {
    std::ifstream file(path(key), std::ios::binary);
    if (!file) return std::nullopt;
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }
  std::filesystem::path path(std::string_view key) const {
    std::string name(key);
    for (char& letter : name) letter = letter == '/' ? '_' : letter;
    return folder_ / name;
  }
  std::filesystem::path write(std::string_view value) {
    const std::filesystem::path made = folder_ / (".new." + std::to_string(::getpid()) + "." + std::to_string(++made_));
    std::ofstream(made, std::ios::binary) << value;
    return made;
  }
  std::filesystem::path folder_;
  int made_ = 0;
};

/// Ending of a child.
struct Ending {
  int status = -1;   ///< as waitpid gives it
  std::string said;  ///< result or exception of its body
  bool exited_well() const { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }
  bool killed_by(int signal) const { return WIFSIGNALED(status) && WTERMSIG(status) == signal; }
};

/// The work of a rank; its return value becomes `said`. An exception ends the rank with status 1.
using Body = std::function<std::string(Communicator)>;

class Processes {
 public:
  explicit Processes(int size, const comm::testing::Worlds& worlds = comm::testing::Worlds::chosen())
      : size_(size), worlds_(worlds) {
    std::string name = (std::filesystem::temp_directory_path() / "cohort-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw Error(ErrorCode::Io, "mkdtemp");
    folder_ = name;
  }
  ~Processes() {
    for (const Child& child : children_) {
      if (child.pid > 0 && !child.collected) {
        ::kill(child.pid, SIGKILL);
        ::waitpid(child.pid, nullptr, 0);
      }
    }
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  comm::FormOptions form_options(int rank) const {
    comm::FormOptions options;
    options.store = std::make_shared<FolderStore>(folder_);
    options.placement.rank = options.placement.local_rank = rank;
    options.placement.size = options.placement.local_size = size_;
    options.placement.host = "testhost";
    options.hosts = worlds_.hosts(size_);
    options.one_machine = true;
    if (!options.hosts.empty()) {
      const comm::hosts::Layout layout(options.hosts, rank);
      options.placement.local_rank = layout.local;
      options.placement.local_size = layout.locals;
      options.placement.cross_rank = layout.host;
      options.placement.cross_size = layout.hosts;
    }
    options.init_timeout = 60s;
    options.timeout = 60s;
    return options;
  }
  static Communicator form(const comm::FormOptions& options) {
    const comm::Backend& named = comm::testing::Worlds::chosen().backend(options.placement.size);
    const bool between_hosts = !options.hosts.empty() && !named.several_hosts;  // a test's own
    return Communicator((between_hosts ? comm::usual_backend(true) : named).create(options));
  }

  void start(const Body& body) {
    for (int rank = 0; rank < size_; ++rank) {
      start_rank(rank, [&] { return body(form(form_options(rank))); });
    }
  }
  /// A rank that does not even form its communicator by itself.
  void start_rank(int rank, const std::function<std::string()>& body) {
    const pid_t pid = ::fork();
    if (pid < 0) throw Error(ErrorCode::Io, "fork");
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      int status = 0;
      std::string said;
      try {
        said = body();
      } catch (const Error& error) {
        status = 1;
        said = std::string(to_string(error.code())) + ": " + error.what();
      } catch (const std::exception& error) {
        status = 2;
        said = error.what();
      }
      std::ofstream(folder_ / said_file(rank)) << said;
      ::_exit(status);
    }
    if (children_.size() <= static_cast<std::size_t>(rank)) children_.resize(static_cast<std::size_t>(rank) + 1);
    children_[static_cast<std::size_t>(rank)].pid = pid;
  }
  pid_t pid(int rank) const { return children_[static_cast<std::size_t>(rank)].pid; }
  void kill(int rank, int signal) const { ::kill(pid(rank), signal); }

  /// A message from a rank's body to the test: `raise_flag` there, `await_flag` here.
  void raise_flag(std::string_view name) const { std::ofstream(folder_ / ("flag." + std::string(name))) << "up"; }
  bool await_flag(std::string_view name) const {
    const auto limit = Clock::now() + 100s;
    while (!std::filesystem::exists(folder_ / ("flag." + std::string(name)))) {
      if (Clock::now() > limit) return false;
      std::this_thread::sleep_for(1ms);
    }
    return true;
  }

  /// Waits for the rank to end; kills it after `limit`.
  Ending collect(int rank, std::chrono::milliseconds limit = 200s) {
    Child& child = children_[static_cast<std::size_t>(rank)];
    Ending ending;
    const auto until = Clock::now() + limit;
    while (::waitpid(child.pid, &ending.status, WNOHANG) == 0) {
      if (Clock::now() > until) ::kill(child.pid, SIGKILL);
      std::this_thread::sleep_for(1ms);
    }
    child.collected = true;
    std::ifstream file(folder_ / said_file(rank));
    std::stringstream text;
    text << file.rdbuf();
    ending.said = text.str();
    return ending;
  }

 private:
  struct Child {
    pid_t pid = 0;
    bool collected = false;
  };
  static std::string said_file(int rank) { return "said." + std::to_string(rank); }

  const int size_;
  const comm::testing::Worlds worlds_;
  std::filesystem::path folder_;
  std::vector<Child> children_;
};

}  // namespace cohort::testing
