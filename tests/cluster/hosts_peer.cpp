// A rank that calls collectives of many sizes over made-up values and prints a digest of all that it got: equal on all
// ways to start the same layout. Argument: seconds to go on for (default: once round), or how many rounds: "x25".
#include <cohort/cohort.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

namespace {

std::uint64_t digest = 0xcbf29ce484222325;

void add(const std::vector<float>& values) {
  for (const float value : values) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    digest = (digest ^ bits) * 0x100000001b3;
  }
}

// Sums of such values depend on the order in which they are added.
std::vector<float> values(std::size_t count, int rank, std::uint32_t salt) {
  std::vector<float> out(count);
  std::uint32_t state = salt * 2654435761U + static_cast<std::uint32_t>(rank) * 40503U + 1U;
  for (float& value : out) {
    state = state * 1664525U + 1013904223U;
    value = static_cast<float>(static_cast<std::int32_t>(state)) * 1e-7F;
  }
  return out;
}

void once_round(cohort::Communicator& world, std::uint32_t salt) {
  const int rank = world.rank();
  const auto size = static_cast<std::size_t>(world.size());
  for (const std::size_t count : {std::size_t{1}, std::size_t{257}, std::size_t{20'000}, std::size_t{700'001}}) {
    std::vector<float> data = values(count, rank, salt);
    world.all_reduce(std::span(data)).wait();
    add(data);
    data = values(count, rank, salt + 1);
    world.broadcast(std::span(data), {.root = static_cast<int>(count % size)}).wait();
    add(data);
    const std::vector<float> mine = values(count, rank, salt + 2);
    std::vector<float> all(count * size);
    world.all_gather(std::span(mine), std::span(all)).wait();
    add(all);
  }
  std::vector<float> message = values(5'000, rank, salt + 3);
  std::vector<float> received(message.size());
  const int next = (rank + 1) % world.size();
  const int before = (rank + world.size() - 1) % world.size();
  auto sent = world.send(std::span<const float>(message), next);
  world.recv(std::span(received), before).wait();
  sent.wait();
  // Everyone's digest is to be one: what only this rank got goes round.
  std::vector<float> all(received.size() * size);
  world.all_gather(std::span<const float>(received), std::span(all)).wait();
  add(all);
  world.barrier().wait();
}

}  // namespace

int main(int argc, char** arguments) {
  const bool counted = argc > 1 && arguments[1][0] == 'x';
  const double seconds = argc > 1 && !counted ? std::atof(arguments[1]) : 0;
  const std::uint32_t rounds = counted ? static_cast<std::uint32_t>(std::atoi(arguments[1] + 1)) : 0;
  try {
    cohort::Communicator world = cohort::init();
    const auto since = std::chrono::steady_clock::now();
    std::uint32_t salt = 1;
    for (std::uint32_t round = 0; round < rounds; ++round, salt += 10) once_round(world, salt);
    int go_on = counted ? 0 : 1;
    while (go_on != 0) {
      once_round(world, salt);
      salt += 10;
      go_on = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count() < seconds ? 1 : 0;
      world.broadcast(std::span(&go_on, 1)).wait();
    }
    std::printf("rank %d of %d, local %d of %d, host %d of %d: %016llx\n", world.rank(), world.size(),
                world.local_rank(), world.local_size(), world.cross_rank(), world.cross_size(),
                static_cast<unsigned long long>(digest));
    return 0;
  } catch (const cohort::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}
