// `cohort plot`: the curves of a run, drawn from its record.
#include "commands.h"

#include <cohort/track.h>

#include "track/record_reader.h"

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
    const fs::path record = track::record_of(arguments->run);
    const fs::path picture = arguments->output.empty() ? record.parent_path() / "curves.svg" : arguments->output;
    track::plot(record, picture);
    fmt::print("{}\n", picture.string());
  });
}

}  // namespace cohort::app
