// Text that rank 0 gives the others through the launcher's meeting place: a secret of this world and the addresses at
// which rank 0 may be reached. Texts come from the launcher and are read strictly. Pure; any thread.
// Going to the place of a plan: the store in which the ranks of one world meet. Rank 0 of a place without a launcher's
// store serves it in its own process. Blocks until the deadline at most; any thread.
// Entries for servers in the job's store: their addresses, and, as the launcher reports it, how they have ended. Any
// thread.
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

/// Text of one word of at most `longest` bytes; addresses that do not fit are left out. InvalidArgument if none does.
Result<std::string> encode(const JoinOffer& offer, std::size_t longest);
Result<JoinOffer> decode_offer(std::string_view text);

/// The store of one meeting; in rank 0's process with its server, which lives as long.
struct MeetingPlace {
  std::unique_ptr<store::StoreServer> server;
  std::shared_ptr<store::MeetingStore> store;  // destroyed first
};

/// `meeting` distinguishes this meeting from earlier ones at the same address. Throws what `cohort::join` throws.
std::shared_ptr<MeetingPlace> go_to(const JoinPlan& plan, const std::string& meeting, net::Deadline deadline);

/// Address at which this server listened before `cohort run --server-restarts` started it again, and at which the
/// others look for it. Nothing: it has not been started before, or had not announced it.
std::optional<std::string> earlier_server_address();

/// Servers listed by TF_CONFIG, where there is no job of `cohort run` (whose own --tf-config says the same).
std::optional<std::vector<std::string>> listed_servers();

/// Key of a server's address in the job's store: `restart` times the whole job has been started again.
std::string server_key(std::int64_t restart, int number);
/// Key of how it has ended, if it was not started again.
std::string ended_key(std::int64_t restart, int number);
/// Value in place of the address of a server that has ended before it said one.
inline constexpr std::string_view kEndedBefore = "\nended before";

/// How the server of this job that listened there has ended: "exit code 0 after 3.1 s". Nothing: it runs, or nobody
/// knows.
std::optional<std::string> how_server_ended(int number, const std::string& address);

}  // namespace cohort::rendezvous
