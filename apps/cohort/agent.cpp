#include "launch/agent.h"

#include "commands.h"

#include <memory>

namespace cohort::app {

void add_agent(CLI::App& app, int& exit_status) {
  struct Options {
    std::string connect;
    launch::AgentOptions agent;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("agent", "Internal: started by `cohort run` on every host")->group("");
  command->add_option("--connect", options->connect)->required();
  command->add_option("--secret-fd", options->agent.secret_fd)->required();
  command->add_option("--host-index", options->agent.host_index)->required();
  command->callback([options, &exit_status] {
    options->agent.supervisor.tcp = value_or_throw(net::parse_address(options->connect));
    exit_status = launch::run_agent(options->agent);
  });
}

}  // namespace cohort::app
