// Serves the live page of a run: one HTML file, its figures, the logs of its ranks, to browsers that have the token,
// and to `cohort watch HOST:PORT`. A process of its own, which only reads files: whatever strangers send it, the run
// does not notice. The server's thread alone reads the files.
#pragma once

#include "net/address.h"
#include "net/http.h"
#include "net/secret.h"
#include "watch/source.h"

#include <string>

namespace cohort::watch {

class PageServer {
 public:
  /// Listens; throws as net::HttpServer. `files` outlives this, and is this one's.
  PageServer(RunFiles& files, const net::Address& at, const net::Secret& token);

  std::uint16_t port() const noexcept { return server_.address().port; }
  /// "http://127.0.0.1:4711/?token=..."
  std::string url() const;

 private:
  net::HttpResponse answer(const net::HttpRequest& request);
  static net::HttpResponse page();
  net::HttpResponse data(const net::HttpRequest& request);
  net::HttpResponse log(const net::HttpRequest& request);

  RunFiles& files_;
  net::Secret token_;
  std::string last_data_;  ///< of all ranks, or of hosts where they are many
  net::Deadline poll_again_{};
  net::HttpServer server_;  ///< last: its thread uses the others
};

}  // namespace cohort::watch
