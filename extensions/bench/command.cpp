// `cohort bench` measures how fast the collectives are on this machine, and how fast they could be. The same program
// runs `cohort doctor --run`.
#include "bench/collective.h"
#include "bench/machine.h"
#include "bench/measure.h"
#include "bench/training/training.h"
#include "bench/trial.h"
#include "shared/program.h"

#include "base/files.h"
#include "base/hardware.h"
#include "base/result.h"

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>

namespace cohort::app {
namespace {

struct BenchOptions {
  bench::Words words;
  bool as_rank = false, threads = false, in_place = false, out_of_place = false, check = true, quiet = false;
  int iterations = 0, warm_up = 5, root = 0;
  double timeout = 60;
  std::string json, plot;
};

constexpr const char* kBenchFooter =
    R"(Collectives: all_reduce (the default), reduce, broadcast, all_gather, all_gather_v, gather, scatter, reduce_scatter,
reduce_scatter_v, all_to_all, all_to_all_v, send_recv (there and back between two ranks: half of it), sendrecv (round a ring,
both ways at once), barrier, all.
Examples:
  cohort bench                                    all_reduce of float32 on all cores, 8 bytes to 64 MiB
  cohort bench all -np 2,4 --sizes 64K,16M        every collective, two sizes, two worlds
  cohort bench -np 2 --memory both --state touched --plot times.svg
  cohort run -np 4 cohort bench --sizes 1M        in a world that is there already
  cohort bench --device cuda -np 2 -e 1G          memory of GPUs
Times are microseconds, bandwidths 10^9 bytes per second; algbw and busbw are what nccl-tests call so. #wrong counts elements
of one call that differ from what they have to be; the exit status is 1 if there are any. `of bound` compares with what this
machine could do at best, measured in the same run. docs/reference/bench.md explains every column. `cohort bench training --help`: a training over processes and hosts.)";

/// Receives the events of rank 0: prints, keeps, and writes them.
class Report {
 public:
  Report(const BenchOptions& options, nlohmann::json machine)
      : options_(options), machine_(std::move(machine)), table_(stdout) {
    if (!options.json.empty()) {
      json_.open(options.json, std::ios::trunc);
      if (!json_) raise(ErrorCode::Io, "--json {}: it cannot be written -- is its folder there?", options.json);
    }
    write(machine_);
    if (!options_.quiet) table_.header(machine_);
    const double busy = machine_.at("busy_cores_before");
    if (busy > bench::kIdleCores) {
      std::fprintf(stderr, "cohort bench: WARNING: the machine is not idle: %.2f cores were busy before the start\n",
                   busy);
    }
  }

  void take(const nlohmann::json& event, const std::string& kind) {
    write(event);
    if (event.at("event") == "world") {
      if (!options_.quiet) table_.world(event, kind, machine_.at("cores"));
      return;
    }
    const bench::Row row = bench::row_from(event);
    if (!options_.quiet) table_.row(row);
    for (const auto* side : {&row.out_of_place, &row.in_place})
      wrong_ += *side ? std::max<std::int64_t>((*side)->wrong, 0) : 0;
    rows_.push_back(row);
  }

  /// Prints the end; returns the number of wrong elements.
  std::int64_t finish(const bench::CpuTime& begin, double own) {
    const bench::CpuTime end = bench::cpu_time();
    const double seconds = std::max(1e-3, std::chrono::duration<double>(end.at - begin.at).count());
    const double others = std::max(0.0, (end.busy - begin.busy - own) / seconds);
    const double stolen = (end.stolen - begin.stolen) / seconds;
    write({{"event", "footer"}, {"other_cores", others}, {"stolen_cores", stolen}, {"wrong", wrong_}});
    if (!options_.quiet) table_.footer(others, stolen);
    if (others + stolen > bench::kIdleCores) {
      std::fprintf(stderr,
                   "cohort bench: WARNING: the machine was not idle: others used %.2f cores, %.2f were stolen\n",
                   others, stolen);
    }
    if (!options_.json.empty()) {
      json_.close();
      if (!json_) raise(ErrorCode::Io, "--json {}: not all of it could be written; is the disk full?", options_.json);
    }
    if (!options_.plot.empty()) {
      value_or_throw(sys::write_file_atomically(options_.plot, bench::draw(rows_, machine_)));
    }
    return wrong_;
  }

 private:
  void write(const nlohmann::json& event) {
    if (json_.is_open()) json_ << event.dump() << std::endl;  // written at once, so that a killed run has its rows
  }

  const BenchOptions& options_;
  nlohmann::json machine_;
  bench::Table table_;
  std::ofstream json_;
  std::vector<bench::Row> rows_;
  std::int64_t wrong_ = 0;
};

bench::Plan plan_of(const BenchOptions& options) {
  bench::Plan plan = value_or_throw(bench::plan_of(options.words));
  if (!std::isfinite(options.timeout) || options.timeout <= 0 || options.timeout > 1e6) {
    raise(ErrorCode::InvalidArgument, "--timeout {}: a number of seconds above 0 is wanted", options.timeout);
  }
  plan.in_place = options.in_place || !options.out_of_place;
  plan.out_of_place = options.out_of_place || !options.in_place;
  plan.check = options.check;
  plan.iterations = options.iterations;
  plan.warm_up = options.warm_up;
  plan.root = options.root;
  plan.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(options.timeout * 1000)));
  return plan;
}

