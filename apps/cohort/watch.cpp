// `cohort watch`: a run that goes on, or has ended, in the terminal or on a page.
#include "base/result.h"
#include "commands.h"
#include "watch/run_files.h"
#include "watch/terminal.h"

#include <chrono>
#include <memory>
#include <string>

namespace cohort::app {

void add_watch(CLI::App& app, int& exit_status) {
  struct Arguments {
    std::string run;
    double interval = 5;
    watch::WatchOptions options;
  };
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand("watch", "Show how a run goes on: each rank's steps, speed, waiting, last line");
  command->add_option("RUN", arguments->run, "Folder of a run [the newest in ./runs]");
  command->add_flag("--once", arguments->options.once, "Print how it is now, as text, and end");
  command->add_flag("--ascii", arguments->options.ascii, "No character beyond ASCII");
  command->add_option("--interval", arguments->interval, "Seconds between two lines where there is no terminal")
      ->check(CLI::Range(0.1, 86400.0))
      ->capture_default_str();
  command->callback([arguments, &exit_status] {
    arguments->options.interval = std::chrono::milliseconds(static_cast<std::int64_t>(arguments->interval * 1000));
    watch::RunFiles run(watch::find_run(arguments->run));
    exit_status = watch::watch(run, arguments->options);
  });
}

}  // namespace cohort::app
