// Messages between a store's server and client. A message that decodes has to encode to the same bytes again.
#include "net/served_store.h"

#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::store;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  if (!bytes.empty()) {
    const std::string_view body = bytes.substr(1);
    if (const auto request = decode_request(data[0], body); request && encode(*request) != body) std::abort();
  }
  // (An error's text ends at its first NUL.)
  if (const auto reply = decode_reply(bytes); reply && !reply->error && encode(*reply) != bytes) std::abort();
  return 0;
}
