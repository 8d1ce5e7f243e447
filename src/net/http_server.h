// A small server of pages (HTTP/1.1, GET and HEAD; an answer for each connection). It has a thread of its own, which
// calls the handler. Whoever may connect is a stranger: how many there are at once, the size of a request and the time
// of each connection are bounded, which the library that we use elsewhere (cpp-httplib of Debian 12) does not promise;
// nothing but the request's head is read, and nobody without the token is answered.
#pragma once

#include "net/address.h"
#include "net/http.h"

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

namespace cohort::net {

/// Who asks, which is how they show the token.
enum class HttpClients {
  /// "Authorization: Bearer"; who does not gets 401. Without a token: whoever asks for a name of loopback, else 403.
  Machines,
  /// Likewise, or in a cookie, which the first visit leaves that has the token in its address ("/?token="); who does
  /// not gets 403. Whatever they show, names that are not this host's get 421.
  Browsers,
};

struct HttpServerOptions {
  Address at;         ///< port 0: the system chooses
  std::string token;  ///< empty: on loopback alone, everyone there
  HttpClients clients = HttpClients::Machines;
  std::function<HttpResponse(const HttpRequest&)> handler;
  std::size_t most_connections = 64;
  std::chrono::milliseconds request_time = std::chrono::seconds(5);  ///< for a request to come
  std::chrono::milliseconds answer_time = std::chrono::seconds(20);  ///< for its answer to go
};

class HttpServer {
 public:
  /// Listens. Throws InvalidArgument for an address that is not loopback without a token; Unavailable where the place
  /// is taken.
  explicit HttpServer(HttpServerOptions options);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  const Address& address() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// What lets a client in: the file's only line. Throws Io; InvalidArgument where others than its owner and group may
/// read the file, or the text can be guessed (fewer than 16 characters) or is none of a header's.
std::string read_token_file(const std::string& path);

}  // namespace cohort::net
