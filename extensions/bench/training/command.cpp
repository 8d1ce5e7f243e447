// `cohort bench training` times a training over processes and hosts, and says why more of them do or do not help.

#include "base/env.h"
#include "base/files.h"
#include "base/hardware.h"
#include "base/json.h"
#include "base/result.h"
#include "bench/training/training.h"
#include "shared/run_options.h"

#include <cohort/init.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>

namespace cohort::app::training {

std::string unit_of(const JobOutcome& outcome, const Counting& counting) {
  // Only `counting` says how many samples a step has, and so how steps with different numbers of processes compare.
  return launch::takes_steps(outcome.ranks) && (counting.per_rank > 0 || counting.per_step > 0) ? "samples" : "runs";
}

Point point_of(const JobOutcome& outcome, int processes, int hosts, const Counting& counting) {
  Point point;
  if (!launch::takes_steps(outcome.ranks)) {
    point.processes = processes;
    point.hosts = hosts;
    point.seconds = point.run = outcome.seconds;
    point.rate = outcome.seconds > 0 ? 1 / outcome.seconds : 0;
    return point;
  }
  static_cast<launch::StepCosts&>(point) = launch::costs_of(outcome.ranks, hosts);
  point.run = outcome.seconds;
  point.split = point.waits_seen ? Split::Measured : Split::Unknown;
  const double samples = counting.per_step > 0 ? counting.per_step : counting.per_rank * point.processes;
  if (samples > 0) {
    point.rate = samples * point.steps / point.seconds;
  } else if (point.run > 0) {
    point.rate = 1 / point.run;
  }
  return point;
}

Point median_of(std::vector<Point> points) {
  std::sort(points.begin(), points.end(), [](const Point& a, const Point& b) { return a.rate < b.rate; });
  Point median = points[(points.size() - 1) / 2];
  for (const Point& point : points) median.rates.push_back(point.rate);
  return median;
}

void estimate_split(Point& point, const Point& alone, Scaling scaling) {
  if (point.split != Split::Unknown || point.steps <= 0 || alone.steps <= 0) return;
  const double step = point.step.step();
  const double share = scaling == Scaling::PerStep ? static_cast<double>(alone.processes) / point.processes : 1;
  const double more = step - alone.step.step() * share;
  point.split = Split::Estimated;
  const double wire = std::clamp(point.busy_wire, 0.0, std::max(more, 0.0));
  point.step.compute = more > 0 ? step - more : step;
  point.step.wire = wire;
  point.step.waiting = std::max(more, 0.0) - wire;
  point.step.local = 0;
}

nlohmann::ordered_json to_json(const Point& point) {
  const char* const split = point.split == Split::Measured    ? "measured"
                            : point.split == Split::Estimated ? "estimated"
                                                              : "unknown";
  return {{"event", "training"},
          {"hosts", point.hosts},
          {"processes", point.processes},
          {"rate", point.rate},
          {"rates", point.rates},
          {"steps", point.steps},
          {"seconds", point.seconds},
          {"run_s", point.run},
          {"split", split},
          {"compute_s", point.step.compute},
          {"waiting_s", point.step.waiting},
          {"local_s", point.step.local},
          {"wire_s", point.step.wire},
          {"wire_busy_s", point.busy_wire},
          {"wire_bytes", point.wire_bytes}};
}

namespace {

struct Options {
  std::string processes, hosts_counted;
  SharedOptions shared;
  std::string layers = "784,1000,1000,10";
  std::optional<double> batch, global_batch;
  double seconds = 3, timeout = 600;
  int repetitions = 3;
  std::string json, svg;
  bool quiet = false;
  std::string wire_format = "none";
  bool plan = false;     ///< this is `cohort bench plan`
  bool latency = false;  ///< for a rank that runs tell_latency
  std::vector<std::string> program;
};

constexpr const char* kFooter = R"(Examples:
  cohort bench training                                     on this host, 1, 2, 4, ... processes
  cohort bench training -H a:4,b:4 --processes 1,2,4,8 --hosts 1,2 --svg scaling.svg
  salloc -N 2 cohort bench training --processes 1,2,4       the hosts are the allocation's
  cohort bench training -H a:4,b:4 --batch 64 -- digits --batch-per-process 64 --threads 1 --epochs 2

Without a command it trains layers in plain loops (--layers, on noise; the gradients are averaged over all ranks while
the next ones are computed). A command of yours should print little and take a minute or so. Where its steps are Cohort's
(cohort.nn, cohort.horovod.torch, cohort::DistributedDataParallel) they are timed from the third to the last one; else its whole time counts.
Where hosts are and how they are reached is also taken from the variables of `cohort run` (COHORT_RUN_HOSTS, COHORT_RUN_SSH, ...).
docs/reference/bench-training.md explains the table.)";

constexpr const char* kPlanFooter = R"(Examples:
  cohort bench plan runs/latest                     of a run over several hosts that has ended well
  cohort bench plan -H a:4,b:4 -- digits --threads 1 --epochs 2
  cohort bench plan -H a:4,b:4 --layers 784,1000,1000,10

It measures where the time of a step goes, and computes from that what a step would take with fewer bytes between hosts,
larger buckets, fewer synchronisations, fewer ranks, or shares of the samples by speed. docs/reference/bench-training.md
explains it.)";

