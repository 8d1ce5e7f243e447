// `cohort trace` shows, event by event, what ranks did in a run started with --trace.
#include "base/parse.h"
#include "base/result.h"
#include "observe/trace/merge.h"
#include "observe/trace/report.h"
#include "shared/program.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::app {
namespace {

namespace fs = std::filesystem;

struct MergeArguments {
  fs::path run, output;
  std::vector<std::string> others;
};

/// "3=trace.json" gives the rank of a trace that does not contain it.
track::ChromeTrace read_other(const std::string& word) {
  const auto equals = word.find('=');
  const auto rank = equals == std::string::npos ? std::nullopt : parse_integer<std::uint32_t>(word.substr(0, equals));
  track::ChromeTrace trace = track::read_chrome_trace(rank ? word.substr(equals + 1) : word);
  if (rank) trace.rank = *rank;
  return trace;
}

std::string summary_of(const track::MergeSummary& summary) {
  std::string text = fmt::format("{} events of {} ranks", summary.events, summary.ranks);
  for (const std::string& remark : summary.remarks) text += "; " + remark;
  return text;
}

void merge(const MergeArguments& arguments) {
  const track::TraceSet set = track::open_traces(arguments.run);
  std::vector<track::ChromeTrace> others;
  for (const std::string& word : arguments.others) others.push_back(read_other(word));
  fs::path output = arguments.output;
  if (output == "-") raise(ErrorCode::InvalidArgument, "-o -: a trace replaces a file as a whole: give its name");
  if (output.empty()) {
    if (!fs::is_directory(arguments.run))
      raise(ErrorCode::InvalidArgument, "{}: no folder of a run: give the output with -o", arguments.run.string());
    output = arguments.run / "trace.json";
  }
  const auto summary = track::merge_traces(set, others, output);
  fmt::print("{}: {}\n", output.string(), summary_of(summary));
}

}  // namespace

static void add_trace(CLI::App& app, int& /*exit_status*/) {
  CLI::App* trace = app.add_subcommand("trace", std::string(program_of("trace")->about));
  trace->require_subcommand(1);

  const auto arguments = std::make_shared<MergeArguments>();
  CLI::App* merging = trace->add_subcommand("merge", "One trace of all ranks, with other programs' traces beside them");
  merging->add_option("run", arguments->run, "Folder of a run, or one host's trace/host-N.json")->required();
  merging->add_option("other", arguments->others,
                      "Traces of torch's profiler (Kineto), or of Horovod's timeline; 3=FILE for one that does not say "
                      "that it is rank 3's");
  merging->add_option("-o,--output", arguments->output,
                      "The trace (default: trace.json in the run's folder); a folder gets a file of each rank");
  merging->callback([arguments] { merge(*arguments); });

  struct ReportArguments {
    fs::path run;
    bool json = false;
  };
  const auto wanted = std::make_shared<ReportArguments>();
  CLI::App* report =
      trace->add_subcommand("report", "Which rank is late, what communication costs, which operations take longest");
  report->add_option("run", wanted->run, "Folder of a run, or one host's trace/host-N.json")->required();
  report->add_flag("--json", wanted->json, "Everything, as JSON");
  report->callback([wanted] {
    const track::TraceReport made = track::make_report(track::open_traces(wanted->run));
    std::fputs((wanted->json ? track::to_json(made) : track::to_text(made)).c_str(), stdout);
  });
  trace->footer(
      "Examples: cohort run --trace -np 4 ./train\n"
      "          cohort trace report runs/latest\n"
      "          cohort trace merge runs/latest -o all.json profile-0.json profile-1.json");
}

}  // namespace cohort::app

int main(int argc, char** argv) { return cohort::app::program_main(argc, argv, {cohort::app::add_trace}); }
