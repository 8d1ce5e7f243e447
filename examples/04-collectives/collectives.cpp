// Collectives on arrays of one's own, without libtorch: every rank's input, and its result.
#include <cohort/cohort.h>

#include <cstdint>
#include <cstdio>
#include <numeric>
#include <vector>

namespace {

void print(const char* name, const std::vector<std::int64_t>& values) {
  std::printf("%-14s", name);
  for (const std::int64_t value : values) std::printf(" %lld", static_cast<long long>(value));
  std::printf("\n");
}

void run() {
  cohort::Communicator world = cohort::init();  // its communicator ends with it: no operation may be under way then
  const int rank = world.rank(), size = world.size();
  const auto show = [&](const char* name, const std::vector<std::int64_t>& values) {
    if (rank == 0) print(name, values);
  };

  // (1) Everybody's sum, in place. The Work is what one waits for; until then the memory is the operation's.
  std::vector<std::int64_t> sum = {rank, 10 * rank};
  cohort::Work work = world.all_reduce(std::span(sum));
  work.wait();
  show("all_reduce", sum);

  // (2) From one to all.
  std::vector<std::int64_t> told = {rank == 0 ? 7 : 0};
  world.broadcast(std::span(told), {.root = 0}).wait();
  show("broadcast", told);

  // (3) Parts of different sizes, one after the other: rank r has r + 1 elements.
  std::vector<std::int64_t> counts(static_cast<std::size_t>(size));
  std::iota(counts.begin(), counts.end(), 1);
  const std::vector<std::int64_t> part(static_cast<std::size_t>(rank + 1), rank);
  std::vector<std::int64_t> all(static_cast<std::size_t>(size * (size + 1) / 2));
  world.all_gather_v(std::span(part), std::span(all), counts).wait();
  show("all_gather_v", all);

  // (4) Two ranks alone: each one's number goes once around.
  std::vector<std::int64_t> mine = {rank}, got = {rank};
  if (size > 1) {
    cohort::Work sent = world.send(std::span(mine), (rank + 1) % size);
    world.recv(std::span(got), (rank + size - 1) % size).wait();
    sent.wait();
  }
  show("recv", got);

  // (5) A part of the world: the even ranks, and the odd ones.
  cohort::Communicator half = world.split({.color = rank % 2});
  std::vector<std::int64_t> ranks = {rank};
  half.all_reduce(std::span(ranks)).wait();
  show("split", ranks);

  // (6) Ranks that disagree are refused, all of them, before anything is changed; then the world goes on.
  std::vector<std::int64_t> uneven(rank == 0 ? 2 : 3);
  try {
    world.all_reduce(std::span(uneven)).wait();
    show("alone", {size});
  } catch (const cohort::Error& error) {
    if (error.code() != cohort::ErrorCode::Mismatch) throw;
    show("refused", {size});
  }
  world.barrier().wait();
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "collectives: %s\n", error.what());
    return 1;
  }
}
