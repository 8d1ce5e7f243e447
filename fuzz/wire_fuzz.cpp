// Input from ranks on other hosts: their addresses, the purpose of a connection, and its frames.
#include "comm/shm/rendezvous.h"
#include "comm/transport/mpi/endpoint.h"
#include "comm/transport/tcp/link.h"
#include "net/interfaces.h"
#include "rendezvous/identity.h"

#include <sys/socket.h>

#include <cstdlib>
#include <vector>

namespace {

struct Nobody final : cohort::transport::TransportEvents {
  void on_message(int, std::uint32_t, std::string_view) override {}
  void on_ended(int, std::string_view) override {}
  void on_broken(int, std::string_view) override {}
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort;
  using namespace cohort::transport;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  if (const auto info = tcp::decode_peer_info(bytes)) {
    if (tcp::encode(*info) != bytes) std::abort();
  }
  if (const auto values = comm::local::decode_values(bytes)) {
    if (comm::local::encode_values(*values) != bytes) std::abort();
    if (value_or_throw(comm::local::unpack_values(comm::local::pack_values(*values))) != *values) std::abort();
  }
  (void)comm::local::unpack_values(bytes);
  if (const auto hello = tcp::decode_hello(bytes); hello && tcp::encode(*hello) != bytes) std::abort();
  if (const auto decision = tcp::decode_decision(bytes); decision && tcp::encode(*decision) != bytes) std::abort();
  if (const auto head = mpi::read_head(reinterpret_cast<const std::byte*>(data), size, 4)) {
    if (head->from < 0 || head->from >= 4 || head->offset > head->total) std::abort();
  }
  (void)net::parse_networks(bytes);
  (void)rendezvous::divide_into_hosts(bytes, 4);

  // If every frame has a tag, nothing is delivered from a peer that does not know the key.
  for (const tcp::Protection protection : {tcp::Protection::Least, tcp::Protection::Authenticated}) {
    int pair[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) return 0;
    sys::UniqueFd peer(pair[1]);
    std::vector<std::byte> room(100);
    Incoming posted;
    posted.peer = 1;
    posted.operation = 5;
    posted.to = room.data();
    posted.room = room.size();
    Nobody nobody;
    tcp::Link link(1, 0, std::chrono::seconds(3), "h");
    link.up(sys::UniqueFd(pair[0]), tcp::Link::Guard::of_tags(tcp::Bytes32{}, true, protection));
    link.receive(posted);
    if (::send(peer.get(), data, size, MSG_NOSIGNAL) < 0) return 0;
    while (link.read(nobody)) continue;
    if (posted.done && (posted.bytes > posted.room || protection != tcp::Protection::Least)) std::abort();
    link.end();
    while (link.read(nobody)) continue;
  }
  return 0;
}