void run_bench(const BenchOptions& options, int& exit_status) {
  const bench::Plan plan = plan_of(options);
  if (options.as_rank) return bench::be_rank(plan);
  const std::vector<int> worlds = options.words.ranks.empty() ? std::vector<int>{sys::usable_cores()}
                                                              : value_or_throw(bench::parse_ranks(options.words.ranks));
  std::optional<Report> report;
  const auto start_report = [&] { report.emplace(options, bench::describe_machine()); };
  const bench::CpuTime begin = bench::cpu_time();
  const double own = bench::own_cpu_seconds();

  if (bench::inside_a_job()) {
    if (!options.words.ranks.empty() || options.threads) {
      raise(
          ErrorCode::InvalidArgument,
          "-np and --threads start ranks, but this process is a rank of a job already -- leave them out, or start the "
          "command outside of the job");
    }
    // Only rank 0 gets events.
    bench::run_in_job(plan, [&](const nlohmann::json& event) {
      if (!report) start_report();
      report->take(event, "ranks of the job");
    });
  } else {
    for (const int ranks : worlds) bench::check_root(plan, ranks);
    if (plan.memories.front() == bench::MemoryKind::Cuda) bench::check_gpus();  // reported once, not by each rank
    start_report();
    for (const int ranks : worlds) {
      const std::string kind = options.threads ? "threads" : ranks == 1 ? "process" : "processes";
      const bench::Emit emit = [&](const nlohmann::json& event) { report->take(event, kind); };
      options.threads ? bench::run_on_threads(ranks, plan, emit) : bench::run_on_processes(ranks, emit);
    }
  }
  if (!report) return;
  const std::int64_t wrong = report->finish(begin, bench::own_cpu_seconds() - own);
  if (wrong > 0) {
    exit_status = 1;
    std::fprintf(stderr, "cohort bench: %lld elements were wrong\n", static_cast<long long>(wrong));
  }
}

}  // namespace

static void add_bench(CLI::App& app, int& exit_status) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand("bench", std::string(program_of("bench")->about));
  command->footer(kBenchFooter);
  bench::Words& words = options->words;
  command->add_option("COLLECTIVES", words.collectives, "What to measure [all_reduce]")->type_name("");
  command->add_flag(bench::kAsRank, options->as_rank)->group("");
  command->add_option("--np,--nproc", words.ranks, "Ranks (also -np N), or a list: 2,4,8 [one per usable core]")
      ->type_name("N,...");
  command->add_flag("--threads", options->threads, "Ranks are threads of one process");
  command->add_option("-b,--min", words.least, "Smallest size in bytes, with K, M or G if you like")
      ->type_name("SIZE")
      ->capture_default_str();
  command->add_option("-e,--max", words.most, "Largest size")->type_name("SIZE")->capture_default_str();
  command->add_option("-f,--factor", words.factor, "From one size to the next")->type_name("F")->capture_default_str();
  command->add_option("--sizes", words.sizes, "These sizes instead")->type_name("SIZE,...");
  command->add_option("-d,--types", words.dtypes, "Types as float32,bfloat16, or all")
      ->type_name("TYPE,...")
      ->capture_default_str();
  command->add_option("-o,--ops", words.ops, "Reductions as sum,max, or all")
      ->type_name("OP,...")
      ->capture_default_str();
  command->add_option("--root", options->root, "Root of rooted collectives")->type_name("RANK")->capture_default_str();
  command->add_option("-n,--iterations", options->iterations, "Timed calls [0.2 s of them, 20 to 2000]")
      ->type_name("N")
      ->check(CLI::Range(1, 10000000));
  command->add_option("-w,--warm-up", options->warm_up, "Calls before")
      ->type_name("N")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  command->add_flag("--in-place", options->in_place, "Only in place, where both ways exist");
  command->add_flag("--out-of-place", options->out_of_place, "Only out of place, where both ways exist");
  command->add_option("--memory", words.memory, "arena (the communicator's), heap or both")
      ->type_name("KIND")
      ->capture_default_str();
  command->add_option("--device", words.device, "cpu, or cuda: memory of GPUs, for each rank cuda:LOCAL_RANK")
      ->type_name("DEVICE")
      ->capture_default_str();
  command->add_option("--gpu-sums", words.gpu_sums, "With --device cuda: fast or exact [COHORT_GPU_SUMS]")
      ->type_name("HOW");
  command->add_option("--state", words.state, "Buffers before a call: hot, touched (rewritten by their owner), cold")
      ->type_name("STATE")
      ->capture_default_str();
  command->add_flag("-c,--check,!--no-check", options->check, "Compare one result of each row in full [on]");
  command->add_option("--timeout", options->timeout, "Of one operation, in seconds")
      ->type_name("S")
      ->capture_default_str();
  command->add_option("--json", options->json, "Write a header and every row, a JSON object on a line each")
      ->type_name("FILE");
  command->add_option("--plot", options->plot, "Draw times and bandwidths")->type_name("FILE.svg");
  command->add_flag("-q,--quiet", options->quiet, "Print warnings and errors only");
  training::add_training(*command);
  trial::add_trial(*command);
  command->callback([options, command, &exit_status] {
    if (command->get_subcommands().empty()) run_bench(*options, exit_status);
  });
}

}  // namespace cohort::app

int main(int argc, char** argv) {
  const auto prepare = [](std::vector<std::string>& words) {
    // MPI users write -np, which CLI11 would read as -n p.
    for (std::string& word : words) {
      if (word == "--") break;  // a command's own
      if (word == "-np" || word == "-nproc" || word.starts_with("-np=")) word = "-" + word;
    }
  };
  return cohort::app::program_main(argc, argv, {cohort::app::add_bench, cohort::app::trial::add_doctor_run}, prepare);
}
