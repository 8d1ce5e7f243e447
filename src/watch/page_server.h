// Serves the live page of a run: one HTML file, its figures, the logs of its ranks, to browsers that have the token,
// and to `cohort watch HOST:PORT`. A process of its own, which only reads files: whatever strangers send it, the run
// does not notice. Bounded: connections, the head of a request, the time for it, the time for the answer. One thread.
#pragma once

#include "launch/loop.h"
#include "net/secret.h"
#include "sys/unique_fd.h"
#include "watch/http.h"
#include "watch/run_files.h"

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

namespace cohort::watch {

struct PageOptions {
  std::string address = "127.0.0.1";
  std::uint16_t port = 0;  ///< 0: any
  net::Secret token;
};

class PageServer {
 public:
  static constexpr std::size_t kMostConnections = 64;

  /// Listens. Throws Unavailable where that cannot be. `files` outlives this.
  PageServer(launch::Loop& loop, RunFiles& files, PageOptions options);
  ~PageServer();
  PageServer(const PageServer&) = delete;
  PageServer& operator=(const PageServer&) = delete;

  std::uint16_t port() const noexcept { return port_; }
  /// "http://127.0.0.1:4711/?token=..."
  std::string url() const;
  HttpResponse answer(const HttpRequest& request);

 private:
  struct Connection;
  void on_stranger();
  void on_readable(Connection& connection);
  void on_writable(Connection& connection);
  void respond(Connection& connection, const HttpResponse& response);
  void drop(Connection& connection);
  bool admitted(const HttpRequest& request) const;
  bool is_ours(const std::string& host) const;
  HttpResponse page() const;
  HttpResponse data(const HttpRequest& request);
  HttpResponse log(const HttpRequest& request);

  launch::Loop& loop_;
  RunFiles& files_;
  PageOptions options_;
  std::uint16_t port_ = 0;
  std::vector<std::string> names_;  ///< by which browsers may have found it
  sys::UniqueFd listener_;
  launch::Watch watch_;
  launch::Timer again_;
  std::list<Connection> connections_;
  std::string last_data_;  ///< of all ranks, or of hosts where they are many
  launch::Timer polled_;
};

}  // namespace cohort::watch
