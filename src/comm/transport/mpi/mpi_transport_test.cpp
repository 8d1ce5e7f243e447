// The transport over a fake MPI whose requests end in an awkward order or not at all: frames find their place, endings
// are reported, and callers' memory is not touched afterwards. Real MPIs: tests/e2e, tests/cluster.
#include "comm/transport/mpi/mpi_transport.h"

#include "base/result.h"
#include "comm/transport/testing/frames.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

// The type that a plug-in defines, as this fake MPI defines it.
struct CohortMpiPort {
  struct Request {
    enum class Kind { None, Send, Receive, Share, Barrier } kind = Kind::None;
    const void* from = nullptr;
    void* to = nullptr;
    int32_t count = 0;
    int32_t peer = -1;
    bool cancelled = false;
  };
  int32_t rank = 0;
  std::vector<Request> requests;
  std::deque<int32_t> receives;  // slots, as they were posted
};

namespace cohort::mpi {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Request = CohortMpiPort::Request;
using transport::testing::fill;
using transport::testing::Heard;
using transport::testing::pattern;

/// The processes of a fake job, opened one after the other.
struct Job {
  struct Letter {
    int from = 0;
    std::vector<std::byte> bytes;
  };
  int size = 0;
  int opened = 0;
  std::vector<std::deque<Letter>> letters;  // by receiver
  std::string shared;
  std::atomic<int> met{0};  // have begun the barrier
  int barrier_error = 0;
  int dead = -1;     // sends to it never end
  int refused = -1;  // sends to it end in an error
  unsigned turns = 0;
};
Job* the_job = nullptr;

int share(CohortMpiPort* port, int32_t slot, void* bytes, int32_t count) {
  if (port->rank == 0) the_job->shared.assign(static_cast<const char*>(bytes), static_cast<std::size_t>(count));
  std::memcpy(bytes, the_job->shared.data(), static_cast<std::size_t>(count));
  port->requests[static_cast<std::size_t>(slot)] = {Request::Kind::Share, nullptr, bytes, count, 0, false};
  return 0;
}

int test(CohortMpiPort* port, CohortMpiEvent* events, int32_t, int32_t* count) {
  std::vector<CohortMpiEvent> done;
  auto& inbox = the_job->letters[static_cast<std::size_t>(port->rank)];
  for (std::size_t slot = 0; slot < port->requests.size(); ++slot) {
    Request& request = port->requests[slot];
    const auto number = static_cast<int32_t>(slot);
    if (request.kind == Request::Kind::Share) done.push_back({number, 0, 0, 0, request.count});
    if (request.kind == Request::Kind::Barrier && the_job->met == the_job->size) done.push_back({number, 0, -1, 0, 0});
    if (request.kind == Request::Kind::Receive && request.cancelled) done.push_back({number, 0, -1, 1, 0});
    if (request.kind == Request::Kind::Send && request.peer == the_job->refused) {
      done.push_back({number, 17, -1, 0, 0});
    } else if (request.kind == Request::Kind::Send && request.peer != the_job->dead && the_job->turns++ % 3 != 0) {
      const auto* const bytes = static_cast<const std::byte*>(request.from);
      the_job->letters[static_cast<std::size_t>(request.peer)].push_back({port->rank, {bytes, bytes + request.count}});
      done.push_back({number, 0, -1, 0, 0});
    }
  }
  while (!inbox.empty() && !port->receives.empty()) {
    const int32_t slot = port->receives.front();
    Request& request = port->requests[static_cast<std::size_t>(slot)];
    port->receives.pop_front();
    const Job::Letter letter = std::move(inbox.front());
    inbox.pop_front();
    std::memcpy(request.to, letter.bytes.data(), letter.bytes.size());
    done.push_back({slot, 0, letter.from, 0, static_cast<int32_t>(letter.bytes.size())});
  }
  std::reverse(done.begin(), done.end());  // MPI may report them in any order
  for (std::size_t i = 0; i < done.size(); ++i) {
    port->requests[static_cast<std::size_t>(done[i].slot)].kind = Request::Kind::None;
    events[i] = done[i];
  }
  *count = static_cast<int32_t>(done.size());
  return 0;
}

constexpr CohortMpi kPretended = {
    COHORT_MPI_ABI,
    sizeof(CohortMpi),
    "other",
    "a fake MPI",
    [](char* text, int32_t room) {
      std::snprintf(text, static_cast<std::size_t>(room), "Fake MPI 1, and more");
      return 0;
    },
    [](int32_t* state, int32_t* level) {
      *state = COHORT_MPI_RUNNING;
      *level = COHORT_MPI_MULTIPLE;
      return 0;
    },
    [](int32_t*) { return 1; },
    [] { return 1; },
    [](void (*)()) { return 0; },
    [](int32_t slots, CohortMpiPort** made) {
      // Like MPI's port, it exists until the process ends.
      static std::vector<std::unique_ptr<CohortMpiPort>> ports;
      ports.push_back(std::make_unique<CohortMpiPort>(
          CohortMpiPort{the_job->opened++, std::vector<Request>(static_cast<std::size_t>(slots)), {}}));
      *made = ports.back().get();
      return 0;
    },
    [](CohortMpiPort* port, int32_t* ready, int32_t* rank, int32_t* size) {
      *ready = 1;
      *rank = port->rank;
      *size = the_job->size;
      return 0;
    },
    share,
    [](CohortMpiPort* port, int32_t slot) {
      if (the_job->barrier_error != 0) return the_job->barrier_error;
      ++the_job->met;
      port->requests[static_cast<std::size_t>(slot)].kind = Request::Kind::Barrier;
      return 0;
    },
    [](CohortMpiPort* port, int32_t slot, const void* bytes, int32_t count, int32_t peer, int32_t) {
      port->requests[static_cast<std::size_t>(slot)] = {Request::Kind::Send, bytes, nullptr, count, peer, false};
      return 0;
    },
    [](CohortMpiPort* port, int32_t slot, void* to, int32_t room, int32_t, int32_t) {
      port->requests[static_cast<std::size_t>(slot)] = {Request::Kind::Receive, nullptr, to, room, -1, false};
      port->receives.push_back(slot);
      return 0;
    },
    [](CohortMpiPort* port, int32_t slot) {
      port->requests[static_cast<std::size_t>(slot)].cancelled = true;
      return 0;
    },
    test,
    [](int32_t code, char* text, int32_t room) {
      std::snprintf(text, static_cast<std::size_t>(room), "fake error %d", code);
      return 0;
    }};

/// Some ranks of one process, driven by the test. MPI numbers them in the opposite order.
struct Ranks {
  explicit Ranks(int size) : heard(static_cast<std::size_t>(size)) {
    job.size = size;
    job.letters.resize(static_cast<std::size_t>(size));
    the_job = &job;
    for (int process = 0; process < size; ++process) {
      endpoints.push_back(value_or_throw(Endpoint::open(kPretended, net::deadline_in(5s))));
      processes.insert(processes.begin(), process);
    }
    std::vector<transport::tcp::Listeners> listeners;
    for (int rank = 0; rank < size; ++rank) {
      listeners.emplace_back(transport::tcp::Listeners::Options{"testhost", true});
      infos.push_back(listeners.back().info());
    }
    for (int rank = 0; rank < size; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      MpiTransport::Options own;
      own.endpoint = endpoints[static_cast<std::size_t>(processes[r])];
      own.processes = processes;
      own.world = 42;
      transport::tcp::TcpTransport::Options options;
      options.rank = rank;
      options.infos = infos;
      options.secret = transport::tcp::world_secret({}, "token");
      all.push_back(
          std::make_unique<MpiTransport>(std::move(own), std::move(options), std::move(listeners[r]), heard[r]));
    }
  }
  MpiTransport& operator[](int rank) { return *all[static_cast<std::size_t>(rank)]; }
  bool drive_until(const std::function<bool()>& ready, std::chrono::milliseconds limit = 20s) {
    const auto until = Clock::now() + limit;
    while (!ready()) {
      if (Clock::now() > until) return false;
      for (const auto& each : all) each->progress();
    }
    return true;
  }
  Job job;
  std::vector<std::shared_ptr<Endpoint>> endpoints;
  std::vector<int> processes;
  std::vector<Heard> heard;
  std::vector<transport::tcp::PeerInfo> infos;
  std::vector<std::unique_ptr<MpiTransport>> all;
};

TEST(MpiTransport, FramesOfEverySizeFindTheirPlaceInAnyOrderOfPosting) {
  Ranks ranks(3);
  constexpr std::size_t kSizes[] = {0, 1, 4096, 65536, 65537, 131072, 131073, 3000000};
  constexpr std::size_t kCount = std::size(kSizes);
  for (const bool posted_first : {true, false}) {
    std::vector<std::vector<std::byte>> data, room;
    std::vector<transport::Outgoing> out(6 * kCount);
    std::vector<transport::Incoming> in(6 * kCount);
    for (std::size_t pair = 0; pair < 6; ++pair) {
      for (std::size_t i = 0; i < kCount; ++i) {
        data.push_back(pattern(kSizes[i], static_cast<unsigned>(pair * 100 + i)));
        room.emplace_back(kSizes[i] + 3);
      }
    }
    const auto each = [&](const auto& body) {
      std::size_t pair = 0;
      for (int from = 0; from < 3; ++from) {
        for (int to = 0; to < 3; ++to) {
          if (from == to) continue;
          for (std::size_t i = 0; i < kCount; ++i) body(pair * kCount + i, static_cast<std::uint32_t>(i), from, to);
          ++pair;
        }
      }
    };
    const auto post = [&] {
      each([&](std::size_t at, std::uint32_t tag, int from, int to) {
        fill(in[at], from, tag, room[at]);
        ranks[to].receive(in[at]);
      });
    };
    if (posted_first) post();
    each([&](std::size_t at, std::uint32_t tag, int from, int to) {
      fill(out[at], to, tag, data[at]);
      ranks[from].send(out[at]);
    });
    if (!posted_first) {
      ranks.drive_until([] { return false; }, 30ms);  // small frames are kept, others wait
      EXPECT_FALSE(out.back().done);
      EXPECT_FALSE(in.back().done);
      post();
    }
    ASSERT_TRUE(ranks.drive_until([&] {
      return std::all_of(in.begin(), in.end(), [](const transport::Incoming& one) { return one.done.load(); }) &&
             std::all_of(out.begin(), out.end(), [](const transport::Outgoing& one) { return one.done.load(); });
    }));
    for (std::size_t i = 0; i < in.size(); ++i) {
      ASSERT_EQ(in[i].bytes, data[i].size());
      room[i].resize(data[i].size());
      ASSERT_EQ(room[i], data[i]) << i;
    }
  }
  EXPECT_TRUE(ranks.heard[0].broken.empty());
}

TEST(MpiTransport, WhoHasFlushedMayGoAndItsPeersHaveAll) {
  Ranks ranks(2);
  const auto data = pattern(60000, 3);
  std::vector<std::vector<std::byte>> room(20, std::vector<std::byte>(data.size()));
  std::vector<transport::Outgoing> out(20);
  std::vector<transport::Incoming> in(20);
  for (std::uint32_t i = 0; i < 20; ++i) {
    fill(out[i], 0, i, data);
    ranks[1].send(out[i]);
  }
  EXPECT_FALSE(ranks[1].flushed());
  ASSERT_TRUE(ranks.drive_until([&] { return ranks[1].flushed(); }));
  ranks[1].leave();
  ASSERT_TRUE(ranks.drive_until([&] { return ranks[0].lost(1).has_value(); }));
  EXPECT_NE(ranks[0].lost(1)->find("left the world"), std::string::npos);
  for (std::uint32_t i = 0; i < 20; ++i) {
    fill(in[i], 1, i, room[i]);
    ranks[0].receive(in[i]);
    EXPECT_TRUE(in[i].done);
    EXPECT_EQ(room[i], data);
  }
}

TEST(MpiTransport, EndingTouchesNoMemoryAlsoWhereARequestOfMpiNeverEnds) {
  Ranks ranks(2);
  ranks.job.dead = ranks.processes[1];
  auto data = std::make_unique<std::vector<std::byte>>(pattern(5000, 1));
  transport::Outgoing out;
  fill(out, 1, 0, *data);
  ranks[0].send(out);
  EXPECT_TRUE(out.done);  // it has been copied
  const auto large = pattern(3000000, 2);
  std::vector<std::byte> room(large.size());
  transport::Outgoing offered;
  transport::Incoming in;
  fill(offered, 0, 1, large);
  fill(in, 1, 1, room);
  ranks[1].send(offered);
  ranks[0].receive(in);
  ASSERT_TRUE(ranks.drive_until([&] { return in.bytes > 0; }));
  EXPECT_FALSE(offered.done);
  EXPECT_EQ(ranks[0].owing(), std::vector{1});
  EXPECT_EQ(ranks[1].owing(), std::vector{0});
  ranks[1].end("enough");
  EXPECT_TRUE(offered.done);
  ranks[0].end("");
  data.reset();
  ranks.job.dead = -1;
  const auto before = room;
  ASSERT_TRUE(ranks.drive_until([&] { return !ranks.heard[0].ended.empty(); }));
  ranks.drive_until([] { return false; }, 30ms);
  EXPECT_EQ(ranks.heard[0].ended.front(), "1:enough");
  EXPECT_EQ(room, before);
  EXPECT_FALSE(in.done);
  EXPECT_TRUE(ranks.endpoints[0]->failed());  // so MPI_Finalize is not called
}

TEST(MpiTransport, AnErrorOfMpiIsALostPeerThatIsNamed) {
  Ranks ranks(2);
  ranks.job.refused = ranks.processes[1];
  const auto data = pattern(100, 1);
  transport::Outgoing out;
  fill(out, 1, 0, data);
  ranks[0].send(out);
  ASSERT_TRUE(ranks.drive_until([&] { return ranks[0].lost(1).has_value(); }));
  EXPECT_EQ(*ranks[0].lost(1), "MPI could not send to it (fake error 17)");
  EXPECT_FALSE(ranks[1].lost(0).has_value());
  // The program finalizes MPI while the communicator exists.
  ranks.endpoints[static_cast<std::size_t>(ranks.processes[1])]->close();
  EXPECT_NE(ranks[1].lost(0)->find("MPI has been finalized"), std::string::npos);
}

TEST(MpiTransport, AFrameThatIsTooLongBreaksTheWorldAndWritesNothing) {
  Ranks ranks(2);
  const auto data = pattern(200, 1);
  std::vector<std::byte> room(100);
  transport::Outgoing out;
  transport::Incoming in;
  fill(out, 1, 0, data);
  fill(in, 0, 0, room);
  ranks[1].receive(in);
  ranks[0].send(out);
  ASSERT_TRUE(ranks.drive_until([&] { return !ranks.heard[1].broken.empty(); }));
  EXPECT_EQ(ranks.heard[1].broken.front(), "0:it sent 200 bytes where 100 were expected");
  EXPECT_EQ(room, std::vector<std::byte>(100));
  EXPECT_FALSE(in.done);
}

TEST(MpiTransport, WhatComesBeforeAWorldIsThereIsKeptAndAfterItIsDropped) {
  Ranks ranks(2);
  Endpoint& receiver = *ranks.endpoints[1];
  const auto give = [&](std::uint64_t world) {
    PacketHead head;
    head.world = world;
    Packet packet{ranks.endpoints[0]->buffer(), sizeof head};
    std::memcpy(packet.bytes.get(), &head, sizeof head);
    ASSERT_TRUE(ranks.endpoints[0]->send(world, 1, packet));
    for (int i = 0; i < 6; ++i) {
      ranks.endpoints[0]->poll();
      receiver.poll();
    }
  };
  give(7);
  receiver.enlist(7);
  EXPECT_EQ(receiver.take(7).size(), 1u);
  receiver.retire(7);
  give(7);
  EXPECT_TRUE(receiver.take(7).empty());
  EXPECT_EQ(receiver.job().size(), 16u);
  EXPECT_EQ(receiver.job(), ranks.endpoints[0]->job());
}

TEST(MpiEndpoint, MeetsWhenAllHaveComeAndNotBefore) {
  Ranks ranks(3);
  for (const auto& endpoint : ranks.endpoints) endpoint->close();
  EXPECT_FALSE(ranks.endpoints[0]->meet(net::deadline_in(20ms)));
  std::thread second([&] { EXPECT_TRUE(ranks.endpoints[1]->meet(net::deadline_in(20s))); });
  while (ranks.job.met < 2) std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(ranks.endpoints[2]->meet(net::deadline_in(20s)));
  second.join();
}

TEST(MpiEndpoint, DoesNotMeetWhereMpiFails) {
  Ranks ranks(2);
  for (const auto& endpoint : ranks.endpoints) endpoint->close();
  ranks.job.barrier_error = 17;
  EXPECT_FALSE(ranks.endpoints[0]->meet(net::deadline_in(20s)));
}

TEST(MpiPackets, AreCheckedInFull) {
  PacketHead head;
  head.total = 5;
  std::vector<std::byte> bytes(sizeof head + 5);
  const auto read = [&](std::size_t count) {
    std::memcpy(bytes.data(), &head, sizeof head);
    return read_head(bytes.data(), count, 4).has_value();
  };
  EXPECT_TRUE(read(bytes.size()));
  EXPECT_FALSE(read(bytes.size() - 1));
  EXPECT_FALSE(read(10));
  head.from = 4;
  EXPECT_FALSE(read(bytes.size()));
  head.from = 3;
  EXPECT_TRUE(read(bytes.size()));
  head.mark += 1;
  EXPECT_FALSE(read(bytes.size()));
  head.mark -= 1;
  head.kind = PacketKind::Piece;
  EXPECT_TRUE(read(bytes.size()));
  head.offset = 1;
  EXPECT_FALSE(read(bytes.size()));
  head.offset = UINT64_MAX;
  EXPECT_FALSE(read(bytes.size()));
  head.kind = static_cast<PacketKind>(9);
  EXPECT_FALSE(read(bytes.size()));
}

}  // namespace
}  // namespace cohort::mpi