std::vector<int> numbers_of(const std::string& text, const char* option) {
  auto numbers = numbers_in(text, launch::kMostProcesses);
  if (!numbers) {
    raise(ErrorCode::InvalidArgument, "{} '{}': numbers from 1 to {} are wanted, as 1,2,4", option, text,
          launch::kMostProcesses);
  }
  std::sort(numbers->begin(), numbers->end());
  numbers->erase(std::unique(numbers->begin(), numbers->end()), numbers->end());
  return *std::move(numbers);
}

/// 1, 2, 4, ... and `most`.
std::vector<int> doubling(int most) {
  std::vector<int> numbers;
  for (int number = 1; number < most; number *= 2) numbers.push_back(number);
  numbers.push_back(most);
  return numbers;
}

/// A setup to measure: a number of processes on a number of hosts.
struct Setup {
  int processes = 1;
  int hosts = 1;
  std::vector<std::string> options;
};

std::vector<Setup> setups_of(const Options& options) {
  const launch::Plan choice = hosts_of(options.shared.spec);
  const bool given = !choice.hosts.empty();
  const int there = given ? static_cast<int>(choice.hosts.size()) : 1;
  const std::vector<int> hosts =
      options.hosts_counted.empty() ? doubling(there) : numbers_of(options.hosts_counted, "--hosts");
  if (hosts.back() > there) {
    raise(ErrorCode::InvalidArgument,
          "--hosts {}: there {} {} -- name more with -H or --hostfile, or run within a Slurm allocation", hosts.back(),
          there == 1 ? "is" : "are", there);
  }
  int slots = given ? 0 : sys::usable_cores();
  for (const auto& host : choice.hosts) slots += host.slots;
  const std::vector<int> processes =
      options.processes.empty() ? doubling(std::max(slots, 1)) : numbers_of(options.processes, "--processes");
  std::vector<Setup> setups;
  for (const int number : hosts) {
    for (const int ranks : processes) {
      if (ranks < number) continue;  // a host without a process does not count
      Setup setup{ranks, number, {}};
      if (given) {
        std::vector<std::string> list;
        for (int host = 0; host < number; ++host) {
          const std::string& name = choice.hosts[static_cast<std::size_t>(host)].name;
          list.push_back(fmt::format("{}:{}", name.find(':') != std::string::npos ? "[" + name + "]" : name,
                                     ranks / number + (host < ranks % number ? 1 : 0)));
        }
        setup.options = {"-H", fmt::format("{}", fmt::join(list, ","))};
        for (const auto& [name, value] : options.shared.given) {
          if (name != "--hosts" && name != "--hostfile") setup.options.insert(setup.options.end(), {name, value});
        }
      }
      setups.push_back(std::move(setup));
    }
  }
  if (setups.empty()) {
    raise(ErrorCode::InvalidArgument, "--processes {} on --hosts {}: that is less than a process for each host",
          options.processes, options.hosts_counted);
  }
  return setups;
}

std::vector<int> layers_of(const std::string& text) {
  const auto layers = numbers_in(text, 1'000'000).value_or(std::vector<int>());
  double parameters = 0;
  for (std::size_t i = 0; i + 1 < layers.size(); ++i) parameters += 1.0 * layers[i] * layers[i + 1];
  if (layers.size() < 2 || layers.back() < 2 || parameters > 2e9) {
    raise(
        ErrorCode::InvalidArgument,
        "--layers '{}': widths from the inputs to the classes are wanted, as 784,1000,1000,10, of at most 2e9 weights",
        text);
  }
  return layers;
}

