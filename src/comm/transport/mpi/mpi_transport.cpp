#include "comm/transport/mpi/mpi_transport.h"

#include "base/records.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <thread>
#include <utility>

namespace cohort::mpi {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// Messages of this transport over the TCP connections.
constexpr std::uint32_t kAsk = 0xFFFFFFF0;        // asks the peer to confirm that it has handled this many packets
constexpr std::uint32_t kConfirmed = 0xFFFFFFF1;  // the confirmation
constexpr int kWindow = 12;                       // most packets in transit to a peer
constexpr unsigned kLooks = 16;                   // calls of progress between checks of the TCP connections
constexpr auto kFirstNap = 20us;
constexpr auto kLongestNap = 1ms;

std::string counted(std::uint64_t count) {
  codec::Writer out;
  return out.number(count).take();
}

}  // namespace

MpiTransport::MpiTransport(Options options, transport::tcp::TcpTransport::Options tcp,
                           transport::tcp::Listeners listeners, transport::TransportEvents& events)
    : endpoint_(std::move(options.endpoint)),
      processes_(std::move(options.processes)),
      world_(options.world),
      rank_(tcp.rank),
      events_(events),
      tcp_(std::move(tcp), std::move(listeners), *this),
      peers_(processes_.size()) {
  endpoint_->enlist(world_);
}

MpiTransport::~MpiTransport() { endpoint_->retire(world_); }

MpiTransport::Peer& MpiTransport::open(int peer) {
  Peer& state = peers_[static_cast<std::size_t>(peer)];
  if (!state.known) tcp_.connect(peer);  // the loss of the peer is noticed only over a connection
  state.known = true;
  return state;
}

PacketHead MpiTransport::head_of(PacketKind kind) const {
  PacketHead head;
  head.kind = kind;
  head.world = world_;
  head.from = rank_;
  return head;
}

// --- sending ---

void MpiTransport::send(transport::Outgoing& frame) {
  const Lock lock(mutex());
  if (frame.authenticated) return tcp_.send(frame);
  if (ended_) {
    frame.done.store(true, std::memory_order_release);
    return;
  }
  Peer& state = open(frame.peer);
  if (lost(frame.peer)) return;
  Item item;
  item.head = head_of(frame.bytes <= kMostWhole ? PacketKind::Whole : PacketKind::Offer);
  item.head.tag = frame.tag;
  item.head.operation = frame.operation;
  item.head.total = frame.bytes;
  if (item.head.kind == PacketKind::Whole) {
    item.frame = &frame;
  } else {
    item.head.id = state.next_offer++;
    state.offered.emplace(item.head.id, &frame);
  }
  state.queue.push_back(item);
  pump(frame.peer);
}

/// Makes the next packet and passes it to the endpoint. Returns false if it cannot be sent now.
bool MpiTransport::send_front(int peer, Peer& state) {
  const int process = processes_[static_cast<std::size_t>(peer)];
  Item& item = state.queue.front();
  std::size_t bytes = 0;
  if (item.frame != nullptr) bytes = std::min<std::size_t>(item.frame->bytes - item.head.offset, kMostPayload);
  Packet packet;
  packet.bytes = endpoint_->buffer();
  packet.count = sizeof(PacketHead) + bytes;
  item.head.number = state.sent;
  std::memcpy(packet.bytes.get(), &item.head, sizeof item.head);
  if (bytes > 0) std::memcpy(packet.bytes.get() + sizeof item.head, item.frame->data + item.head.offset, bytes);
  if (!endpoint_->send(world_, process, packet)) {
    packet.count = kMostPacket;
    endpoint_->give_back(std::move(packet));
    return false;
  }
  ++state.sent;
  item.head.offset += bytes;
  if (item.frame == nullptr || item.head.offset >= item.frame->bytes) {
    if (item.frame != nullptr) item.frame->done.store(true, std::memory_order_release);
    state.queue.pop_front();
  }
  return true;
}

void MpiTransport::pump(int peer) {
  Peer& state = peers_[static_cast<std::size_t>(peer)];
  if (state.queue.empty()) return;
  int room = kWindow - endpoint_->under_way(world_, processes_[static_cast<std::size_t>(peer)]);
  while (room-- > 0 && !state.queue.empty() && send_front(peer, state)) {
  }
}

bool MpiTransport::pump_all() {
  bool any = false;
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    if (peers_[peer].queue.empty()) continue;
    const std::uint64_t before = peers_[peer].sent;
    pump(static_cast<int>(peer));
    any = any || peers_[peer].sent != before;
  }
  return any;
}

void MpiTransport::message(int peer, std::uint32_t tag, std::string_view bytes) {
  const Lock lock(mutex());
  tcp_.message(peer, tag, bytes);
}

// --- receiving ---

