// Heads of HTTP requests, as strangers send them to a port that is served: each is a request that names something, or
// is refused; and the type that an answer gets is one of the two that there are.
#include "net/http.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::net;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (preferred_type(text, "text/plain", "application/openmetrics-text") > 1) std::abort();
  const auto request = parse_request(text.substr(0, head_end(text).value_or(size)));
  if (!request) {
    if (request.error().status < 400 || request.error().why.empty()) std::abort();
    return 0;
  }
  if (request->method.empty() || !request->path.starts_with('/')) std::abort();
  if (preferred_type(request->accept, "text/plain", "application/openmetrics-text") > 1) std::abort();
  // Nothing that is put into an answer or a log could begin another line.
  for (const std::string* part : {&request->host, &request->bearer, &request->accept}) {
    if (part->find_first_of("\r\n") != std::string::npos) std::abort();
  }
  return 0;
}
