// `cohort ctl` sends orders to an elastic job that runs here.
#include "base/result.h"
#include "cohort/commands.h"
#include "launch/supervise/control.h"

#include <fmt/core.h>

#include <memory>
#include <string>

namespace cohort::app {

void add_ctl(CLI::App& app, int&) {
  struct Arguments {
    std::string run, action, host;
  };
  const auto given = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand("ctl", "Add hosts to an elastic job that runs, and take them away");
  command->add_option("RUN", given->run, "The run's folder, as runs/latest")->required();
  command
      ->add_option(
          "ACTION", given->action,
          "add: start ranks on HOST, or use it again; drain: its ranks leave at the end of a step, and nothing "
          "is redone; remove: they are killed")
      ->type_name("add|drain|remove");
  command->add_option("HOST", given->host, "As the job names it; to be added: HOST[:SLOTS], 1 slot unless said");
  command->footer("Examples: cohort ctl runs/latest add h4:8\n          cohort ctl runs/latest drain h2");
  command->callback([given] {
    const bool known = given->action == "add" || given->action == "drain" || given->action == "remove";
    if (!known || given->host.empty()) {
      raise(ErrorCode::InvalidArgument, "cohort ctl {}{}: {} -- `cohort ctl {} add HOST`, drain HOST or remove HOST",
            given->run, given->action.empty() ? "" : " " + given->action,
            given->action.empty() ? "what is it to do?"
            : known               ? "which host?"
                                  : "there is no such action",
            given->run);
    }
    const std::string order = given->action + " " + given->host;
    value_or_throw(launch::parse_order(order));
    const auto done = launch::ask_job(given->run, order);
    if (!done) raise(done.error().code(), "cohort ctl {}: {}", order, done.error().what());
    fmt::print("{}\n", *done);
  });
}

}  // namespace cohort::app
