#include "base/env.h"
#include "base/hardware.h"
#include "base/parse.h"
#include "launch/agent/agent.h"
#include "launch/agent/agent_impl.h"
#include "launch/output/run_folder.h"
#include "launch/plan/rank_environment.h"
#include "launch/processes.h"

#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

// How an agent starts its workers, and a server that has failed once more.
namespace cohort::launch {
namespace {

/// What is in the pipes of a server that has ended; its own, that is: what it has left behind may write for ever.
constexpr int kMostPieces = 64;

/// "ranks 4-7, server 1".
std::string names_of(const std::vector<WorkerPlan>& workers) {
  Roles roles{0, 0, false};
  std::vector<int> processes;
  for (const WorkerPlan& worker : workers) {
    processes.push_back(worker.rank);
    if (worker.role == Role::Worker) roles.workers = std::max(roles.workers, worker.rank + 1);
    if (worker.role == Role::Server) roles.workers = worker.rank - worker.number, roles.servers = worker.number + 1;
    if (worker.role == Role::Evaluator) roles.evaluator = true;
  }
  return roles.names_of(processes);
}

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

void Agent::start_job(StartJob job) {
  if (brings_environment()) {
    std::error_code error;  // where it is gone, the check of the host says so
    job.folder = std::filesystem::current_path(error).string();
    if (!std::filesystem::is_directory(job.run_folder, error)) job.run_folder.clear();
  }
  if (options_.own) {
    job.path = options_.own->path;
    job.arguments = options_.own->arguments;
    job.environment = options_.own->environment;
    job.folder = options_.own->folder;
    job.open_files = options_.own->open_files;
    job.ignored = options_.own->ignored;
    job.bind_to_cores = options_.own->bind_to_cores;
    host_index_ = parse_integer<int>(Environment(job.workers.front().environment).find("GROUP_RANK").value_or(""))
                      .value_or(host_index_);
    if (!options_.quiet) {
      say(fmt::format("{} of {}: {} here; output and logs are at node 0 ({})", own_name(), options_.nodes,
                      names_of(job.workers), options_.place));
    }
  }
  // (What of the output before is on its way still counts.)
  stacks_ = Timer();
  epoch_.reset();
  workers_.clear();
  epoch_.emplace();
  stage_ = Stage::Running;
  epoch_->out_of_memory_before = sys::out_of_memory_kills();
  auto started = prepare_launch(std::move(job));
  if (started) started = start_workers();
  if (!started) {
    // Whatever runs already is not a job: end it before anything is said.
    epoch_->swept = 0;
    const auto stuck = sweep({}, std::chrono::seconds(2), {});
    workers_.clear();
    channel_->send(StartFailed{started.error().context().rank, started.error().what()});
    stage_ = Stage::Finished;
    channel_->send(AllGone{0, describe_stuck(stuck)});
  }
}

Result<void> Agent::start_workers() {
  const auto fail_for = [](int rank, const Error& error) {
    ErrorContext context;
    context.rank = rank;
    return tl::unexpected(Error(error.code(), error.what(), context));
  };
  const StartJob& job = epoch_->launch->job;
  if (job.trace) collect_traces(job);
  for (const WorkerPlan& plan : job.workers) {
    workers_.push_back(new_worker(plan));
    if (auto started = start_worker(*workers_.back(), plan, Worker::Log::New); !started)
      return fail_for(plan.rank, started.error());
  }
  epoch_->started_at = Clock::now();
  Started report;
  report.threads =
      parse_integer<std::int32_t>(epoch_->launch->environment.find(env::kOmpNumThreads).value_or("")).value_or(0);
  for (auto& worker : workers_) {
    if (auto running = worker->confirm(); !running) return fail_for(worker->rank(), running.error());
    report.pids.push_back(static_cast<std::int32_t>(worker->pid()));
  }
  epoch_->alive = workers_.size();
  channel_->send(report);
  if (epoch_->traces) epoch_->traces->begin();
  watch_for_dying();
  reports_ = Timer(loop_, kReportEvery, [this] { report_regularly(); });
  reap();  // some may have ended before anyone looked
  return {};
}

Result<void> Agent::prepare_launch(StartJob order) {
  WorkerLaunch launch;
  launch.job = std::move(order);
  const StartJob& job = launch.job;
  if (job.elsewhere) {
    auto made = check_host(job);
    if (!made) return tl::unexpected(made.error());
    if (*made) epoch_->run_folder = job.run_folder;
  }
  if (!job.log_folder.empty() && ::mkdir(job.log_folder.c_str(), 0755) != 0 && errno != EEXIST) {
    return fail(ErrorCode::Io, "folder {}: {}", job.log_folder, errno_text(errno));
  }
  auto secret_file = secret_.to_sealed_memfd();
  if (!secret_file) return tl::unexpected(secret_file.error());
  launch.secret_file = *std::move(secret_file);

  launch.program.folder = job.folder;
  // Its own group, to be signalled as one, but the agent's session: where the kernel groups what it schedules by
  // session (autogroup), ranks that share cores could otherwise not yield to each other.
  launch.program.group = sys::Group::Own;
  launch.program.parent_death_signal = SIGKILL;
  launch.program.open_files = job.open_files;
  launch.program.ignored = job.ignored;

  Environment& environment = launch.environment;
  environment = Environment(job.environment);
  if (job.elsewhere && !options_.own) {
    environment =
        brings_environment() ? Environment::current() : environment_there(environment, Environment::current());
    for (const std::string& assignment : job.environment) environment.set(assignment);
    environment.set("PWD", job.folder);
  }
  const auto ranks = static_cast<int>(
      std::ranges::count_if(job.workers, [](const WorkerPlan& plan) { return plan.role == Role::Worker; }));
  const int threads = threads_of(sys::usable_cores(), ranks);
  if (job.bind_to_cores) {
    auto shared = share_cores(sys::cores_of_process(), ranks);
    if (!shared) return tl::unexpected(shared.error());
    launch.shares = *std::move(shared);
  }
  for (const std::string_view count : env::kThreadCounts) {
    if (job.divides_cores && !environment.find(count)) environment.set(count, std::to_string(threads));
  }
  environment.set(env::kSecretFd, std::to_string(kWorkerSecretFd));
  epoch_->launch = std::move(launch);
  return {};
}

std::unique_ptr<Worker> Agent::new_worker(const WorkerPlan& plan) {
  Worker::Events events;
  events.output = [this](Output output) { forward(std::move(output)); };
  events.trouble = [this](std::string text) { channel_->send(Trouble{std::move(text)}); };
  events.input_taken = [this](std::size_t bytes) { channel_->send(InputTaken{bytes}); };
  return std::make_unique<Worker>(loop_, plan, epoch_->launch->job.tail_lines, std::move(events));
}

Result<void> Agent::start_worker(Worker& worker, const WorkerPlan& plan, Worker::Log log) {
  const StartJob& job = epoch_->launch->job;
  if (auto ready = worker.prepare(job.log_folder, log, job.input && plan.rank == 0); !ready) return ready;
  sys::SpawnOptions program = epoch_->launch->program;
  if (plan.rank == 0) program.stdin_fd = options_.input_fd;
  Environment own = epoch_->launch->environment;
  if (plan.role != Role::Worker) remove_rank_variables(own);
  for (const std::string& assignment : plan.environment) own.set(assignment);
  program.path = job.path;
  program.arguments = job.arguments;
  for (const RoleProgram& theirs : job.programs) {
    if (theirs.role != plan.role) continue;
    program.path = theirs.path;
    program.arguments = theirs.arguments;
  }
  program.inherited = {{epoch_->launch->secret_file.get(), kWorkerSecretFd}};
  if (worker.status_fd() >= 0) {
    own.set(env::kStatusFd, std::to_string(kWorkerStatusFd));
    program.inherited.emplace_back(worker.status_fd(), kWorkerStatusFd);
  }
  if (epoch_->traces && plan.role == Role::Worker) {
    auto ring = epoch_->traces->add(plan.rank);
    if (!ring) return tl::unexpected(ring.error());
    own.set(env::kTimelineFd, std::to_string(kWorkerTimelineFd));
    program.inherited.emplace_back(*ring, kWorkerTimelineFd);
  }
  program.environment = own.assignments();
  // Other roles run where there is room.
  const auto place = static_cast<std::size_t>(local_rank_of(plan) - local_rank_of(job.workers.front()));
  if (plan.role == Role::Worker && place < epoch_->launch->shares.size())
    program.processors = epoch_->launch->shares[place];
  return worker.start(program);
}

void Agent::collect_traces(const StartJob& job) {
  constexpr std::size_t kMostUnsent = std::size_t{4} << 20;
  const Environment first(job.workers.front().environment);
  const auto number = [&first](std::string_view name) {
    return parse_integer<int>(first.find(name).value_or("")).value_or(0);
  };
  TraceCollector::Options options;
  options.host = {number("GROUP_RANK"), std::string(first.find(env::kHost).value_or(""))};
  options.epoch = static_cast<std::uint16_t>(number(env::kRestart));
  options.base_ns = made_at_.time_since_epoch() / std::chrono::nanoseconds(1);
  options.send = [this](const TracePiece& piece) { channel_->send(piece); };
  options.has_room = [this] { return channel_->unsent_bytes() < kMostUnsent; };
  epoch_->traces.emplace(loop_, std::move(options));
}

// ---- a server once more ----

void Agent::start_again(StartAgain order) {
  Worker* const before = awaiting(order.rank);
  if (before == nullptr) {
    channel_->send(StartedAgain{order.rank, 0, {}});
    return;
  }
  epoch_->awaited[order.rank] = std::move(order);
  start_those_again();
}

void Agent::go_on_without(int rank) {
  if (awaiting(rank) == nullptr) return;
  epoch_->awaited.erase(rank);
  reap();
}

Worker* Agent::awaiting(int rank) {
  if (!epoch_->awaited.contains(rank)) return nullptr;
  const auto found = std::ranges::find_if(workers_, [rank](const auto& worker) { return worker->rank() == rank; });
  return found->get();
}

/// Its place and its files are free once the kernel has taken it down, which may be a while after its end shows.
void Agent::start_those_again() {
  for (auto& worker : workers_) {
    const auto found = epoch_->awaited.find(worker->rank());
    if (found == epoch_->awaited.end() || !found->second || worker->alive()) continue;
    const StartAgain order = *std::move(found->second);
    epoch_->awaited.erase(found);
    StartedAgain answer{order.rank, 0, {}};
    if (auto started = replace(worker, order)) {
      answer.pid = static_cast<std::int32_t>(worker->pid());
      ++epoch_->alive;
    } else {
      answer.why = started.error().what();
    }
    channel_->send(answer);
  }
}

void Agent::start_more(const WorkerPlan& plan) {
  StartedAgain answer{plan.rank, 0, "nothing runs there any more"};
  if (stage_ == Stage::Running && !epoch_->stopping) {
    forget_ended();
    auto worker = new_worker(plan);
    auto started = start_worker(*worker, plan, Worker::Log::New);
    if (started) started = worker->confirm();
    if (started) {
      answer.pid = static_cast<std::int32_t>(worker->pid());
      if (epoch_->paused) worker->pause_reading();
      ++epoch_->alive;
      workers_.push_back(std::move(worker));
    }
    answer.why = started ? std::string() : started.error().what();
  }
  channel_->send(answer);
}

// Workers come and go for as long as the job runs: nothing is kept of those that have ended. (Stdin is the first
// one's.)
void Agent::forget_ended() {
  if (stacks_) return;  // it knows them
  std::erase_if(workers_, [first = workers_.front().get()](const auto& worker) {
    return worker.get() != first && worker->over();
  });
}

void Agent::kill_group(pid_t group) {
  const auto of_group = [group](pid_t pid) { return ::getpgid(pid) == group && sys::descends_from(pid, ::getpid()); };
  for (const pid_t pid : sys::descendants(::getpid())) sys::signal_if(pid, SIGKILL, of_group);
}

Result<void> Agent::replace(std::unique_ptr<Worker>& worker, const StartAgain& order) {
  kill_group(worker->pid());  // what it has forked may hold its place, or its journal
  for (int piece = 0; piece < kMostPieces && worker->drain(); ++piece) {
  }
  WorkerPlan plan =
      *std::ranges::find_if(epoch_->launch->job.workers, [&](const WorkerPlan& one) { return one.rank == order.rank; });
  plan.environment.insert(plan.environment.end(), order.environment.begin(), order.environment.end());
  auto again = new_worker(plan);
  auto started = start_worker(*again, plan, Worker::Log::Continued);
  if (started) started = again->confirm();
  if (!started) return started;
  if (epoch_->paused) again->pause_reading();
  stacks_ = Timer();  // it knows the worker before
  worker = std::move(again);
  return {};
}

void Agent::start_no_more() {
  for (const auto& [rank, order] : std::exchange(epoch_->awaited, {})) {
    if (order && !lost_supervisor_) channel_->send(StartedAgain{rank, 0, {}});
  }
}

}  // namespace cohort::launch