transport::Incoming* MpiTransport::posted(Peer& state, const PacketHead& head) {
  for (auto each = state.posted.begin(); each != state.posted.end(); ++each) {
    transport::Incoming* const frame = *each;
    if (frame->operation != head.operation || frame->tag != head.tag) continue;
    state.posted.erase(each);
    return frame;
  }
  return nullptr;
}

void MpiTransport::receive(transport::Incoming& frame) {
  const Lock lock(mutex());
  if (frame.authenticated) return tcp_.receive(frame);
  if (ended_) return;
  Peer& state = open(frame.peer);
  const auto kept = std::find_if(state.kept.begin(), state.kept.end(), [&](const Kept& each) {
    return each.head.operation == frame.operation && each.head.tag == frame.tag;
  });
  if (kept == state.kept.end()) {
    state.posted.push_back(&frame);
    return;
  }
  const Kept found = std::move(*kept);
  state.kept.erase(kept);
  place(state, frame.peer, found.head, frame, found.bytes.data());
}

/// Handles a frame, or the offer of a frame, that has been posted as `frame`.
void MpiTransport::place(Peer& state, int peer, const PacketHead& head, transport::Incoming& frame,
                         const std::byte* payload) {
  if (head.total > frame.room)
    return break_off(peer, fmt::format("it sent {} bytes where {} were expected", head.total, frame.room));
  frame.bytes = head.total;
  if (head.kind == PacketKind::Whole) {
    if (head.total > 0) std::memcpy(frame.to, payload, head.total);
    frame.done.store(true, std::memory_order_release);
    return;
  }
  state.landing[head.id] = {&frame, head.total, 0};
  Item grant;
  grant.head = head_of(PacketKind::Grant);
  grant.head.id = head.id;
  state.queue.push_front(grant);  // a packet describes itself, so a grant may go between the pieces of a frame
  pump(peer);
}

/// Takes a received packet. MPI may complete packets in any order; each peer's are handled in the order of sending.
void MpiTransport::take_in(Packet packet) {
  const auto head = read_head(packet.bytes.get(), packet.count, static_cast<int>(peers_.size()));
  if (!head) return;  // the endpoint has checked the head; only a rank outside of this world fails here
  const int peer = head->from;
  Peer& state = peers_[static_cast<std::size_t>(peer)];
  state.ahead.emplace(head->number, std::move(packet));
  bool any = false;
  for (auto next = state.ahead.begin(); next != state.ahead.end() && next->first == state.handled;
       next = state.ahead.begin()) {
    Packet now = std::move(next->second);
    state.ahead.erase(next);
    ++state.handled;
    any = true;
    const auto known = read_head(now.bytes.get(), now.count, static_cast<int>(peers_.size()));
    handle(peer, *known, now.bytes.get() + sizeof(PacketHead), now.count - sizeof(PacketHead));
    endpoint_->give_back(std::move(now));
  }
  if (any) confirm(peer, state);
}

void MpiTransport::handle(int peer, const PacketHead& head, const std::byte* payload, std::size_t bytes) {
  if (ended_) return;
  Peer& state = peers_[static_cast<std::size_t>(peer)];
  switch (head.kind) {
    case PacketKind::Whole:
    case PacketKind::Offer:
      if (transport::Incoming* const frame = posted(state, head)) return place(state, peer, head, *frame, payload);
      state.kept.push_back({head, std::vector<std::byte>(payload, payload + bytes)});
      return;
    case PacketKind::Grant: {
      const auto found = state.offered.find(head.id);
      if (found == state.offered.end()) return break_off(peer, "it asked for a frame that was not offered");
      Item item;
      item.head = head_of(PacketKind::Piece);
      item.head.id = head.id;
      item.head.total = found->second->bytes;
      item.frame = found->second;
      state.offered.erase(found);
      state.queue.push_back(item);
      return pump(peer);
    }
    case PacketKind::Piece: {
      const auto found = state.landing.find(head.id);
      if (found == state.landing.end()) return break_off(peer, "it sent a piece of a frame that was not asked for");
      Landing& landing = found->second;
      if (head.total != landing.total || head.offset != landing.got)
        return break_off(peer, "it sent pieces that do not fit together");
      std::memcpy(landing.frame->to + head.offset, payload, bytes);
      landing.got += bytes;
      if (landing.got < landing.total) return;
      landing.frame->done.store(true, std::memory_order_release);
      state.landing.erase(found);
      return;
    }
  }
}

void MpiTransport::break_off(int peer, std::string why) {
  const auto [entry, is_new] = broken_.emplace(peer, std::move(why));
  endpoint_->note_failure();
  if (is_new) events_.on_broken(peer, entry->second);
}

void MpiTransport::confirm(int peer, Peer& state) {
  if (state.to_confirm == 0 || state.handled < state.to_confirm) return;
  tcp_.message(peer, kConfirmed, counted(std::exchange(state.to_confirm, 0)));
}

