// `cohort export` writes a checkpoint as a file of weights, or sends a run's record to services that show runs.

#include "base/env.h"
#include "base/result.h"
#include "base/signals.h"
#include "observe/export/export.h"
#include "observe/export/prometheus.h"
#include "shared/destination.h"
#include "shared/program.h"
#include "telemetry/record.h"
#include "train/formats/weights.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::app {
namespace {

struct ExportArguments {
  formats::ExportOptions options;
  bool everything = false;
  std::string torch = "2";
  std::string destination;
  bool follow = false;
  track::SinkOptions sink;
};

void export_weights(ExportArguments& arguments) {
  formats::ExportOptions& options = arguments.options;
  if (options.to.empty()) {
    raise(ErrorCode::InvalidArgument,
          "TO is required: a *.pt, *.pth, *.pth.tar or *.safetensors, or --to for the record of a run");
  }
  if (arguments.everything) options.content = formats::ExportContent::Everything;
  if (arguments.torch == "1.13") options.floats = formats::PtFloats::Tensor;
  const formats::ExportSummary summary = value_or_throw(formats::export_weights(options));
  fmt::print("{}: {} tensors, {} bytes of weights, from {}\n", options.to, summary.tensors, summary.bytes,
             summary.from);
}

/// Time in which a command that was told to end may still talk to a server.
constexpr auto kHurry = std::chrono::seconds(2);

/// Waits for the signals that end a command; true once one has come. A thread waits for them, too, so that a server
/// that does not answer cannot hold the command. The thread then ends it after a moment, with the status of a failure
/// and `last_words`.
class Patience {
 public:
  explicit Patience(std::string last_words) : last_words_(std::move(last_words)) {
    watcher_ = std::thread([this] { watch(); });
  }
  ~Patience() {
    over_.set_value();
    watcher_.join();
  }
  Patience(const Patience&) = delete;
  Patience& operator=(const Patience&) = delete;

  bool wait(std::chrono::milliseconds time) { return is_set(signalled_, time); }

 private:
  static bool is_set(const std::future<void>& event, std::chrono::milliseconds time) {
    return event.wait_for(time) == std::future_status::ready;
  }

  void watch() {
    pollfd waiting{signals_.fd(), POLLIN, 0};
    constexpr auto kLook = std::chrono::milliseconds(50);
    while (::poll(&waiting, 1, static_cast<int>(kLook.count())) <= 0 || !signals_.next()) {
      if (is_set(ended_, {})) return;
    }
    told_.set_value();
    if (last_words_.empty() || is_set(ended_, kHurry)) return;
    fmt::print(stderr, "cohort: {}\n", last_words_);
    std::_Exit(1);  // the state file beside the record says what has been sent
  }

