// What `cohort run` and `cohort doctor` have in common: on which hosts, how they are reached, over which networks.
#pragma once

#include "launch/start/hosts.h"
#include "launch/start/starter.h"

#include <string>
#include <vector>

namespace cohort::app {

launch::HostWishes::Starter starter_of(const std::string& name);

/// The words of --ssh, divided as a shell does it: at blanks, but for what is in '', in "" or behind a backslash.
/// Nothing is expanded. Refuses (InvalidArgument) an empty one, and one that ends within quotes.
std::vector<std::string> ssh_command(const std::string& text);

/// For this process and all that it starts: COHORT_NETWORK. Refuses (InvalidArgument) what is no list of networks, or
/// fits none of this host's addresses, and names the interfaces that there are. Nothing if `networks` is empty.
void narrow_networks(const std::string& networks);

}  // namespace cohort::app
