// A stranger at a rank's listener who knows the world's number and hellos of others, but not its key, in pieces of any
// size: he is never proven, and learns one answer at most.
#include "transport/tcp/attempt.h"

#include <fuzzer/FuzzedDataProvider.h>
#include <sys/socket.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort;
  using namespace cohort::transport::tcp;
  FuzzedDataProvider input(data, size);
  static const WorldKey key = derive_key({}, "a token that nobody knows");
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) return 0;
  const sys::UniqueFd peer(pair[1]);
  Attempt attempt = Attempt::accept(key, 1, 4, {sys::UniqueFd(pair[0]), {}});
  int welcomed = 0;
  const auto welcome = [&](const Hello& hello) {
    if (hello.from >= 4 || hello.from == 1 || hello.lane >= static_cast<std::uint32_t>(kMostLanes)) std::abort();
    ++welcomed;
    return input.ConsumeBool() ? Attempt::Verdict::Welcome : Attempt::Verdict::UseMine;
  };
  // Half of them say what a peer would say first.
  if (input.ConsumeBool()) {
    Hello hello;
    hello.world = key.world;
    hello.from = input.ConsumeIntegralInRange<std::uint32_t>(0, 5);
    hello.to = input.ConsumeIntegralInRange<std::uint32_t>(0, 2);
    hello.lane = input.ConsumeIntegralInRange<std::uint32_t>(0, 20);
    // Or what he has recorded of one.
    if (input.ConsumeBool()) hello.proof = hello_proof(key, hello);
    if (::send(peer.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) return 0;
  }
  std::size_t answered = 0;
  Answer answer;
  for (int turns = 0; turns < 40 && attempt.state() == Attempt::State::Going; ++turns) {
    attempt.advance(welcome);
    char room[256];
    const ssize_t got = ::recv(peer.get(), room, sizeof room, MSG_DONTWAIT);
    if (got == sizeof answer && answered == 0) std::memcpy(&answer, room, sizeof answer);
    if (got > 0) answered += static_cast<std::size_t>(got);
    if (attempt.state() != Attempt::State::Going || input.remaining_bytes() == 0) break;
    // He may send the proof back that he was shown.
    const std::string said = input.ConsumeBool()
                                 ? std::string(reinterpret_cast<const char*>(answer.proof.data()), answer.proof.size())
                                 : input.ConsumeRandomLengthString(100);
    if (!said.empty() && ::send(peer.get(), said.data(), said.size(), MSG_NOSIGNAL) < 0) break;
  }
  if (attempt.state() == Attempt::State::Proven || welcomed > 1 || answered > sizeof(Answer)) std::abort();
  return 0;
}
