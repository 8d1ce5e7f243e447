// A small server of pages that machines fetch (HTTP/1.1, GET and HEAD; an answer for each connection). It has a thread
// of its own, which calls the handler. Whoever may connect is a stranger: how many there are at once, the size of a
// request and the time of each connection are bounded, which the library that we use elsewhere (cpp-httplib of
// Debian 12) does not promise; nothing but the request's head is read, and nobody without the token is answered.
#pragma once

#include "base/result.h"
#include "net/address.h"

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>

namespace cohort::net {

struct HttpRequest {
  std::string method;
  std::string path;                            ///< without the query
  std::map<std::string, std::string> headers;  ///< names in lower case; of several with one name the last
  /// Empty if it has none.
  std::string header(const std::string& lower_case_name) const;
};

/// Of a whole head, with the empty line at its end. Fails with Corrupt. Pure.
Result<HttpRequest> parse_http_request(std::string_view head);

struct HttpAnswer {
  int status = 200;
  std::string type = "text/plain; charset=utf-8";
  std::string body;
};

/// The better of two types for a client with this Accept header: by its weights; the first where it does not care.
std::size_t preferred_type(std::string_view accept, std::string_view first, std::string_view second);

struct HttpServerOptions {
  Address at;         ///< port 0: the system chooses
  std::string token;  ///< who shows it ("Authorization: Bearer") is answered; empty: on loopback alone, everyone there
  std::function<HttpAnswer(const HttpRequest&)> handler;
  std::size_t most_connections = 32;                             ///< more are closed at once
  std::size_t longest_head = 8192;                               ///< bytes of a request
  std::chrono::milliseconds patience = std::chrono::seconds(5);  ///< for a request to come, and for its answer to go
};

class HttpServer {
 public:
  /// Listens. Throws InvalidArgument for an address that is not loopback without a token, or a token that can be
  /// guessed; Unavailable where the place is taken.
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
