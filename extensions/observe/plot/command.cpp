// `cohort plot` draws the curves of one or several runs from their records.
#include "base/files.h"
#include "base/result.h"
#include "base/terminal.h"
#include "observe/plot/curves.h"
#include "shared/program.h"
#include "telemetry/record.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <unistd.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::app {
namespace {

namespace fs = std::filesystem;

struct PlotArguments {
  std::vector<fs::path> runs;
  fs::path output;
  std::optional<track::Over> over;
};

/// Names the run by its folder, following the link "latest".
std::string name_of(const fs::path& run) {
  std::error_code unknown;
  fs::path real = fs::canonical(run, unknown);
  if (unknown) real = fs::absolute(run, unknown).lexically_normal();
  if (real.filename() == "run.jsonl") real = real.parent_path();
  return real.filename().string();
}

std::vector<track::NamedRun> read(const std::vector<fs::path>& runs) {
  std::vector<track::NamedRun> read;
  for (const fs::path& run : runs) {
    read.push_back({name_of(run), track::series_of(track::read_run(track::record_of(run)))});
  }
  std::map<std::string, int> names;
  for (const auto& run : read) ++names[run.name];
  for (std::size_t i = 0; i < read.size(); ++i) {
    if (names[read[i].name] > 1) read[i].name = runs[i].string();
  }
  return read;
}

void plot(const PlotArguments& arguments) {
  const bool several = arguments.runs.size() > 1;
  fs::path picture = arguments.output;
  if (picture.empty()) {
    picture = several ? fs::path("compare.svg") : track::record_of(arguments.runs[0]).parent_path() / "curves.svg";
  }
  const std::vector<track::NamedRun> runs = read(arguments.runs);
  const track::Figure figure =
      several ? track::compare(runs, arguments.over) : track::figure_of(runs[0].run, arguments.over);
  value_or_throw(sys::write_file_atomically(picture.string(), track::render_svg(figure)));
  fmt::print("{}{}\n", track::end_values(runs, sys::text_style(STDOUT_FILENO), arguments.over), picture.string());
}

}  // namespace

static void add_plot(CLI::App& app, int& /*exit_status*/) {
  const auto arguments = std::make_shared<PlotArguments>();
  CLI::App* command = app.add_subcommand("plot", std::string(program_of("plot")->about));
  command->add_option("RUN", arguments->runs, "folders of runs, or their run.jsonl [the newest in ./runs]");
  command->add_option("-o,--output", arguments->output,
                      "the picture [curves.svg beside the record; of several runs compare.svg]");
  command
      ->add_option("--over", arguments->over,
                   "what the curves stand over: epoch, step, or time, that of pauses left out [epoch, or step]")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, track::Over>{
              {"epoch", track::Over::Epoch}, {"step", track::Over::Step}, {"time", track::Over::Time}},
          CLI::ignore_case));
  command->callback([arguments] {
    if (arguments->runs.empty()) arguments->runs.push_back(newest_run("plot"));
    plot(*arguments);
  });
}

}  // namespace cohort::app

int main(int argc, char** argv) { return cohort::app::program_main(argc, argv, {cohort::app::add_plot}); }