  sys::SignalFd signals_ = value_or_throw(sys::SignalFd::create({SIGINT, SIGTERM, SIGHUP}));
  std::string last_words_;
  std::promise<void> told_, over_;
  std::future<void> signalled_ = told_.get_future(), ended_ = over_.get_future();
  std::thread watcher_;
};

/// True if the destination is a port, which is useful only while a run is followed.
bool serves(const std::string& destination) {
  constexpr std::string_view kKind = "prometheus:";
  return destination.starts_with(kKind) && track::port_of(std::string_view(destination).substr(kKind.size()));
}

/// Lowers this process's priority: following a run leaves most of the time to its ranks. The scheduler may divide time
/// among groups of processes (autogroup), so the share of this group is made small, too.
void give_way() {
  // At a lower priority, importing a client beside busy ranks would take minutes.
  (void)::setpriority(PRIO_PROCESS, 0, 10);
  if (::getsid(0) != ::getpid()) return;
  std::ofstream("/proc/self/autogroup") << "10";
}

void export_run(ExportArguments& arguments) {
  if (!arguments.options.to.empty()) {
    raise(ErrorCode::InvalidArgument, "'{}' and --to {}: give one", arguments.options.to, arguments.destination);
  }
  track::check_destination(arguments.destination, !arguments.sink.token_file.empty());
  const bool by_client = arguments.destination.starts_with("mlflow") || arguments.destination.starts_with("wandb") ||
                         arguments.destination.starts_with("tensorboard");
  const std::string& from = arguments.options.from;
  track::ExportRequest request;
  track::SinkOptions sink_options = arguments.sink;
  std::optional<Patience> patience;
  arguments.follow = arguments.follow || serves(arguments.destination);
  std::signal(SIGPIPE, SIG_IGN);  // a server may close the connection, and TLS sockets raise SIGPIPE then
  if (arguments.follow) {
    give_way();
    patience.emplace(by_client ? fmt::format("not all of {} is there: cohort export {} --to {} goes on", from, from,
                                             arguments.destination)
                               : std::string());
    request.wait = [&patience](std::chrono::milliseconds time) { return patience->wait(time); };
    sink_options.patience = std::chrono::hours(24 * 15);
  }
  request.record = track::record_of(from, arguments.follow ? track::Absent::Later : track::Absent::Error);
  sink_options.record = request.record;
  sink_options.say = [](const std::string& text) { fmt::print(stderr, "cohort: {}\n", text); };
  const auto sink = track::make_sink(arguments.destination, sink_options);
  request.sink = sink.get();
  if (arguments.follow && arguments.destination == "kubeflow")
    request.may_be_absent = true;  // not asked for by the user
  const track::ExportSummary summary = track::export_record(request);
  fmt::print(
      "{}: {} events from {}{}{}\n", arguments.destination, summary.events, request.record.string(),
      summary.superseded == 0 ? "" : fmt::format(", without {} of steps that were done again", summary.superseded),
      summary.damaged == 0 ? "" : fmt::format("; {} damaged lines were left out", summary.damaged));
  for (const auto& [event, lines] : summary.unknown) {
    fmt::print(
        stderr,
        "cohort: of the event '{1}' {0} line{2} left out: values are in lines of the events step, epoch and metric "
        "(cohort.track.log, track::Metrics)\n",
        lines, event, lines == 1 ? " was" : "s were");
  }
  if (summary.without_end) {
    fmt::print(stderr, "cohort: the record has no `end` line and no job.json beside it: the run is taken for killed\n");
  }
}

}  // namespace

static void add_export(CLI::App& app, int&) {
  auto arguments = std::make_shared<ExportArguments>();
  CLI::App* command = app.add_subcommand("export", std::string(program_of("export")->about));
  command
      ->add_option("FROM", arguments->options.from,
                   "A checkpoint, a folder of them (its newest), a .safetensors or a .pt; with --to a run's folder, or "
                   "its run.jsonl")
      ->required();
  command->add_option("TO", arguments->options.to, "The file to write: *.pt, *.pth, *.pth.tar or *.safetensors");
  command->add_option("--key", arguments->options.key,
                      "FROM is a .pt: the key under which the weights are, e.g. model or a/b");
  command->add_flag(
      "--everything", arguments->everything,
      "Not the weights alone: {\"model\", \"optimizer\", \"step\", \"epoch\", \"sampler\", ...} (.pt only)");
  command->add_option("--torch", arguments->torch, "Oldest torch that is to load it: 1.13 gets floats as tensors")
      ->check(CLI::IsMember({"1.13", "2"}))
      ->capture_default_str();
  command->add_option(
      "--to", arguments->destination,
      "Where the run's record goes: tensorboard:DIR, csv:FILE, prometheus:FILE, prometheus:[HOST]:PORT, "
      "mlflow:URI[?experiment=NAME], wandb:PROJECT[?entity=NAME&run=ID] or kubeflow");
  command->add_flag("--follow", arguments->follow, "With --to: go on until the run has ended");
  command->add_flag("--openmetrics", arguments->sink.openmetrics,
                    "prometheus:FILE: OpenMetrics 1.0 instead of the text format 0.0.4");
  command
      ->add_option("--token-file", arguments->sink.token_file,
                   "prometheus:HOST:PORT: clients have to show this file's line as their bearer token")
      ->envname(std::string(env::kMetricsTokenFile));
  command->footer(
      "Examples: cohort export checkpoints model.pt\n"
      "          cohort export checkpoints training.pt --everything\n"
      "          cohort export training.pt model.safetensors --key model\n"
      "          cohort export runs/latest --to tensorboard:tb --follow");
  command->callback([arguments] {
    if (!arguments->destination.empty()) return export_run(*arguments);
    if (arguments->follow || arguments->sink.openmetrics) {
      raise(ErrorCode::InvalidArgument, "--follow and --openmetrics are for the record of a run: --to is missing");
    }
    export_weights(*arguments);
  });
}

}  // namespace cohort::app

int main(int argc, char** argv) { return cohort::app::program_main(argc, argv, {cohort::app::add_export}); }
