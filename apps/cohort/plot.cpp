// `cohort plot`: the curves of a run, drawn from its record.
#include "commands.h"

#include <cohort/track.h>

#include "base/result.h"

#include <fmt/format.h>

#include <filesystem>
#include <memory>

namespace cohort::app {

void add_plot(CLI::App& app, int& /*exit_status*/) {
  struct Arguments {
    std::filesystem::path run, output;
  };
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* plot = app.add_subcommand("plot", "Draw the loss and accuracy of a run as an SVG picture");
  plot->add_option("run", arguments->run, "folder of a run, or its run.jsonl")->required();
  plot->add_option("-o,--output", arguments->output, "the picture (default: curves.svg beside the record)");
  plot->callback([arguments] {
    namespace fs = std::filesystem;
    const fs::path record = fs::is_directory(arguments->run) ? arguments->run / "run.jsonl" : arguments->run;
    const fs::path picture = arguments->output.empty() ? record.parent_path() / "curves.svg" : arguments->output;
    // A folder of a run whose program has made no record.
    if (record != arguments->run && !fs::exists(record) && fs::exists(arguments->run / "job.json")) {
      raise(ErrorCode::Unavailable,
            "{} has no run.jsonl -- the program of this run writes no run record, which is what is drawn: a "
            "cohort::track::RunRecord does ({}/logs has what it printed)",
            arguments->run.string(), arguments->run.string());
    }
    track::plot(record, picture);
    fmt::print("{}\n", picture.string());
  });
}

}  // namespace cohort::app