double positive(double value, const char* option) {
  if (!std::isfinite(value) || value <= 0 || value > 1e9)
    raise(ErrorCode::InvalidArgument, "{} {}: a number above 0 is wanted", option, value);
  return value;
}

WireFormat wire_format_of(const std::string& name) {
  std::vector<std::string_view> names;
  for (int i = 0; i < kWireFormatCount; ++i) {
    names.push_back(to_string(static_cast<WireFormat>(i)));
    if (names.back() == name) return static_cast<WireFormat>(i);
  }
  raise(ErrorCode::InvalidArgument, "--wire-format '{}': it is one of {}", name, fmt::join(names, ", "));
}

TraineeOptions trainee_of(const Options& options) {
  TraineeOptions trainee;
  trainee.layers = layers_of(options.layers);
  const double batch = positive(options.batch.value_or(trainee.batch), "--batch");
  if (batch != std::floor(batch) || batch > 1e6) raise(ErrorCode::InvalidArgument, "--batch {}: a whole number", batch);
  trainee.batch = static_cast<int>(batch);
  trainee.seconds = positive(options.seconds, "--seconds");
  trainee.wire_format = wire_format_of(options.wire_format);
  return trainee;
}

/// Checks before hours of measuring that the file can be written, without changing it.
void check_writable(const std::string& path, const char* option) {
  if (path.empty()) return;
  std::error_code error;
  const std::filesystem::file_status there = std::filesystem::status(path, error);
  if (std::filesystem::exists(there) && !std::filesystem::is_regular_file(there))
    raise(ErrorCode::Io, "{} {}: it is no file", option, path);
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (::access(folder.empty() ? "." : folder.c_str(), W_OK | X_OK) == 0) return;
  raise(ErrorCode::Io, "{} {}: it cannot be written: {} -- is its folder there?", option, path, errno_text(errno));
}

struct Experiment {
  std::string what;  ///< what is trained
  Workload workload;
  std::vector<std::vector<Point>> measured;  ///< by setup: a Point for each repetition so far
  std::string failure;                       ///< what ended the experiment early
};

/// Shows the plan for the one setup that was measured.
void show_plan(const Options& options, const Experiment& experiment, const JobRequest& request) {
  Point point = median_of(experiment.measured.front());
  if (point.steps <= 0) {
    raise(ErrorCode::InvalidArgument,
          "bench plan: the program takes no steps that are Cohort's (cohort.nn, cohort.horovod.torch, "
          "cohort::DistributedDataParallel), so where their time goes is not known");
  }
  launch::PlanFacts facts;
  facts.formats = measured_formats();
  facts.latency = latency_of(request, point);
  std::printf("%s", plan_text(point, facts).c_str());
  if (options.json.empty()) return;
  const auto line = [](const nlohmann::ordered_json& object) { return json_text(object) + '\n'; };
  std::string lines = line(to_json(point));
  for (const launch::Change& change : launch::changes_of(point, facts)) {
    lines += line({{"event", "change"}, {"text", change.what}, {"step_s", change.step}, {"wire_s", change.wire}});
  }
  const std::string advice = launch::advice_of(point, facts);
  lines += line({{"event", "verdict"}, {"text", advice.empty() ? launch::no_advice_of(point) : advice}});
  value_or_throw(sys::write_file_atomically(options.json, lines));
}

