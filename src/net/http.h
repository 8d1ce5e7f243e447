// The part of HTTP/1.1 that Cohort's own pages need: a parser for the head of GET and HEAD requests, and a small
// server. Requests are parsed strictly, so a head that two parsers could read differently is refused. The parsing
// functions are pure; any thread.
#pragma once

#include "base/result.h"
#include "net/address.h"

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace cohort::net {

inline constexpr std::size_t kLongestHead = 8 << 10;

struct HttpRequest {
  std::string method;                          ///< GET or HEAD
  std::string path;                            ///< "/data"
  std::map<std::string, std::string> query;    ///< decoded; the first value of a repeated name
  std::string host;                            ///< without port and brackets, in lower case; may be empty in HTTP/1.0
  std::map<std::string, std::string> cookies;  ///< the first value of a repeated name
  std::string bearer;                          ///< the token of an Authorization header
  std::string accept;
};

struct HttpRefusal {
  int status = 400;
  std::string why;
};

/// Decodes "a%20b" to "a b". Returns nullopt for an invalid escape.
std::optional<std::string> percent_decoded(std::string_view text);
/// Returns the position after the empty line that ends the head; nullopt if `bytes` does not hold the whole head.
std::optional<std::size_t> head_end(std::string_view bytes) noexcept;
/// Parses `head`, which ends at `head_end`.
tl::expected<HttpRequest, HttpRefusal> parse_request(std::string_view head);
/// Returns which type the Accept header weights higher: 0 for `first`, 1 for `second`; 0 if equal.
std::size_t preferred_type(std::string_view accept, std::string_view first, std::string_view second);

struct HttpResponse {
  int status = 200;
  std::string type = "text/plain; charset=utf-8";
  std::string body;
  std::map<std::string, std::string> headers = {};  ///< in addition to those of every response
};
/// Serializes the response with headers that restrict what a browser does with it; the connection ends afterwards.
std::string to_bytes(const HttpResponse& response);

/// Makes foreign text safe for one line of output: removes line ends and control characters (Unicode's too). If the
/// text is longer than `longest` bytes, "..." replaces its end, or with Kept::End its beginning.
enum class Kept { Beginning, End };
std::string as_line(std::string_view text, std::size_t longest = 500, Kept kept = Kept::Beginning);

// A small server of pages (HTTP/1.1, GET and HEAD; one response per connection). Its own thread calls the handler.
// Clients are not trusted: the number of connections, the size of a request and the time of each connection are
// bounded; the library used elsewhere (cpp-httplib of Debian 12) does not promise that. The server reads only the
// request's head, and serves no client without the token.

/// Kind of clients, which determines how they present the token.
enum class HttpClients {
  /// The token is in "Authorization: Bearer"; other requests get 401. Without a token, requests have to name a loopback
  /// host; others get 403.
  Machines,
  /// The token is in that header, or in a cookie that a first visit to "/?token=" sets; other requests get 403.
  /// Requests for a name that is not this host's get 421, with or without a token.
  Browsers,
};

struct HttpServerOptions {
  Address at;         ///< port 0 lets the system choose one
  std::string token;  ///< if empty, every client is served; allowed only on loopback
  HttpClients clients = HttpClients::Machines;
  std::function<HttpResponse(const HttpRequest&)> handler;
  std::size_t most_connections = 64;
  std::chrono::milliseconds request_time = std::chrono::seconds(5);  ///< limit for receiving a request
  std::chrono::milliseconds answer_time = std::chrono::seconds(20);  ///< limit for sending its response
};

class HttpServer {
 public:
  /// Listens. Throws InvalidArgument if there is no token and the address is not loopback, Unavailable if the address
  /// is in use.
  explicit HttpServer(HttpServerOptions options);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  const Address& address() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Reads the clients' token: the file's only line. Throws Io; throws InvalidArgument if users other than the owner and
/// group may read the file, or the token is too short (fewer than 16 characters) or not valid in a header.
std::string read_token_file(const std::string& path);

}  // namespace cohort::net
