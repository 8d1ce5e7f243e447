// Stands in for the supervisor of an elastic job: the job's store, its secret and a status page for each worker. Prints
// "PORT SECRET_FD PAGE_FD..." (descriptors of its own, to be opened through /proc), then carries out lines from stdin,
// until they end, and answers each with "done":
//   begin EPOCH WORKER:HOST_NUMBER,... CAUSE    writes the membership, and that the job is in this epoch
//   record EPOCH WORKER:HOST_NUMBER,... CAUSE   writes the membership alone
//   tell EPOCH                                  writes the epoch into the status pages
//   page WORKER                                 prints, before "done", the epoch of the world that the worker has
//                                               formed last (-1: none), and 1 if it has the job's state, else 0
#include "base/memory.h"
#include "base/result.h"
#include "net/secret.h"
#include "net/served_store.h"
#include "net/store.h"
#include "rendezvous/membership.h"
#include "telemetry/status_page.h"

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  using namespace cohort;
  const int count = argc > 1 ? std::atoi(argv[1]) : 8;
  const net::Secret secret = value_or_throw(net::Secret::generate());
  const auto memory = value_or_throw(secret.to_sealed_memfd());
  const store::StoreServer server({.secret = secret});
  const auto port = server.endpoint().tcp.port;
  const auto store = store::connect_tcp_store("127.0.0.1", port, secret, net::deadline_in(std::chrono::seconds(30)));
  std::vector<sys::SharedSegment> pages;
  std::printf("%d %d", static_cast<int>(port), memory.get());
  for (int i = 0; i < count; ++i) {
    pages.push_back(value_or_throw(status::create_status_page()));
    std::printf(" %d", pages.back().fd.get());
  }
  std::printf("\n");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string what, members;
    rendezvous::Membership membership;
    words >> what >> membership.epoch;
    if (what == "page") {
      const auto& page = *static_cast<const status::StatusLayout*>(pages.at(membership.epoch).mapping.data());
      std::printf("%lld %u ", static_cast<long long>(page.formed_epoch.load()), page.has_state.load());
    } else if (what == "tell") {
      for (auto& page : pages) static_cast<status::StatusLayout*>(page.mapping.data())->epoch.store(membership.epoch);
    } else {
      words >> members;
      std::getline(words >> std::ws, membership.cause);
      std::istringstream each(members);
      for (std::string member; std::getline(each, member, ',');) {
        const int host = std::atoi(member.c_str() + member.find(':') + 1);
        membership.members.push_back({std::atoi(member.c_str()), "host" + std::to_string(host), host});
      }
      store->set(rendezvous::membership_key(membership.epoch), rendezvous::encode(membership));
      if (what == "begin") store->set(store::kEpochKey, std::to_string(membership.epoch));
    }
    std::printf("done\n");
    std::fflush(stdout);
  }
}
