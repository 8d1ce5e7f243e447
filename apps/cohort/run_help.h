// What `cohort run --help` shows around its options, and how it breaks their lines.
#pragma once

namespace CLI {
class App;
}

namespace cohort::app {

void set_run_help(CLI::App& command);

}  // namespace cohort::app
