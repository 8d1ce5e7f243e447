// Heads of HTTP requests, as strangers send them to a port that is served: each is a request that names something, or
// is refused; and the type that an answer gets is one of the two that there are.
#include "net/http_server.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::net;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto request = parse_http_request(text)) {
    if (request->method.empty() || !request->path.starts_with('/')) std::abort();
    for (const auto& [name, value] : request->headers) {
      // Nothing that is put into an answer or a log could begin another line.
      if (name.empty() || value.find('\n') != std::string::npos || value.find('\r') != std::string::npos) std::abort();
    }
    if (preferred_type(request->header("accept"), "text/plain", "application/openmetrics-text") > 1) std::abort();
  }
  if (preferred_type(text, "text/plain", "application/openmetrics-text") > 1) std::abort();
  return 0;
}
