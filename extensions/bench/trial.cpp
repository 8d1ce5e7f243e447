#include "bench/trial.h"

#include "base/env.h"
#include "base/hardware.h"
#include "base/json.h"
#include "base/process.h"
#include "base/result.h"
#include "bench/operation.h"
#include "bench/training/training.h"
#include "launch/start/starter.h"
#include "shared/child_job.h"
#include "shared/program.h"
#include "shared/run_options.h"

#include <cohort/init.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>

namespace cohort::app::trial {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr std::string_view kLevels[] = {"ok", "warning", "FAILED"};
/// Parts of the minute that all checks take; the doctor takes at most half of it.
constexpr double kCollectivesSeconds = 18, kTrainingSeconds = 3;
constexpr std::chrono::seconds kJobLimit(50), kDoctorLimit(60);

double since(Clock::time_point begun) { return std::chrono::duration<double>(Clock::now() - begun).count(); }

}  // namespace

std::string to_string(const Line& line) {
  const std::string time = line.seconds < 0 ? "" : fmt::format("{:.1f} s", line.seconds);
  std::string text = fmt::format("{:<9}{:<16} {:>6}  {}{}{}\n", kLevels[static_cast<std::size_t>(line.level)],
                                 line.what, time, line.title, line.title.empty() ? "" : ": ", line.found);
  if (!line.fix.empty()) text += fmt::format("{:34}what to do: {}\n", "", line.fix);
  return text;
}

std::vector<Line> lines_of_doctor(const json& report, double seconds) {
  std::vector<Line> lines;
  std::size_t sound = 0;
  for (const json& check : report.value("checks", json::array())) {
    const std::string level = text_in(check, "level"), to = text_in(check, "to");
    if (level == "ok") {
      ++sound;
      continue;
    }
    std::string where = fmt::format("{}", fmt::join(check.value("hosts", std::vector<std::string>()), ", "));
    if (!to.empty()) where += " to " + to;
    if (where.empty()) where = "environment";
    lines.push_back({level == "failed" ? Level::Failed : Level::Warning, where, text_in(check, "title"),
                     text_in(check, "found"), text_in(check, "mend"), -1});
  }
  lines.insert(lines.begin(), {Level::Ok, "doctor", "", fmt::format("{} checks are in order", sound), "", seconds});
  return lines;
}

Line line_of_check(const json& event, const std::vector<std::string>& hosts) {
  Line line{
      Level::Ok, text_in(event, "check"), "", text_in(event, "found"), "", number_in(event, "seconds").value_or(-1)};
  std::map<std::string, std::vector<int>> wrong;
  for (const int rank : event.value("wrong", std::vector<int>())) {
    const auto at = static_cast<std::size_t>(rank);
    wrong[at < hosts.size() ? hosts[at] : "?"].push_back(rank);
  }
  for (const auto& [host, ranks] : wrong) {
    line.level = Level::Failed;
    line.found += fmt::format("; wrong on {} (rank {})", host, fmt::join(ranks, ", "));
  }
  if (!wrong.empty()) {
    line.fix = std::set(hosts.begin(), hosts.end()).size() > wrong.size()
                   ? fmt::format("leave {} out, and test its memory and processor", wrong.begin()->first)
                   : "`cohort doctor --run -H HOST` for each host alone: one of them gives wrong data to all";
  } else if (event.value("cut", false)) {
    line.level = Level::Warning;
    line.fix = "the network is slow for larger ones: `cohort doctor` measures it; --network chooses another";
  }
  return line;
}

std::vector<Line> slow_hosts(const std::vector<launch::RankTimes>& ranks) {
  if (!launch::takes_steps(ranks)) return {};
  const launch::StepCosts costs = launch::costs_of(ranks, 1);
  constexpr double kSlow = 1.5;
  if (costs.slowest_compute <= kSlow * costs.median_compute) return {};
  return {{Level::Warning, costs.slowest_host, "speed",
           fmt::format("rank {} computes a step in {}, most others in {}", costs.slowest_rank,
                       launch::seconds_in_words(costs.slowest_compute), launch::seconds_in_words(costs.median_compute)),
           "all wait for it: is something else running there (`top`)? or leave it out", -1}};
}

std::string verdict_of(const std::vector<Line>& lines, std::size_t hosts, double seconds) {
  std::string failed;
  std::set<std::string> warnings;
  for (const Line& line : lines) {
    if (line.level == Level::Warning) warnings.insert(line.what + (line.title.empty() ? "" : ": " + line.title));
    if (line.level == Level::Failed)
      failed += fmt::format("{}{} ({}{}{})", failed.empty() ? "" : "; ", line.what, line.title,
                            line.title.empty() ? "" : ": ", line.found);
  }
  const std::string where = hosts > 1 ? fmt::format("these {} hosts", hosts) : "this host";
  if (!failed.empty())
    return fmt::format("FAILED after {:.0f} s, a job on {} would not work: {}\n", seconds, where, failed);
  return fmt::format("passed in {:.0f} s: jobs work on {}{}{}\n", seconds, where,
                     warnings.empty() ? "" : "; warnings: ", fmt::join(warnings, ", "));
}

