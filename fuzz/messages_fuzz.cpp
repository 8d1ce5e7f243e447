// A peer's headers of sends and receives, in any order, met by receives and sends of a rank. Whatever the peer says, a
// receive that succeeds has the sender's data, and nothing is left over when the world ends.
#include "comm/engine/matcher.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace {

using namespace cohort;
using namespace cohort::comm;
using namespace cohort::comm::messages;
using namespace std::chrono_literals;

constexpr int kPeers = 2;
constexpr std::size_t kEager = 64;
constexpr std::size_t kLongest = 100;

class World final : public Members {
 public:
  int rank() const noexcept override { return kPeers; }
  int size() const noexcept override { return kPeers + 1; }
  const std::string& host_name(int) const noexcept override { return host_; }
  std::string pid_text(int) const override { return ""; }
  bool crowded() const noexcept override { return false; }
  status::LaneStatus& messages() const noexcept override { return lane_; }
  bool ended() const noexcept override { return ended_; }
  void end(ErrorCode, int, std::uint64_t, std::string_view) override { ended_ = true; }
  void tell_if_ended() override {}
  Error recorded(const std::string& doing, std::uint64_t) const override { return Error(ErrorCode::Aborted, doing); }
  std::optional<std::string> lost(int) const override { return std::nullopt; }

 private:
  const std::string host_ = "here";
  mutable status::LaneStatus lane_{};
  bool ended_ = false;
};

/// A payload that is there at once: bytes of the message's tag.
class AtOnce final : public Transfer {
 public:
  AtOnce(const Message& message, bool asks) : Transfer(asks), message_(message) {}
  Result<Step> step(Lock&) override {
    if (message_.kind == Kind::Recv) std::fill_n(message_.to, message_.bytes(), static_cast<std::byte>(message_.tag));
    return Step::Over;
  }

 private:
  const Message& message_;
};

struct Wire {
  std::deque<std::string> headers;  // to this rank
  bool has_room = true;
};

class TransportChannel final : public Channel {
 public:
  explicit TransportChannel(Wire& wire) : Channel(kEager), wire_(wire) {}
  bool stirred() const noexcept override { return !wire_.headers.empty(); }
  bool peek(Arrival& arrival) noexcept override {
    if (wire_.headers.empty()) return false;
    const std::string& first = wire_.headers.front();
    arrival.header = *read_header(first, kEager);
    arrival.payload = reinterpret_cast<const std::byte*>(first.data()) + kHeaderBytes;
    return true;
  }
  void take() noexcept override { wire_.headers.pop_front(); }
  bool put(const MessageHeader& header, const std::byte*) override {
    if (!codec::decode<MessageHeader>(codec::encode(header))) std::abort();  // round trip
    return wire_.has_room;
  }
  void note_met() override {}
  std::uint64_t met() const noexcept override { return 0; }
  std::unique_ptr<Transfer> send_payload(const Message& message, std::uint64_t) override {
    return std::make_unique<AtOnce>(message, false);
  }
  std::unique_ptr<Transfer> receive_payload(const Message& message, const MessageHeader& offer) override {
    return std::make_unique<AtOnce>(message, offer.offer % 2 == 0);
  }

 private:
  Wire& wire_;
};

class Wires final : public Channels {
 public:
  Wires() : Channels(true) {}  // so there is no thread
  bool leads_to(int) const noexcept override { return true; }
  std::unique_ptr<Channel> open(int peer) override {
    return std::make_unique<TransportChannel>(wires[static_cast<std::size_t>(peer)]);
  }
  bool look() override { return false; }
  std::uint32_t bell() noexcept override { return 0; }
  void arm(bool) noexcept override {}
  void sleep(std::uint32_t, std::chrono::nanoseconds) override {}
  void wake() noexcept override {}

  std::array<Wire, kPeers> wires;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const ForkGuard guard;
  static const std::atomic<Observer*> nobody{nullptr};
  World world;
  Wires wires;
  Matcher matcher({world, {&wires}, guard, nobody, [] { return nullptr; }});
  struct Started {
    Request request;
    std::vector<std::byte> memory;
    Work work;
  };
  std::vector<std::unique_ptr<Started>> all;
  while (size >= 4) {
    const std::uint8_t what = data[0];
    const int peer = data[1] % kPeers;
    const std::int32_t tag = data[2] % 4;
    const std::size_t count = data[3] % kLongest;
    data += 4;
    size -= 4;
    Wire& wire = wires.wires[static_cast<std::size_t>(peer)];
    if (what % 4 == 0) {  // a header, as bytes
      const std::size_t length = std::min(size, kHeaderBytes + count);
      std::string bytes(reinterpret_cast<const char*>(data), length);
      data += length;
      size -= length;
      if (const auto header = read_header(bytes, kEager)) {
        if (codec::encode(*header) != bytes.substr(0, kHeaderBytes)) std::abort();
        std::fill(bytes.begin() + kHeaderBytes, bytes.end(), static_cast<char>(header->tag));
        wire.headers.push_back(std::move(bytes));
      }
    } else if (what % 4 == 1) {  // a header that fits
      MessageHeader header;
      header.kind = static_cast<HeaderKind>(1 + what / 4 % 5);
      header.dtype = DType::UInt8;
      header.tag = tag;
      header.count = static_cast<std::int64_t>(count);
      header.offer = header.kind == HeaderKind::Eager ? 0 : 1 + what / 32;
      std::string bytes = codec::encode(header);
      if (header.kind == HeaderKind::Eager) bytes.append(count, static_cast<char>(tag));
      if (read_header(bytes, kEager)) wire.headers.push_back(std::move(bytes));
    } else if (what % 4 == 2) {
      wire.has_room = what / 4 % 2 == 0;
    } else {
      auto& one = all.emplace_back(std::make_unique<Started>());
      one->memory.resize(count);
      Request& request = one->request;
      request.kind = what / 4 % 2 == 0 ? Kind::Send : Kind::Recv;
      request.dtype = DType::UInt8;
      request.root = request.kind == Kind::Recv && what / 8 % 3 == 0 ? kAnySource : peer;
      request.tag = tag;
      request.timeout = 1h;
      request.input = request.output = one->memory.data();
      request.input_count = request.output_count = static_cast<std::int64_t>(count);
      one->work = matcher.submit(request);
    }
    matcher.attend();
  }
  world.end(ErrorCode::Aborted, -1, 0, "");
  matcher.attend();
  if (!matcher.idle()) std::abort();
  for (const auto& one : all) {
    if (!one->work.done()) std::abort();
    const bool failed = one->work.error().has_value();
    if (one->request.kind != Kind::Recv || failed) continue;
    for (const std::byte each : one->memory) {
      if (each != static_cast<std::byte>(one->request.tag)) std::abort();
    }
  }
  return 0;
}
