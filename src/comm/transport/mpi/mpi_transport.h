// The transport over MPI: frames of operations are sent as the endpoint's packets. Failure detection, endings and the
// messages of send and recv stay on TCP connections (tcp/), because MPI does not report a peer that has died; so a lost
// rank is detected as quickly as with TCP. Frames that have to be authenticated also use TCP, since MPI does not
// authenticate. Frames up to 64 KiB are sent immediately, longer ones when the receiver has posted memory for them. All
// bytes are copied through the endpoint's memory. Any thread may call; handlers run under the mutex.
#pragma once

#include "comm/transport/mpi/endpoint.h"
#include "comm/transport/tcp/tcp_transport.h"
#include "comm/transport/transport.h"

#include <atomic>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace cohort::mpi {

class MpiTransport final : public transport::Transport, private transport::TransportEvents {
 public:
  struct Options {
    std::shared_ptr<Endpoint> endpoint;
    std::vector<int> processes;  ///< MPI's process numbers, by rank
    std::uint64_t world = 0;     ///< number of the world, the same on all its ranks and unique to it
  };
  MpiTransport(Options options, transport::tcp::TcpTransport::Options tcp, transport::tcp::Listeners listeners,
               transport::TransportEvents& events);
  ~MpiTransport() override;

  std::recursive_mutex& mutex() noexcept override { return tcp_.mutex(); }
  bool authenticates_all() const noexcept override { return false; }
  void connect(int peer) override { tcp_.connect(peer); }
  void send(transport::Outgoing& frame) override;
  void receive(transport::Incoming& frame) override;
  void message(int peer, std::uint32_t tag, std::string_view bytes) override;
  bool progress() override;
  void sleep(std::chrono::milliseconds longest) override;
  void wake() noexcept override;
  std::optional<std::string> lost(int peer) override;
  std::vector<int> connected() override { return tcp_.connected(); }
  std::vector<int> owing() override;
  void forget(std::uint64_t operation) override;
  void end(std::string_view bytes) override;
  bool flushed() override;
  void leave() override;

 private:
  using Lock = std::lock_guard<std::recursive_mutex>;
  /// A frame or protocol packet that is queued for sending.
  struct Item {
    PacketHead head;
    transport::Outgoing* frame = nullptr;  // for Whole and Piece
  };
  struct Kept {
    PacketHead head;
    std::vector<std::byte> bytes;
  };
  /// A long frame that is being received in pieces.
  struct Landing {
    transport::Incoming* frame = nullptr;
    std::uint64_t total = 0;
    std::uint64_t got = 0;
  };
  struct Peer {
    bool known = false;  // a connection exists or is being made
    std::deque<Item> queue;
    std::uint64_t sent = 0;                 // number of packets sent
    std::uint64_t handled = 0;              // number of the peer's packets handled
    std::map<std::uint64_t, Packet> ahead;  // packets received before their turn
    std::map<std::uint64_t, transport::Outgoing*> offered;
    std::uint64_t next_offer = 0;
    std::list<transport::Incoming*> posted;
    std::deque<Kept> kept;  // frames and offers received before they were posted
    std::map<std::uint64_t, Landing> landing;
    std::uint64_t asked = 0;      // the peer was asked to confirm that it has handled this many packets
    std::uint64_t confirmed = 0;  // number of packets that the peer has confirmed
    std::uint64_t to_confirm = 0;
  };

  Peer& open(int peer);
  void pump(int peer);
  bool pump_all();
  bool send_front(int peer, Peer& state);
  PacketHead head_of(PacketKind kind) const;
  void take_in(Packet packet);
  void handle(int peer, const PacketHead& head, const std::byte* payload, std::size_t bytes);
  void place(Peer& state, int peer, const PacketHead& head, transport::Incoming& frame, const std::byte* payload);
  transport::Incoming* posted(Peer& state, const PacketHead& head);
  void confirm(int peer, Peer& state);
  void break_off(int peer, std::string why);

  void on_message(int peer, std::uint32_t tag, std::string_view bytes) override;
  void on_ended(int peer, std::string_view bytes) override;
  void on_broken(int peer, std::string_view why) override;

  const std::shared_ptr<Endpoint> endpoint_;
  const std::vector<int> processes_;
  const std::uint64_t world_;
  const int rank_;
  transport::TransportEvents& events_;
  transport::tcp::TcpTransport tcp_;
  std::vector<Peer> peers_;
  std::map<int, std::string> broken_;  // peers that violated the protocol
  unsigned looks_ = 0;
  std::atomic<bool> woken_{false};
  std::atomic<bool> heard_{false};  // something was received over TCP
  bool ended_ = false;
  bool left_ = false;
};

}  // namespace cohort::mpi