/// Shows table, bars, files and the verdict, or the failure in place of the verdict. Leaves out rows without
/// measurements; shows nothing without any row.
void show(const Options& options, const Experiment& experiment) {
  const std::string& failure = experiment.failure;
  const Workload& workload = experiment.workload;
  std::vector<Point> points;
  for (const auto& each : experiment.measured) {
    if (!each.empty()) points.push_back(median_of(each));
  }
  if (points.empty()) return;
  for (Point& point : points) {
    if (points.front().processes == 1) estimate_split(point, points.front(), workload.scaling);
  }
  const std::string verdict = failure.empty() ? verdict_of(points, workload) : std::string();
  std::printf("\n%s\n%s\n", table_of(points, workload).c_str(),
              bars_of(points, sys::text_style(STDOUT_FILENO)).c_str());
  if (!verdict.empty()) std::printf("%s\n", verdict.c_str());
  std::fflush(stdout);  // so that later errors come after this text
  if (!options.json.empty()) {
    std::string lines;
    for (const Point& point : points) lines += json_text(to_json(point)) + '\n';
    nlohmann::ordered_json last = {{"event", failure.empty() ? "verdict" : "failure"},
                                   {"text", failure.empty() ? verdict : failure}};
    lines += json_text(last) + '\n';
    value_or_throw(sys::write_file_atomically(options.json, lines));
  }
  if (!options.svg.empty())
    value_or_throw(sys::write_file_atomically(options.svg, svg_of(points, workload, experiment.what)));
}

void run(const Options& options) {
  Experiment experiment;
  Workload& workload = experiment.workload;
  std::string& what = experiment.what;
  Counting counting;
  JobRequest request;
  request.timeout = std::chrono::milliseconds(
      static_cast<std::int64_t>(1000 * std::min(positive(options.timeout, "--timeout"), 1e6)));
  if (options.program.empty()) {
    if (options.global_batch) {
      raise(ErrorCode::InvalidArgument, "--global-batch is of a command of yours; --batch is of each rank");
    }
    const TraineeOptions trainee = trainee_of(options);
    request.program = {"/proc/self/exe",  // the agent's executable, at any path on its host
                       "bench",          "trainee",
                       "--layers",       options.layers,
                       "--batch",        std::to_string(trainee.batch),
                       "--seconds",      fmt::format("{}", trainee.seconds),
                       "--wire-format",  options.wire_format};
    counting.per_rank = trainee.batch;
    workload.wire_format = trainee.wire_format;
    double parameters = 0;
    for (std::size_t i = 0; i + 1 < trainee.layers.size(); ++i) {
      parameters += 1.0 * trainee.layers[i] * trainee.layers[i + 1];
    }
    workload.parameters_bytes = parameters * sizeof(float);
    what = fmt::format("a network of {} ({} of gradients), {} samples for each rank and step", options.layers,
                       bytes_text(workload.parameters_bytes), trainee.batch);
  } else {
    if (options.batch && options.global_batch) {
      raise(ErrorCode::InvalidArgument, "--batch and --global-batch: samples are counted in one way only");
    }
    request.program = options.program;
    if (options.batch) counting.per_rank = positive(*options.batch, "--batch");
    if (options.global_batch) counting.per_step = positive(*options.global_batch, "--global-batch");
    what = fmt::format("{}", fmt::join(options.program, " "));
  }
  workload.scaling = counting.per_rank > 0   ? Scaling::PerRank
                     : counting.per_step > 0 ? Scaling::PerStep
                                             : Scaling::Unknown;
  workload.batch = counting.per_rank > 0 ? counting.per_rank : counting.per_step;
  workload.cores = sys::usable_cores();
  std::vector<Setup> setups = setups_of(options);
  if (options.plan) setups = {setups.back()};  // most processes on most hosts
  check_writable(options.json, "--json");
  check_writable(options.svg, "--svg");

  if (!options.quiet) std::printf("%s\n", what.c_str());
  experiment.measured.resize(setups.size());
  for (int repetition = 0; repetition < options.repetitions; ++repetition) {
    for (std::size_t i = 0; i < setups.size(); ++i) {  // in turn, so that a busy time affects all setups
      request.options = setups[i].options;
      request.options.insert(request.options.end(), {"--env", fmt::format("{}=1", env::kTimes)});
      request.processes = setups[i].processes;
      JobOutcome outcome;
      try {
        outcome = run_job(request);
      } catch (const Error& error) {
        experiment.failure = error.what();
        try {
          show(options, experiment);
        } catch (const Error& other) {
          std::fprintf(stderr, "cohort bench: %s\n", other.what());
        }
        if (error.code() != ErrorCode::Timeout) throw;
        raise(ErrorCode::Timeout, "{} -- give it longer (--timeout S, now {:g}){}", error.what(), options.timeout,
              options.program.empty() ? ", or less to do (smaller --layers)" : "");
      }
      workload.unit = unit_of(outcome, counting);
      experiment.measured[i].push_back(point_of(outcome, setups[i].processes, setups[i].hosts, counting));
      if (!options.quiet) {
        std::fprintf(stderr, "cohort bench: round %d of %d: %d x %d: %.1f %s/s\n", repetition + 1, options.repetitions,
                     setups[i].hosts, setups[i].processes, experiment.measured[i].back().rate, workload.unit.c_str());
      }
    }
  }
  if (options.plan) return show_plan(options, experiment, request);
  show(options, experiment);
}

