#include "net/secret.h"
#include "commands.h"

#include <fmt/core.h>

#include <memory>

namespace cohort::app {

void add_secret(CLI::App& app, int&) {
  auto path = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("secret", "Make a secret for jobs that `cohort run` does not start");
  command->add_option("FILE", *path, "New file of mode 0600; give it to all ranks as COHORT_SECRET_FILE")->required();
  command->callback([path] {
    value_or_throw(net::write_new_secret_file(*path));
    fmt::print("{}: a new secret, readable by you alone; start every rank with COHORT_SECRET_FILE={}\n", *path, *path);
  });
}

}  // namespace cohort::app
