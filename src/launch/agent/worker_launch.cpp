#include "launch/agent/worker_launch.h"

#include "base/env.h"
#include "base/hardware.h"
#include "base/parse.h"
#include "launch/output/run_folder.h"
#include "launch/plan/rank_environment.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

namespace cohort::launch {
namespace {

int local_rank_of(const WorkerPlan& worker) {
  return parse_integer<int>(Environment(worker.environment).find(env::kLocalRank).value_or("")).value_or(0);
}

}  // namespace

Result<bool> check_host(const StartJob& job) {
  std::error_code error;
  if (!std::filesystem::is_directory(job.folder, error)) {
    return fail(ErrorCode::Unavailable,
                "there is no folder {} -- the job's working folder has to be at the same path on every host: a shared "
                "file system, or a copy",
                job.folder);
  }
  const std::string program = (std::filesystem::path(job.folder) / job.path).string();
  if (::access(program.c_str(), X_OK) != 0) {
    return fail(ErrorCode::Unavailable, "{}: {} -- the program has to be at the same path on every host", program,
                errno_text(errno));
  }
  if (job.run_folder.empty()) return false;
  const auto own = make_own_folder(job.run_folder, Existing::Taken);
  if (!own) return fail(ErrorCode::Io, "the run's folder {}: {}", job.run_folder, own.error().what());
  return own->made;
}

Result<void> WorkerLaunch::prepare(StartJob order) {
  job_ = std::move(order);
  const StartJob& job = job_;
  if (job.elsewhere) {
    auto made = check_host(job);
    if (!made) return tl::unexpected(made.error());
    if (*made) made_folder_ = job.run_folder;
  }
  if (!job.log_folder.empty() && ::mkdir(job.log_folder.c_str(), 0755) != 0 && errno != EEXIST) {
    return fail(ErrorCode::Io, "folder {}: {}", job.log_folder, errno_text(errno));
  }
  auto secret_file = secret_.to_sealed_memfd();
  if (!secret_file) return tl::unexpected(secret_file.error());
  secret_file_ = *std::move(secret_file);

  program_.folder = job.folder;
  // Each worker has its own process group, to be signalled as one, but stays in the agent's session: a kernel that
  // schedules by session (autogroup) would otherwise not let ranks that share cores yield to each other.
  program_.group = sys::Group::Own;
  program_.parent_death_signal = SIGKILL;
  program_.open_files = job.open_files;
  program_.ignored = job.ignored;

  Environment& environment = environment_;
  environment = Environment(job.environment);
  if (job.elsewhere && !options_.own) {
    environment =
        brings_environment(options_) ? Environment::current() : environment_there(environment, Environment::current());
    for (const std::string& assignment : job.environment) environment.set(assignment);
    environment.set("PWD", job.folder);
  }
  const auto ranks = static_cast<int>(
      std::ranges::count_if(job.workers, [](const WorkerPlan& plan) { return plan.role == Role::Worker; }));
  const int threads = threads_of(sys::usable_cores(), ranks);
  if (job.bind_to_cores) {
    auto shared = share_cores(sys::cores_of_process(), ranks);
    if (!shared) return tl::unexpected(shared.error());
    shares_ = *std::move(shared);
  }
  for (const std::string_view count : env::kThreadCounts) {
    if (job.divides_cores && !environment.find(count)) environment.set(count, std::to_string(threads));
  }
  environment.set(env::kSecretFd, std::to_string(kWorkerSecretFd));
  if (job.trace) collect_traces();
  return {};
}

Result<std::unique_ptr<Worker>> WorkerLaunch::start(const WorkerPlan& plan, Worker::Log log) {
  const StartJob& job = job_;
  auto worker = std::make_unique<Worker>(loop_, plan, job.tail_lines, upstream_);
  if (auto ready = worker->prepare(job.log_folder, log, job.input && plan.rank == 0); !ready)
    return tl::unexpected(ready.error());
  sys::SpawnOptions program = program_;
  if (plan.rank == 0) program.stdin_fd = options_.input_fd;
  Environment own = environment_;
  if (plan.role != Role::Worker) remove_rank_variables(own);
  for (const std::string& assignment : plan.environment) own.set(assignment);
  program.path = job.path;
  program.arguments = job.arguments;
  for (const RoleProgram& theirs : job.programs) {
    if (theirs.role != plan.role) continue;
    program.path = theirs.path;
    program.arguments = theirs.arguments;
  }
  program.inherited = {{secret_file_.get(), kWorkerSecretFd}};
  if (worker->status_fd() >= 0) {
    own.set(env::kStatusFd, std::to_string(kWorkerStatusFd));
    program.inherited.emplace_back(worker->status_fd(), kWorkerStatusFd);
  }
  if (traces_ && plan.role == Role::Worker) {
    auto ring = traces_->add(plan.rank);
    if (!ring) return tl::unexpected(ring.error());
    own.set(env::kTimelineFd, std::to_string(kWorkerTimelineFd));
    program.inherited.emplace_back(*ring, kWorkerTimelineFd);
  }
  program.environment = own.assignments();
  // Other roles run on any cores.
  const auto place = static_cast<std::size_t>(local_rank_of(plan) - local_rank_of(job.workers.front()));
  if (plan.role == Role::Worker && place < shares_.size()) program.processors = shares_[place];
  if (auto started = worker->start(program); !started) return tl::unexpected(started.error());
  return worker;
}

void WorkerLaunch::collect_traces() {
  const Environment first(job_.workers.front().environment);
  const auto number = [&first](std::string_view name) {
    return parse_integer<int>(first.find(name).value_or("")).value_or(0);
  };
  TraceCollector::Options options;
  options.host = {number("GROUP_RANK"), std::string(first.find(env::kHost).value_or(""))};
  options.epoch = static_cast<std::uint16_t>(number(env::kRestart));
  options.base_ns = traces_base_.time_since_epoch() / std::chrono::nanoseconds(1);
  traces_.emplace(loop_, upstream_, std::move(options));
}

}  // namespace cohort::launch
