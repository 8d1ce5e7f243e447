// InitOffer: data that rank 0 gives the others through the launcher's meeting place: a secret for this world, and the
// addresses at which rank 0 may be reached. Texts come from the launcher and are read strictly. Pure; any thread.
// go_to: connects to a plan's meeting place, which is the store where the ranks of one world meet. If the launcher has
// no store, rank 0 serves one in its own process. Blocks until the deadline at most; any thread.
// Entries for servers in the job's store: their addresses, and the launcher's reports of how they have ended. Any
// thread.
#pragma once

#include "base/result.h"
#include "net/address.h"
#include "net/secret.h"
#include "net/served_store.h"
#include "net/store.h"
#include "rendezvous/init_plan.h"

#include <cohort/servers.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::rendezvous {

struct InitOffer {
  std::optional<net::Secret> secret;    ///< nullopt: all ranks already have one
  std::vector<net::Address> addresses;  ///< the likeliest first; never empty
};

/// Encodes as many addresses as fit into a word of `longest` bytes; fails with InvalidArgument if none fits.
Result<std::string> encode(const InitOffer& offer, std::size_t longest);
Result<InitOffer> decode_offer(std::string_view text);

/// The store of one meeting; in rank 0's process also its server, which lives as long as the meeting.
struct MeetingPlace {
  std::unique_ptr<store::StoreServer> server;
  std::shared_ptr<store::MeetingStore> store;  // destroyed first
};

/// Connects to the place. `meeting`: differs from earlier meetings there. Throws the errors of `cohort::init`.
std::shared_ptr<MeetingPlace> go_to(const InitPlan& plan, const std::string& meeting, net::Deadline deadline);

/// Returns the address at which this server listened before `cohort run --server-restarts` started it again, and at
/// which the others look for it. Returns nullopt if the server was not started before, or had announced no address.
std::optional<std::string> earlier_server_address();

/// Returns the servers that TF_CONFIG lists, unless this is a job of `cohort run` (its own --tf-config lists the same).
std::optional<std::vector<std::string>> listed_servers();

/// Key of a server's address in the job's store. `restart`: how often the whole job has been started again.
std::string server_key(std::int64_t restart, int number);
/// Key of the report on how a server has ended, if it was not started again.
std::string ended_key(std::int64_t restart, int number);
/// Value in place of the address of a server that ended before it announced one.
inline constexpr std::string_view kEndedBefore = "\nended before";

/// Returns how the server of this job that listened at `address` has ended: "exit code 0 after 3.1 s". Returns nullopt
/// if it runs, or if its end is not known.
std::optional<std::string> how_server_ended(int number, const std::string& address);

}  // namespace cohort::rendezvous
