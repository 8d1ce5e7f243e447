#include <cohort/ps.h>
#include <cohort/role.h>

#include "base/env.h"
#include "base/log.h"
#include "base/result.h"
#include "meet/servers.h"
#include "status/last_words.h"

#include <filesystem>
#include <system_error>
#include <thread>

namespace cohort::ps {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kLook(50);
// What the process before has left (a child with its files) may be on its way out.
constexpr auto kLeftAfter = std::chrono::seconds(10);

/// What a job before has left is none of this one's: workers and servers have other clocks and places.
void set_aside(const std::string& journal) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(journal, error) || std::filesystem::file_size(journal, error) == 0) return;
  const std::string aside = journal + ".earlier";
  std::filesystem::rename(journal, aside, error);
  if (error)
    raise(ErrorCode::Io, "journal {} is of an earlier job, and cannot be renamed to {}: {}", journal, aside,
          error.message());
  log::warn("ps", "journal {} is of an earlier job: it is {} now, and the tables begin anew", journal, aside);
}

std::unique_ptr<Server> start_again(const ServerOptions& options) {
  const auto limit = steady_clock::now() + kLeftAfter;
  for (;; std::this_thread::sleep_for(kLook)) {
    try {
      return std::make_unique<Server>(options);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::Unavailable || steady_clock::now() > limit) throw;
    }
  }
}

}  // namespace

std::unique_ptr<Server> Server::of_job(ServerOptions options) {
  if (role() != Role::Server) {
    raise(ErrorCode::InvalidArgument, "serve: this process is no server but a {} -- see `cohort run --servers`",
          to_string(role()));
  }
  const int number = role_number();
  if (!options.journal.empty() && std::filesystem::is_directory(options.journal))
    options.journal = (std::filesystem::path(options.journal) / fmt::format("server-{}.journal", number)).string();
  status::show_lines_at_once();
  std::unique_ptr<Server> server;
  const auto listed = meet::listed_servers();
  if (auto earlier = meet::earlier_server_address()) {
    options.endpoint = *std::move(earlier);
    server = start_again(options);
  } else {
    if (options.endpoint.empty() && listed && static_cast<std::size_t>(number) < listed->size())
      options.endpoint = listed->at(static_cast<std::size_t>(number));
    if (env::get(env::kStore) && !options.journal.empty()) set_aside(options.journal);
    server = std::make_unique<Server>(options);
  }
  // Where neither is there (DMLC_ROLE alone), workers are told by their program.
  if (listed || env::get(env::kStore)) announce_server(server->endpoint());
  return server;
}

void serve(const ServerOptions& options) {
  const auto server = Server::of_job(options);
  while (!server->workers_gone()) std::this_thread::sleep_for(kLook);
}

}  // namespace cohort::ps
