// What `cohort run` and the commands that start jobs besides it have in common: on which hosts, how they are reached,
// over which networks. Their options are those of the table (run_options.h). One thread.
#pragma once

#include "run_options.h"

#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace CLI {
class App;
}

namespace cohort::app {

/// Options of `cohort run` that another command has, too.
struct SharedOptions {
  RunChoices choices;
  std::map<std::string, std::string> given = {};  ///< by name: for a `cohort run` that it starts
};
/// With their variables; a short name in place of a long one leaves the others out. `shared` has to live as long.
void add_shared_options(CLI::App& command, std::initializer_list<std::string_view> names, SharedOptions& shared);

/// The hosts that they say, for commands that cannot wait for agents which somebody starts by hand.
launch::HostChoice hosts_of(const RunChoices& choices);

launch::HostOptions::Starter starter_of(const std::string& name);

/// The words of a command (--ssh, --evaluator), divided as a shell does it: at blanks, but for what is in '', in "" or
/// behind a backslash. Nothing is expanded. Refuses (InvalidArgument) an empty one, and one that ends within quotes.
std::vector<std::string> words_of_command(const std::string& text);

/// For this process and all that it starts: COHORT_NETWORK. Refuses (InvalidArgument) what is no list of networks, or
/// fits none of this host's addresses, and names the interfaces that there are. Nothing if `networks` is empty.
void narrow_networks(const std::string& networks);

}  // namespace cohort::app
