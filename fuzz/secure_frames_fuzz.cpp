// Frames of a peer that has been let in (by the kernel's word, so that no cipher hides them), in pieces of any size:
// exactly the messages that a plain reading gives, or an error.
#include "net/secure_connection.h"

#include <fuzzer/FuzzedDataProvider.h>
#include <sys/socket.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr std::size_t kLongest = 300;

// Complete messages, up to the first that is too long.
std::vector<std::string> plainly(std::string_view stream) {
  std::vector<std::string> messages;
  constexpr std::string_view kGreeting = "COHORT1\n";
  if (!stream.starts_with(kGreeting)) return messages;
  stream.remove_prefix(kGreeting.size());
  while (stream.size() >= 4) {
    std::uint32_t length = 0;
    std::memcpy(&length, stream.data(), sizeof length);
    if (length > kLongest || stream.size() - 4 < length) break;
    messages.emplace_back(stream.substr(4, length));
    stream.remove_prefix(4 + length);
  }
  return messages;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort;
  FuzzedDataProvider input(data, size);
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) return 0;
  const sys::UniqueFd peer(pair[1]);
  auto connection = net::SecureConnection::same_user(sys::UniqueFd(pair[0]), net::Role::Server,
                                                     {.purpose = "fuzz", .longest_message = kLongest});
  if (!connection) std::abort();
  std::string stream;
  std::vector<std::string> messages;
  if (input.ConsumeBool()) stream = "COHORT1\n";
  bool alive = true;
  std::size_t sent = 0;
  while (alive && (input.remaining_bytes() > 0 || sent < stream.size())) {
    stream += input.ConsumeRandomLengthString(400);
    if (::send(peer.get(), stream.data() + sent, stream.size() - sent, MSG_NOSIGNAL) !=
        static_cast<ssize_t>(stream.size() - sent)) {
      return 0;  // it fills no socket
    }
    sent = stream.size();
    alive = connection->advance().has_value();
    while (auto message = connection->next_message()) messages.push_back(*std::move(message));
  }
  const auto expected = plainly(std::string_view(stream).substr(0, sent));
  if (messages != expected) std::abort();
  return 0;
}
