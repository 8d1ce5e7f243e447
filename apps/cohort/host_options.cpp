#include "host_options.h"

#include "base/env.h"
#include "base/result.h"
#include "net/interfaces.h"

#include <cstdlib>
#include <sstream>
#include <utility>

namespace cohort::app {

launch::HostWishes::Starter starter_of(const std::string& name) {
  using Starter = launch::HostWishes::Starter;
  return name == "ssh"      ? Starter::Ssh
         : name == "slurm"  ? Starter::Slurm
         : name == "mpirun" ? Starter::Mpi
         : name == "hand"   ? Starter::Hand
         : name == "local"  ? Starter::Local
                            : Starter::Auto;
}

std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  std::istringstream stream(text);
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

void narrow_networks(const std::string& networks) {
  if (networks.empty()) return;
  const auto filters = net::parse_networks(networks);
  auto all = value_or_throw(net::interface_addresses());
  std::string there;
  for (const net::InterfaceAddress& address : all) {
    if (!address.loopback)
      there += fmt::format("{}{} ({})", there.empty() ? "" : ", ", address.text, address.interface);
  }
  if (there.empty()) there = "none";
  if (!filters || filters->empty()) {
    raise(ErrorCode::InvalidArgument,
          "--network {}: names of interfaces are wanted, or networks as 10.0.0.0/8 -- this host has {}", networks,
          there);
  }
  if (!net::choose(std::move(all), *filters)) {
    raise(ErrorCode::InvalidArgument, "--network {}: it fits no address of this host, which has {}", networks, there);
  }
  // All that reads it does so from the environment, here and on other hosts.
  if (::setenv(std::string(env::kNetwork).c_str(), networks.c_str(), 1) != 0)
    raise(ErrorCode::Unavailable, "setenv: {}", errno_text(errno));
}

}  // namespace cohort::app
