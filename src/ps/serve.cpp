#include <cohort/ps.h>
#include <cohort/role.h>

#include "base/env.h"
#include "base/result.h"
#include "meet/place.h"
#include "status/last_words.h"

#include <filesystem>
#include <thread>

namespace cohort::ps {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kLookForWorkers(50);
// What the process before has left (a child with its files) may be on its way out.
constexpr auto kLeftAfter = std::chrono::seconds(10);

std::unique_ptr<Server> start_again(const ServerOptions& options) {
  const auto limit = steady_clock::now() + kLeftAfter;
  for (;; std::this_thread::sleep_for(kLookForWorkers)) {
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
  if (!options.journal.empty()) {
    if (std::filesystem::is_directory(options.journal)) {
      options.journal = (std::filesystem::path(options.journal) / fmt::format("server-{}.journal", number)).string();
    } else if (num_servers() > 1) {
      raise(ErrorCode::InvalidArgument,
            "journal {}: there are {} servers, which need a file each -- name a folder that exists", options.journal,
            num_servers());
    }
  }
  status::show_lines_at_once();
  std::unique_ptr<Server> server;
  const auto listed = meet::listed_servers();
  if (auto earlier = meet::earlier_server_address()) {
    options.endpoint = *std::move(earlier);
    server = start_again(options);
  } else {
    if (options.endpoint.empty() && listed && static_cast<std::size_t>(number) < listed->size())
      options.endpoint = listed->at(static_cast<std::size_t>(number));
    server.reset(new Server(options, env::get(env::kStore).has_value()));
  }
  // Where neither is there (DMLC_ROLE alone), workers are told by their program.
  if (listed || env::get(env::kStore)) announce_server(server->endpoint());
  return server;
}

void serve(const ServerOptions& options) {
  const auto server = Server::of_job(options);
  while (!server->workers_gone()) std::this_thread::sleep_for(kLookForWorkers);
}

}  // namespace cohort::ps
