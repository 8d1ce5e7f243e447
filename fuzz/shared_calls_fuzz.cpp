// Shared memory of calls in any state that the other end may leave: a server accepts no call, and a client no answer,
// outside its blocks.
#include "net/shared_calls.h"

#include <cstdlib>
#include <cstring>

using namespace cohort;
using namespace cohort::net;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const sys::UniqueFd descriptor = [] {
    auto server = value_or_throw(SharedCallsServer::make());
    return server.take_descriptor();
  }();
  auto mapping = value_or_throw(sys::map_shared_segment(descriptor.get(), kSharedBytes));
  auto* const memory = static_cast<char*>(mapping.data());
  const auto client = value_or_throw(SharedCallsClient::map(descriptor));
  const auto asked = client->begin(1, std::string_view(reinterpret_cast<const char*>(data), size), 1000);
  constexpr std::size_t kMagic = 8;
  if (size > 0) std::memcpy(memory + kMagic, data, std::min(size, kSharedBlock - kMagic));
  if (asked && client->state(*asked) != SharedCallsClient::State::UnderWay) {
    if (const auto answer = client->answer(*asked)) {
      if (answer->size() > kSharedBytes) std::abort();
      std::size_t sum = 0;
      for (const char byte : *answer) sum += static_cast<unsigned char>(byte);
      if (sum == ~std::size_t{0}) std::abort();
    }
    client->free(*asked);
  }
  SharedCallsServer server(sys::SharedSegment{{}, std::move(mapping)});
  for (int i = 0; i < 200; ++i) {
    const auto call = server.next();
    if (!call || !*call) break;
    if ((*call)->id.block() >= kSharedBlocks || (*call)->body.size() > kSharedBytes) std::abort();
    if (i % 3 == 0)
      (void)server.answer((*call)->id, "head", size, [&](char* rows) {
        if (size > 0) std::memcpy(rows, data, size);
      });
    if (i % 3 == 1) server.answer_elsewhere((*call)->id);
  }
  std::memset(memory + kMagic, 0, kSharedBlock - kMagic);
  return 0;
}
