#include "bench/ranks.h"

#include "base/env.h"
#include "base/result.h"
#include "bench/measure.h"
#include "cluster/detect.h"
#include "launch/supervise/job_setup.h"
#include "sys/process.h"
#include "sys/unique_fd.h"

#include <cohort/join.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace cohort::app::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kGrace(5);
constexpr std::chrono::seconds kJoinTimeout(60);
constexpr std::size_t kLongestMessage = 3000;

void write_line(int fd, const nlohmann::json& event) {
  const std::string text = event.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  for (std::string_view rest = text; !rest.empty();) {
    const ssize_t put = ::write(fd, rest.data(), rest.size());
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) raise(ErrorCode::Io, "bench: a rank cannot report: {}", errno_text(errno));
    rest.remove_prefix(static_cast<std::size_t>(put));
  }
}

/// A forked rank: returns its exit status.
int be_rank(int rank, int ranks, const Plan& plan, int report) {
  try {
    // With this name and without a secret they meet in a place that only this user reaches, and that leaves no file.
    for (const auto name : {env::kSecretFile, env::kInit, env::kAlone}) ::unsetenv(std::string(name).c_str());
    Communicator comm = join({.init_method = "tcp://127.0.0.1:1",
                              .rank = rank,
                              .world_size = ranks,
                              .join_timeout = kJoinTimeout,
                              .timeout = plan.timeout});
    run_plan(comm, plan, [report](const nlohmann::json& event) { write_line(report, event); });
    return 0;
  } catch (const Error& error) {
    write_line(report, {{"event", "error"},
                        {"rank", rank},
                        {"code", static_cast<int>(error.code())},
                        {"message", std::string(error.what()).substr(0, kLongestMessage)}});
  } catch (const std::exception& error) {
    write_line(report, {{"event", "error"},
                        {"rank", rank},
                        {"code", static_cast<int>(ErrorCode::Internal)},
                        {"message", std::string(error.what()).substr(0, kLongestMessage)}});
  }
  return 1;
}

/// The processes of one world, as their parent sees them. Its destructor ends those that are left.
class Crew {
 public:
  Crew(int ranks, const Plan& plan) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) raise(ErrorCode::Unavailable, "bench: no pipe: {}", errno_text(errno));
    reports_ = sys::UniqueFd(ends[0]);
    const sys::UniqueFd write_end(ends[1]);
    const pid_t parent = ::getpid();
    for (int rank = 0; rank < ranks; ++rank) {
      const pid_t pid = ::fork();
      if (pid < 0) {
        const int why = errno;
        end();
        raise(ErrorCode::Unavailable, "bench: rank {} of {} cannot be started: {}", rank, ranks, errno_text(why));
      }
      if (pid == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (::getppid() != parent) ::_exit(1);
        reports_.reset();
        int status = 1;
        try {
          status = be_rank(rank, ranks, plan, write_end.get());
        } catch (...) {  // the parent has gone
        }
        ::_exit(status);
      }
      children_.push_back(pid);
    }
  }
  ~Crew() { end(); }
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  void watch(const Emit& emit) {
    std::optional<Clock::time_point> give_up;
    bool reading = true;
    while (reading || alive() > 0) {
      reading = reading && read_reports(emit);
      if (!reading) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      reap();
      if (killed_.empty() && errors_.empty() && !failed_) continue;
      if (!give_up) give_up = Clock::now() + kGrace;
      if (Clock::now() > *give_up) break;
    }
    end();
    throw_failure();
  }

 private:
  int alive() const {
    int count = 0;
    for (const pid_t child : children_) count += child > 0 ? 1 : 0;
    return count;
  }

  /// False at the end: no rank can write any more.
  bool read_reports(const Emit& emit) {
    pollfd waited = {reports_.get(), POLLIN, 0};
    if (::poll(&waited, 1, 50) <= 0) return true;
    char bytes[1 << 16];
    const ssize_t got = ::read(reports_.get(), bytes, sizeof bytes);
    if (got < 0) return errno == EINTR;
    if (got == 0) return false;
    pending_.append(bytes, static_cast<std::size_t>(got));
    for (auto end = pending_.find('\n'); end != std::string::npos; end = pending_.find('\n')) {
      const auto event = nlohmann::json::parse(pending_.substr(0, end));
      pending_.erase(0, end + 1);
      if (event.at("event") == "error") {
        errors_.push_back(event);
      } else {
        emit(event);
      }
    }
    return true;
  }

  void reap() {
    for (std::size_t rank = 0; rank < children_.size(); ++rank) {
      int status = 0;
      if (children_[rank] <= 0 || ::waitpid(children_[rank], &status, WNOHANG) != children_[rank]) continue;
      children_[rank] = 0;
      const auto ended = sys::exit_status_from_wait(status);
      if (ended.success()) continue;
      failed_ = true;
      if (ended.signal != 0 && killed_.empty()) {
        killed_ = fmt::format("bench: rank {} of {} was {}", rank, children_.size(), sys::to_string(ended));
      }
    }
  }

  void end() {
    for (pid_t& child : children_) {
      if (child <= 0) continue;
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
      child = 0;
    }
  }

  void throw_failure() const {
    if (!killed_.empty()) throw Error(ErrorCode::PeerLost, killed_);
    const nlohmann::json* first = nullptr;
    // Who only reports that another one has failed comes second.
    for (const nlohmann::json& error : errors_) {
      const auto code = static_cast<ErrorCode>(error.at("code").get<int>());
      const bool cause = code != ErrorCode::Aborted && code != ErrorCode::PeerLost;
      if (first == nullptr) first = &error;
      if (!cause) continue;
      first = &error;
      break;
    }
    if (first != nullptr) {
      throw Error(static_cast<ErrorCode>(first->at("code").get<int>()), first->at("message").get<std::string>());
    }
    if (failed_) raise(ErrorCode::Internal, "bench: a rank ended without saying why");
  }

  std::vector<pid_t> children_;
  sys::UniqueFd reports_;
  std::string pending_;
  std::vector<nlohmann::json> errors_;
  std::string killed_;
  bool failed_ = false;
};

}  // namespace

void run_on_processes(int ranks, const Plan& plan, const Emit& emit) {
  ::setenv("TORCHELASTIC_RUN_ID", ("cohort-bench-" + launch::random_hex(16)).c_str(), 1);
  Crew(ranks, plan).watch(emit);
}

void run_on_threads(int ranks, const Plan& plan, const Emit& emit) {
  cohort::run_on_threads(ranks, [&](Communicator comm) { run_plan(comm, plan, emit); }, {.timeout = plan.timeout});
}

bool inside_a_job() {
  const auto detected = value_or_throw(cluster::detect(cluster::current_environment()));
  return detected.alone || !detected.launcher.empty();
}

void run_in_job(const Plan& plan, const Emit& emit) {
  Communicator comm = join({.timeout = plan.timeout});
  run_plan(comm, plan, emit);
}

}  // namespace cohort::app::bench