/// Adds a command with the options common to `training` and `plan`: what to measure, and where.
CLI::App* add_measuring(CLI::App& bench, const std::shared_ptr<Options>& options, const char* name, const char* help) {
  CLI::App* command = bench.add_subcommand(name, help);
  command->add_option("--processes,--np", options->processes, "How many, altogether [1, 2, 4, ... as there are slots]")
      ->type_name("N,...");
  add_shared_options(*command, {"-H", "--hostfile", "--starter", "--ssh", "--remote-cohort", "--network"},
                     options->shared);
  command->add_option("--layers", options->layers, "Widths of the network, from inputs to classes")
      ->type_name("N,...")
      ->capture_default_str();
  command->add_option("--batch", options->batch, "Samples of each rank and step [100; of a command: not known]")
      ->type_name("N");
  command->add_option("--global-batch", options->global_batch, "Or of a step of all ranks together")->type_name("N");
  command->add_option("--seconds", options->seconds, "To train each time, after a warm-up; not of a command")
      ->type_name("S")
      ->capture_default_str();
  command
      ->add_option("--wire-format", options->wire_format, "As which gradients travel between hosts; not of a command")
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("--repetitions", options->repetitions, "Of everything, in turn; medians are shown")
      ->check(CLI::Range(1, 1000))
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--timeout", options->timeout, "Of one job, in seconds")->type_name("S")->capture_default_str();
  command->add_option("--json", options->json, "Write what was measured, a JSON object on a line each")
      ->type_name("FILE");
  return command;
}

}  // namespace

void add_training(CLI::App& bench) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      add_measuring(bench, options, "training", "Measure a training over processes and hosts, and say what it lacks");
  command->footer(kFooter);
  command->add_option("--hosts", options->hosts_counted, "On how many of the hosts [1, 2, 4, ... all]")
      ->type_name("N,...");
  command->add_option("--svg", options->svg, "Draw it")->type_name("FILE.svg");
  command->add_flag("-q,--quiet", options->quiet, "Print table, bars and verdict only");
  command->add_option("COMMAND", options->program, "After --: a training of yours, with its arguments")->type_name("");
  command->callback([options] { run(*options); });

  auto plan = std::make_shared<Options>();
  plan->plan = plan->quiet = true;
  plan->repetitions = 1;
  command = add_measuring(bench, plan, "plan", "Say what would make a step of a training shorter, before it is tried");
  command->footer(kPlanFooter);
  command->add_option("RUN", plan->program, "A run's folder, or after --: a training of yours, with its arguments")
      ->type_name("");
  command->callback([plan] {
    if (plan->program.size() == 1 && std::filesystem::is_directory(plan->program.front())) {
      std::printf("%s",
                  plan_text(value_or_throw(costs_of_run(plan->program.front())).costs, {.formats = measured_formats()})
                      .c_str());
      return;
    }
    const std::vector<int> processes =
        plan->processes.empty() ? std::vector<int>() : numbers_of(plan->processes, "--processes");
    if (processes.size() > 1)
      raise(ErrorCode::InvalidArgument, "bench plan --processes {}: one number is wanted", plan->processes);
    const std::size_t hosts = hosts_of(plan->shared.spec).hosts.size();
    if (hosts > 0) plan->hosts_counted = std::to_string(hosts);
    run(*plan);
  });

  auto trainee = std::make_shared<Options>();
  CLI::App* rank = bench.add_subcommand("trainee", "A rank of the training")->group("");
  rank->add_option("--layers", trainee->layers);
  rank->add_option("--batch", trainee->batch);
  rank->add_option("--seconds", trainee->seconds);
  rank->add_option("--wire-format", trainee->wire_format);
  rank->add_flag("--latency", trainee->latency);
  rank->callback([trainee] {
    Communicator world = init();
    if (trainee->latency) return tell_latency(world);
    train(world, trainee_of(*trainee));
  });
}

}  // namespace cohort::app::training
