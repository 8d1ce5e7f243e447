#include "host_options.h"

#include "base/env.h"
#include "base/result.h"
#include "net/interfaces.h"

#include <CLI/CLI.hpp>

#include <cctype>
#include <cstddef>
#include <cstdlib>
#include <utility>

namespace cohort::app {

void add_shared_options(CLI::App& command, std::initializer_list<std::string_view> names, SharedOptions& shared) {
  for (const std::string_view name : names) {
    const RunOption& option = *run_option(name);
    command
        .add_option_function<std::string>(
            std::string(name.starts_with("--") ? option.names : name),
            [&option, &shared](const std::string& value) {
              set_option(option, value, shared.choices);
              shared.given[option.name()] = value;
            },
            std::string(option.help))
        ->type_name(option.shown_type())
        ->default_str(std::string(option.standard))
        ->envname(option.variable());
  }
}

launch::HostChoice hosts_of(const RunChoices& choices) {
  if (choices.hosts.starter == launch::HostOptions::Starter::Hand)
    raise(ErrorCode::InvalidArgument, "--starter hand is for `cohort run` alone");
  return value_or_throw(launch::choose_hosts(choices.hosts, launch::Environment::current()));
}

launch::HostOptions::Starter starter_of(const std::string& name) {
  using Starter = launch::HostOptions::Starter;
  return name == "ssh"      ? Starter::Ssh
         : name == "slurm"  ? Starter::Slurm
         : name == "mpirun" ? Starter::Mpi
         : name == "hand"   ? Starter::Hand
         : name == "local"  ? Starter::Local
                            : Starter::Auto;
}

std::vector<std::string> words_of_command(const std::string& text) {
  std::vector<std::string> words;
  char quote = 0;
  bool within = false;  // a word, which may be empty: ''
  for (std::size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    const bool escapes = quote != '\'' && c == '\\' && at + 1 < text.size() &&
                         (quote == 0 || text[at + 1] == '"' || text[at + 1] == '\\');
    if (quote == 0 && std::isspace(static_cast<unsigned char>(c)) != 0) {
      within = false;
      continue;
    }
    if (!std::exchange(within, true)) words.emplace_back();
    if (escapes)
      words.back() += text[++at];
    else if (c == quote)
      quote = 0;
    else if (quote == 0 && (c == '\'' || c == '"'))
      quote = c;
    else
      words.back() += c;
  }
  if (quote != 0) raise(ErrorCode::InvalidArgument, "it ends within quotes ({})", quote);
  if (words.empty() || words.front().empty()) raise(ErrorCode::InvalidArgument, "a command is wanted");
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
