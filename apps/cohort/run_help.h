// What `cohort run --help` shows around its options, and in which parts it shows them.
#pragma once

namespace CLI {
class App;
}

namespace cohort::app {

/// Once all options are added: each of them has to be in a part.
void set_run_help(CLI::App& command);

}  // namespace cohort::app