// --- events from TCP ---

void MpiTransport::on_message(int peer, std::uint32_t tag, std::string_view bytes) {
  heard_.store(true);
  if (tag != kAsk && tag != kConfirmed) return events_.on_message(peer, tag, bytes);
  const auto count = codec::Reader(bytes).number<std::uint64_t>();
  if (!count) return events_.on_broken(peer, "a count of packets that is none");
  Peer& state = peers_[static_cast<std::size_t>(peer)];
  if (tag == kConfirmed) {
    state.confirmed = std::max(state.confirmed, *count);
  } else {
    state.to_confirm = *count;
    confirm(peer, state);
  }
}

void MpiTransport::on_ended(int peer, std::string_view bytes) {
  heard_.store(true);
  events_.on_ended(peer, bytes);
}

void MpiTransport::on_broken(int peer, std::string_view why) {
  heard_.store(true);
  events_.on_broken(peer, why);
}

// --- driving ---

bool MpiTransport::progress() {
  const Lock lock(mutex());
  bool any = endpoint_->poll();
  std::vector<Packet> packets = endpoint_->take(world_);
  // Peers report the end of the world over TCP. Read that first, before older packets complete an operation.
  if (!packets.empty() || ++looks_ % kLooks == 0) any = tcp_.progress() || any;
  for (Packet& packet : packets) take_in(std::move(packet));
  return pump_all() || any || !packets.empty();
}

// MPI has no blocking wait for all requests, so this sleeps for growing intervals and polls in between.
void MpiTransport::sleep(std::chrono::milliseconds longest) {
  const auto until = Clock::now() + longest;
  std::chrono::microseconds nap = kFirstNap;
  while (true) {
    if (woken_.exchange(false) || progress() || heard_.exchange(false) || Clock::now() >= until) return;
    if (nap < kLongestNap) {
      std::this_thread::sleep_for(nap);
      nap *= 2;
    } else {
      tcp_.sleep(kLongestNap);
    }
  }
}

void MpiTransport::wake() noexcept {
  woken_.store(true);
  tcp_.wake();
}

// --- endings ---

std::optional<std::string> MpiTransport::lost(int peer) {
  const Lock lock(mutex());
  if (const auto how = tcp_.lost(peer)) return how;
  if (const auto broken = broken_.find(peer); broken != broken_.end()) return broken->second;
  return endpoint_->failure(processes_[static_cast<std::size_t>(peer)]);
}

std::vector<int> MpiTransport::owing() {
  const Lock lock(mutex());
  const std::vector<int> of_tcp = tcp_.owing();
  std::set<int> peers(of_tcp.begin(), of_tcp.end());
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    const Peer& state = peers_[peer];
    const bool takes_not =
        !state.offered.empty() ||
        std::any_of(state.queue.begin(), state.queue.end(), [](const Item& item) { return item.frame != nullptr; });
    if (!state.posted.empty() || !state.landing.empty() || takes_not) peers.insert(static_cast<int>(peer));
  }
  return {peers.begin(), peers.end()};
}

void MpiTransport::forget(std::uint64_t operation) {
  const Lock lock(mutex());
  tcp_.forget(operation);
  for (Peer& state : peers_) {
    std::erase_if(state.kept, [&](const Kept& kept) { return kept.head.operation <= operation; });
  }
}

void MpiTransport::end(std::string_view bytes) {
  const Lock lock(mutex());
  if (std::exchange(ended_, true)) return;
  endpoint_->note_failure();
  for (Peer& state : peers_) {
    for (const Item& item : state.queue) {
      if (item.frame != nullptr) item.frame->done.store(true, std::memory_order_release);
    }
    for (const auto& [id, frame] : state.offered) frame->done.store(true, std::memory_order_release);
    state.queue.clear();
    state.offered.clear();
    state.posted.clear();
    state.kept.clear();
    state.landing.clear();
  }
  tcp_.end(bytes);
}

// A packet that MPI has taken may still need MPI calls of this process to be sent, so peers are asked to confirm.
bool MpiTransport::flushed() {
  const Lock lock(mutex());
  bool all = tcp_.flushed();
  for (std::size_t i = 0; i < peers_.size() && !ended_; ++i) {
    Peer& state = peers_[i];
    const int peer = static_cast<int>(i);
    if (state.sent == 0 && state.queue.empty()) continue;
    if ((state.queue.empty() && state.confirmed == state.sent) || lost(peer)) continue;
    all = false;
    if (!state.queue.empty() || state.asked == state.sent) continue;
    state.asked = state.sent;
    tcp_.message(peer, kAsk, counted(state.sent));
  }
  return all;
}

void MpiTransport::leave() {
  const Lock lock(mutex());
  if (std::exchange(left_, true)) return;
  tcp_.leave();
  endpoint_->retire(world_);
}

}  // namespace cohort::mpi
