// What rank 0 tells the others through the launcher's meeting place: a secret of this world and the addresses at which
// it may be reached. Texts come from the launcher and are read strictly. Pure; any thread.
// Going to the place of a plan: the store in which the ranks of one world meet. Rank 0 of a place without a launcher's
// store serves it in its own process. Blocks until the deadline at most; any thread.
// What the job's store has of servers: where they listen, and, by the launcher's word, how they have ended. Any thread.
#pragma once

#include "base/result.h"
#include "net/address.h"
#include "net/secret.h"
#include "net/served_store.h"
#include "net/store.h"
#include "rendezvous/join_plan.h"

#include <cohort/servers.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::rendezvous {

struct JoinOffer {
  std::optional<net::Secret> secret;    ///< nullopt: the one that all ranks have
  std::vector<net::Address> addresses;  ///< the likeliest first; never none
};

/// In one word of at most `longest` bytes; addresses that do not fit are left out. InvalidArgument if not one does.
Result<std::string> encode(const JoinOffer& offer, std::size_t longest);
Result<JoinOffer> decode_offer(std::string_view text);

/// The store of one meeting; in rank 0's process with its server, which lives as long.
struct MeetingPlace {
  std::unique_ptr<store::StoreServer> server;
  std::shared_ptr<store::MeetingStore> store;  // destroyed first
};

/// `meeting` tells this meeting from earlier ones at the same place. Throws what `cohort::join` throws.
std::shared_ptr<MeetingPlace> go_to(const JoinPlan& plan, const std::string& meeting, net::Deadline deadline);

/// Where this server has listened before `cohort run --server-restarts` started it again, and where the others look for
/// it. Nothing: it has not been started before, or had not said it.
std::optional<std::string> earlier_server_address();

/// What TF_CONFIG says, where there is no job of `cohort run` (whose own --tf-config says the same).
std::optional<std::vector<std::string>> listed_servers();

/// Where the job's store has a server's address: `restart` times the whole job has been started again.
std::string server_key(std::int64_t restart, int number);
/// And how it has ended, if it was not started again.
std::string ended_key(std::int64_t restart, int number);
/// In place of the address of a server that has ended before it said one.
inline constexpr std::string_view kEndedBefore = "\nended before";

/// How the server of this job that listened there has ended: "exit code 0 after 3.1 s". Nothing: it runs, or nobody
/// knows.
std::optional<std::string> how_server_ended(int number, const std::string& address);

}  // namespace cohort::rendezvous
