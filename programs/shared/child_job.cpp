#include "shared/child_job.h"

#include "base/env.h"
#include "base/files.h"
#include "base/json.h"
#include "base/process.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "launch/processes.h"
#include "launch/start/starter.h"
#include "net/socket.h"
#include "shared/program.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <utility>

namespace cohort::app {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::json;

constexpr std::size_t kKeptLines = 8;

double number(const Json& object, const char* name) { return number_in(object, name).value_or(0); }

/// `cohort run` ends its job at the timeout and then cleans up on every host.
constexpr std::chrono::seconds kAfterTimeout(60);
constexpr std::size_t kLongestLine = std::size_t{1} << 20;

class Child {
 public:
  explicit Child(const sys::SpawnOptions& options) {
    auto pending = sys::spawn(options);
    auto child = pending ? std::move(*pending).confirm() : tl::unexpected(pending.error());
    if (!child) {
      raise(ErrorCode::Unavailable, "bench: {} cannot be started: {}", options.path, sys::to_string(child.error()));
    }
    pid_ = child->pid;
    pidfd_ = std::move(child->pidfd);
  }
  /// Kills the child in any case; the job ends with its `cohort run`.
  ~Child() {
    if (pid_ < 0) return;
    ::kill(pid_, SIGKILL);
    wait();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  /// Returns false if the child has not ended by the deadline.
  bool wait_until(Clock::time_point deadline) {
    if (!value_or_throw(net::wait_ready(pidfd_.get(), POLLIN, deadline))) return false;
    wait();
    return true;
  }

 private:
  void wait() noexcept {
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
  }

  pid_t pid_ = -1;
  sys::UniqueFd pidfd_;
};

/// Our environment, but without variables for `cohort run`, which has to take options only from its command line, and
/// without those of another world.
std::vector<std::string> own_environment() {
  launch::Environment own = launch::Environment::current();
  own.remove_run_options();
  for (const auto name : {env::kRunDir, env::kSecretFile, env::kInit, env::kAlone}) own.remove(name);
  return own.assignments();
}

/// Passes every line of `fd` to `reader` until the end. Returns false if the deadline passed.
bool read_lines(int fd, JobReader& reader, Clock::time_point deadline) {
  std::string line;
  while (true) {
    if (!value_or_throw(net::wait_ready(fd, POLLIN, deadline))) return false;
    char bytes[16384];
    const ssize_t got = ::read(fd, bytes, sizeof bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) raise(ErrorCode::Io, "bench: read: {}", errno_text(errno));
    if (got == 0) return true;
    for (ssize_t i = 0; i < got; ++i) {
      if (bytes[i] == '\n') {
        reader.take(line);
        line.clear();
      } else if (line.size() < kLongestLine) {
        line += bytes[i];
      }
    }
  }
}

}  // namespace

RankTimes times_in(const Json& object) {
  RankTimes times;
  times.rank = static_cast<int>(std::clamp(number(object, "rank"), -1.0, 1e9));
  times.host = text_in(object, "host");
  const Json found = object.value("times", Json());
  times.steps = number(found, "steps");
  times.seconds = number(found, "seconds");
  times.operations = number(found, "operations");
  times.bytes = number(found, "bytes");
  times.busy = number(found, "busy");
  times.waited = number(found, "waited");
  times.wire = number(found, "wire");
  times.exposed = number(found, "exposed");
  times.wire_bytes = number(found, "wire_bytes");
  return times;
}

Result<RunCosts> costs_of_run(const std::string& folder) {
  const std::string path = folder + "/job.json";
  return costs_of_record(sys::read_text(path).value_or(std::string()), path);
}

Result<RunCosts> costs_of_record(const std::string& text, const std::string& path) {
  const Json record = parse_json_or_discard(text);
  if (!record.is_object()) return fail(ErrorCode::InvalidArgument, "{}: that is no run's record", path);
  RunCosts run;
  for (const Json& host : record.value("hosts", Json::array())) {
    if (host.is_object() && number(host, "ranks") > 0) run.hosts.push_back(text_in(host, "name"));
  }
  std::vector<RankTimes> ranks;
  for (const Json& one : record.value("trained", Json::array())) {
    if (one.is_object()) ranks.push_back(times_in(one));
  }
  if (!launch::takes_steps(ranks) || static_cast<double>(ranks.size()) != number(record, "world_size")) {
    return fail(
        ErrorCode::InvalidArgument,
        "{}: where its steps' time went is not known: it was not measured (on one host it is with COHORT_TIMES=1), "
        "the run has not ended well, or its steps are not Cohort's -- `cohort bench plan -- COMMAND` measures a "
        "program",
        path);
  }
  run.costs = launch::costs_of(ranks, std::max(1, static_cast<int>(run.hosts.size())));
  return run;
}

void JobReader::take(const std::string& said) {
  const Json event = parse_json_or_discard(said);
  if (!event.is_object()) return;
  const std::string kind = text_in(event, "event");
  if (kind == "rank_ended") outcome_.ranks.push_back(times_in(event));
  if (kind == "notice") notice_ = text_in(event, "text");
  if (kind == "output" && on_output_) {
    const std::string line = text_in(event, "line");
    if (text_in(event, "stream") == "stdout") return on_output_(line);
    std::fprintf(stderr, "%s\n", line.c_str());
  } else if (kind == "output" && text_in(event, "stream") == "stderr") {
    last_lines_.push_back(text_in(event, "line"));
    if (last_lines_.size() > kKeptLines) last_lines_.erase(last_lines_.begin());
  }
  if (kind == "failure") {
    outcome_.failure = fmt::format("rank {} (host {}) failed: {}", number(event, "rank"), text_in(event, "host"),
                                   text_in(event, "status"));
  }
  if (kind == "end") {
    outcome_.exit_status = static_cast<int>(std::clamp(number(event, "exit_status"), -1.0, 255.0));
    outcome_.seconds = number(event, "seconds");
    if (outcome_.failure.empty()) outcome_.failure = text_in(event, "reason");
  }
}

JobOutcome JobReader::finish() && {
  if (outcome_.exit_status != 0) {
    if (outcome_.failure.empty()) outcome_.failure = notice_;
    if (!last_lines_.empty()) outcome_.failure += fmt::format("\n  {}", fmt::join(last_lines_, "\n  "));
  }
  return std::move(outcome_);
}

JobOutcome run_job(const JobRequest& request) {
  // Folder for the job's record, which nobody needs. If this process is killed, `cohort run` removes the folder.
  const TemporaryFolder folder(std::filesystem::temp_directory_path(), "cohort-bench-");
  sys::SpawnOptions spawn;
  spawn.path = value_or_throw(launch::own_command());
  spawn.arguments = {"cohort", "run",
                     // The job ends with this process, even if this process is killed; then the job has to remove the
                     // folder.
                     "--owner", fmt::format("{},{}", ::getpid(), folder.path().string()), "--json", "--no-logs",
                     "--run-dir", (folder.path() / "run").string(), "--max-restarts", "0", "-np",
                     std::to_string(request.processes), "--timeout",
                     fmt::format("{}", std::chrono::duration<double>(request.timeout).count())};
  spawn.arguments.insert(spawn.arguments.end(), request.options.begin(), request.options.end());
  spawn.arguments.emplace_back("--");
  spawn.arguments.insert(spawn.arguments.end(), request.program.begin(), request.program.end());
  spawn.environment = own_environment();
  auto [read_end, write_end] = value_or_throw(launch::make_pipe());
  spawn.stdout_fd = write_end.get();
  Child child(spawn);
  write_end.reset();
  JobReader reader(request.on_output);
  const auto deadline = Clock::now() + request.timeout + kAfterTimeout;
  if (!read_lines(read_end.get(), reader, deadline) || !child.wait_until(deadline)) {
    raise(ErrorCode::Unavailable, "bench: `cohort run` does not end by itself; its processes are ended");
  }
  JobOutcome outcome = std::move(reader).finish();
  if (outcome.exit_status == 0) return outcome;
  const std::string where =
      request.options.empty() ? std::string() : fmt::format(" ({})", fmt::join(request.options, " "));
  raise(outcome.exit_status == 124 ? ErrorCode::Timeout : ErrorCode::Unavailable,
        "bench: the job of {} process{}{} ended {} -- {}", request.processes, request.processes == 1 ? "" : "es", where,
        outcome.exit_status < 0 ? std::string("without a word") : fmt::format("with status {}", outcome.exit_status),
        outcome.failure.empty() ? "its own words are above" : outcome.failure);
}

}  // namespace cohort::app
