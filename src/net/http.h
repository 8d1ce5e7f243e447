// HTTP/1.1, the head of messages and a small server.
// The part of HTTP/1.1 that pages of our own need: the head of a GET or HEAD request. Text from strangers is read
// strictly: what two readers could see differently is refused. Pure; any thread.
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
  std::map<std::string, std::string> query;    ///< decoded; of a name that comes twice the first
  std::string host;                            ///< without port and brackets, in lower case; HTTP/1.0 may have none
  std::map<std::string, std::string> cookies;  ///< as the query
  std::string bearer;                          ///< of Authorization
  std::string accept;
};

struct HttpRefusal {
  int status = 400;
  std::string why;
};

/// "a%20b" as "a b"; nullopt for an escape that is none.
std::optional<std::string> percent_decoded(std::string_view text);
/// End of the head in `bytes`, which is behind an empty line; nullopt: it is not all there.
std::optional<std::size_t> head_end(std::string_view bytes) noexcept;
/// `head`: up to its end.
tl::expected<HttpRequest, HttpRefusal> parse_request(std::string_view head);
/// The better of two types for a client with this Accept header: by its weights; the first where it does not care.
std::size_t preferred_type(std::string_view accept, std::string_view first, std::string_view second);

struct HttpResponse {
  int status = 200;
  std::string type = "text/plain; charset=utf-8";
  std::string body;
  std::map<std::string, std::string> headers = {};  ///< besides those that all have
};
/// Writes it with headers that keep a browser from doing with it what nobody wants. The connection ends after it.
std::string to_bytes(const HttpResponse& response);

/// A text of others for a line of ours: without line ends and control characters (those of Unicode, too), and with
/// "..." for what is beyond `longest` bytes at the end, or with Kept::End at the beginning.
enum class Kept { Beginning, End };
std::string as_line(std::string_view text, std::size_t longest = 500, Kept kept = Kept::Beginning);

// A small server of pages (HTTP/1.1, GET and HEAD; an answer for each connection). It has a thread of its own, which
// calls the handler. Any client may be a stranger: how many there are at once, the size of a request and the time of
// each connection are bounded, which the library that we use elsewhere (cpp-httplib of Debian 12) does not promise;
// nothing but the request's head is read, and nobody without the token is answered.

/// Kind of clients, which is how they show the token.
enum class HttpClients {
  /// "Authorization: Bearer"; others get 401. Without a token: requests for a name of loopback, else 403.
  Machines,
  /// Likewise, or in a cookie, which the first visit with the token in its address ("/?token=") leaves; a client that
  /// does neither gets 403. With or without a token, names that are not this host's get 421.
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

/// Reads the token that lets a client in: the file's only line. Throws Io; InvalidArgument where others than its owner
/// and group may read the file, or the text can be guessed (fewer than 16 characters) or is none of a header's.
std::string read_token_file(const std::string& path);

}  // namespace cohort::net
