// As much of HTTP/1.1 as pages of our own and their readers need: the head of a GET or HEAD request, the head of a
// response. What a stranger sends is read strictly: what two readers could see differently is refused. Pure; any
// thread.
#pragma once

#include "base/result.h"

#include <cstddef>
#include <map>
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

/// Where the head in `bytes` ends, which is behind an empty line; nullopt: it is not all there.
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
/// With the headers that keep a browser from doing with it what nobody wants. The connection ends after it.
std::string to_bytes(const HttpResponse& response);

/// Of another server: the status and where the body begins. Corrupt for what is no such head.
struct HttpHead {
  int status = 0;
  std::size_t body = 0;
};
Result<HttpHead> parse_response_head(std::string_view bytes);
/// What a server has answered, for a line of ours: without control characters, and not long.
std::string as_line(std::string_view answer);

}  // namespace cohort::net
