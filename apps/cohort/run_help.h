// What `cohort run --help` and --help-all show around the options, and how they break lines.
#pragma once

namespace CLI {
class App;
}

namespace cohort::app {

void set_run_help(CLI::App& command);

}  // namespace cohort::app