namespace {

// The next functions run in the ranks of the job.

/// On rank 0, prints a line for the command.
void tell(const Communicator& comm, const json& event) {
  if (comm.rank() != 0) return;
  std::printf("%s\n", json_text(event).c_str());
  if (std::fflush(stdout) != 0) raise(ErrorCode::Io, "a rank cannot report: {}", errno_text(errno));
}

/// Returns the ranks that passed true for `said`.
std::vector<int> ranks_with(Communicator& comm, bool said) {
  const std::array<std::int64_t, 1> own = {said ? 1 : 0};
  std::vector<std::int64_t> all(static_cast<std::size_t>(comm.size()));
  comm.all_gather(std::span<const std::int64_t>(own), std::span<std::int64_t>(all)).wait();
  std::vector<int> ranks;
  for (int rank = 0; rank < comm.size(); ++rank) {
    if (all[static_cast<std::size_t>(rank)] != 0) ranks.push_back(rank);
  }
  return ranks;
}

/// Tries growing sizes until the next ones would take longer than `limit`, by rank 0's clock.
void try_collective(Communicator& comm, bench::Regions& regions, bench::Collective collective, double limit) {
  const bench::Traits& traits = bench::traits_of(collective);
  const std::vector<DType> all = {DType::Float32, DType::BFloat16, DType::Float64, DType::Float16,
                                  DType::Int32,   DType::Int64,    DType::UInt8};
  constexpr std::size_t kSizes[] = {8, 1 << 10, 1 << 16, 1 << 20, 1 << 23, 1 << 26};
  constexpr std::size_t kAllTypes = 1 << 20;  // largest size with all types; larger ones use two types
  const auto begun = Clock::now();
  std::int64_t wrong = 0, calls = 0;
  std::size_t largest = 0;
  std::array<std::int64_t, 1> more = {1};
  for (std::size_t at = 0; at < std::size(kSizes) && more[0] != 0; ++at) {
    const auto types = std::span(all).first(kSizes[at] <= kAllTypes ? all.size() : 2);
    const double before = since(begun);
    for (const DType dtype : types) {
      for (const bool in_place : {false, true}) {
        if (!(in_place ? traits.in_place : traits.out_of_place)) continue;
        bench::Operation operation;
        operation.collective = collective;
        operation.dtype = dtype;
        operation.root = comm.size() - 1;
        operation.in_place = in_place;
        operation.shape = bench::shape_of(collective, kSizes[at], dtype, comm.rank(), comm.size());
        const auto memory = in_place ? bench::MemoryKind::Arena : bench::MemoryKind::Heap;
        operation.buffers = bench::place_buffers(comm, regions, memory, collective, operation.shape, dtype, in_place);
        operation.mirror = operation.buffers;
        bench::write_input(comm, operation);
        comm.barrier().wait();
        bench::call(comm, operation);
        wrong += bench::wrong_elements(comm, operation);
        comm.barrier().wait();  // other ranks may still be comparing
        ++calls;
      }
    }
    largest = kSizes[at];
    if (at + 1 == std::size(kSizes)) break;
    const double fewer = kSizes[at + 1] <= kAllTypes ? 1 : 2.0 / static_cast<double>(types.size());
    const double next = (since(begun) - before) * static_cast<double>(kSizes[at + 1] / kSizes[at]) * fewer;
    more[0] = since(begun) + next < limit || kSizes[at] < kAllTypes ? 1 : 0;
    comm.broadcast(std::span<std::int64_t>(more)).wait();
  }
  const auto who = ranks_with(comm, wrong != 0);
  tell(comm, {{"check", traits.name},
              {"found", fmt::format("{} types, 8 B to {}, {} results compared to the bit", all.size(),
                                    largest < 1 << 20 ? fmt::format("{} KiB", largest >> 10)
                                                      : fmt::format("{} MiB", largest >> 20),
                                    calls)},
              {"seconds", since(begun)},
              {"cut", more[0] == 0},
              {"wrong", who}});
}

void be_trial_rank() {
  Communicator comm = init();
  tell(comm, {{"check", "start"}, {"found", fmt::format("{} ranks have met", comm.size())}});
  {
    bench::Regions regions;
    std::vector<bench::Collective> collectives = {bench::Collective::AllReduce, bench::Collective::Broadcast,
                                                  bench::Collective::AllGather, bench::Collective::ReduceScatter,
                                                  bench::Collective::AllToAll};
    if (comm.size() > 1) collectives.push_back(bench::Collective::Exchange);
    const double share = kCollectivesSeconds / static_cast<double>(collectives.size());
    const auto begun = Clock::now();
    for (const bench::Collective collective : collectives)
      try_collective(comm, regions, collective, std::min(2 * share, kCollectivesSeconds - since(begun)));
    comm.barrier().wait();
  }
  const auto begun = Clock::now();
  // `train` checks that all ranks have the same weights at the end.
  const training::Trained trained =
      training::train(comm, {.layers = {784, 256, 10}, .batch = 100, .seconds = kTrainingSeconds});
  const auto who = ranks_with(comm, trained.last_loss >= trained.first_loss);
  tell(comm, {{"check", "training"},
              {"found", fmt::format("{} steps, the same weights on all ranks; loss of rank 0 from {:.4f} to {:.4f}",
                                    trained.steps, trained.first_loss, trained.last_loss)},
              {"seconds", since(begun)},
              {"wrong", who}});
}

// The next functions are the command's.

/// Runs `cohort doctor --json`; throws its output as the error if that is no report.
json doctor_report(const std::vector<std::string>& given) {
  std::vector<std::string> command = {value_or_throw(launch::own_command()), "doctor", "--json"};
  command.insert(command.end(), given.begin(), given.end());
  const launch::Captured said = value_or_throw(launch::capture(command, kDoctorLimit));
  const auto begin = said.text.find("{\n");  // remarks may precede the report
  json report = parse_json_or_discard(begin == std::string::npos ? std::string() : said.text.substr(begin));
  if (!report.is_object()) raise(ErrorCode::Unavailable, "`cohort doctor` ended with {}: {}", said.status, said.text);
  return report;
}

void try_hosts(const SharedOptions& options, int& exit_status) {
  const auto begun = Clock::now();
  const launch::JobSpec& spec = options.spec;
  narrow_networks(spec.network);
  const launch::Plan plan = hosts_of(spec);
  std::vector<std::string> given, hosts;  // by rank
  for (const auto& [name, value] : options.given) given.insert(given.end(), {name, value});
  for (const launch::PlannedHost& host : plan.hosts)
    hosts.insert(hosts.end(), static_cast<std::size_t>(host.slots), host.name);
  if (hosts.empty()) hosts.assign(static_cast<std::size_t>(std::max(2, sys::usable_cores())), sys::host_name());
  const std::size_t host_count = std::max<std::size_t>(1, plan.hosts.size());
  std::printf("cohort doctor: %zu ranks on %zu host%s\n", hosts.size(), host_count, host_count == 1 ? "" : "s");

  std::vector<Line> lines;
  const auto show = [&lines](Line line) {
    std::fputs(to_string(line).c_str(), stdout);
    std::fflush(stdout);
    lines.push_back(std::move(line));
  };
  for (Line& line : lines_of_doctor(doctor_report(given), since(begun))) show(std::move(line));
  const auto failed = [&lines] {
    return std::ranges::any_of(lines, [](const Line& l) { return l.level == Level::Failed; });
  };
  if (!failed()) {
    const auto job_begun = Clock::now();
    JobRequest request;
    request.options = given;
    request.options.insert(request.options.end(), {"--env", fmt::format("{}=1", env::kTimes)});
    request.program = {"/proc/self/exe", "bench", "trial"};  // the agent's executable, at any path on its host
    request.processes = static_cast<int>(hosts.size());
    request.timeout = kJobLimit;
    request.on_output = [&](const std::string& said) {
      json event = parse_json_or_discard(said);
      if (!event.is_object()) return;
      if (!event.contains("seconds")) event["seconds"] = since(job_begun);
      show(line_of_check(event, hosts));
    };
    try {
      for (Line& line : slow_hosts(run_job(request).ranks)) show(std::move(line));
    } catch (const Error& error) {
      std::string why = error.what();
      if (const auto at = why.find(" -- "); at != std::string::npos) why = why.substr(at + 4);  // drops known options
      if (error.code() == ErrorCode::Timeout) why += "; is the network slow?";
      show({Level::Failed, "job", "", fmt::format("after the check {}: {}", lines.back().what, why),
            "`cohort run` with the same options shows all that it says", since(job_begun)});
    }
  }
  std::fputs(("\n" + verdict_of(lines, host_count, since(begun))).c_str(), stdout);
  if (failed() || std::fflush(stdout) != 0) exit_status = 1;
}

}  // namespace

void add_doctor_run(CLI::App& app, int& exit_status) {
  auto options = std::make_shared<SharedOptions>();
  CLI::App* command = app.add_subcommand("doctor-run", "Tries hosts (`cohort doctor --run`)")->group("");
  add_shared_options(
      *command,
      {"--hosts", "--hostfile", "--nodes", "--per-node", "--starter", "--ssh", "--remote-cohort", "--network"},
      *options);
  command->callback([options, &exit_status] { try_hosts(*options, exit_status); });
}

void add_trial(CLI::App& bench) {
  bench.add_subcommand("trial", "A rank of `cohort doctor --run`")->group("")->callback(be_trial_rank);
}

}  // namespace cohort::app::trial
