// As much of HTTP/1.1 as a page of our own and its reader need: the head of a GET request, the head of a response.
// What a stranger sends is read strictly: what two readers could see differently is refused. Pure; any thread.
#pragma once

#include "base/result.h"

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace cohort::watch {

inline constexpr std::size_t kLongestHead = 8 << 10;

struct HttpRequest {
  std::string path;                            ///< "/data"
  std::map<std::string, std::string> query;    ///< decoded; of a name that comes twice the first
  std::string host;                            ///< the Host header, without its port, in lower case
  std::map<std::string, std::string> cookies;  ///< likewise
  std::string bearer;                          ///< of Authorization
};

struct HttpRefusal {
  int status = 400;
  std::string why;
};

/// Whether the whole head is in `bytes`; where it ends.
std::optional<std::size_t> head_end(std::string_view bytes) noexcept;
/// `head`: with the empty line that ends it.
tl::expected<HttpRequest, HttpRefusal> parse_request(std::string_view head);

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

}  // namespace cohort::watch
