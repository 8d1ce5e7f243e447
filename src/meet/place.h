// Going to the place of a plan: the store in which the ranks of one world meet. Rank 0 of a place without a launcher's
// store serves it in its own process. Blocks until the deadline at most; any thread.
#pragma once

#include "meet/plan.h"
#include "net/address.h"
#include "store/served_store.h"
#include "store/store.h"

#include <memory>
#include <string>

namespace cohort::meet {

/// The store of one meeting; in rank 0's process with its server, which lives as long.
struct MeetingPlace {
  std::unique_ptr<store::StoreServer> server;
  std::shared_ptr<store::MeetingStore> store;  // destroyed first
};

/// `meeting` tells this meeting from earlier ones at the same place. Throws what `cohort::join` throws.
std::shared_ptr<MeetingPlace> go_to(const JoinPlan& plan, const std::string& meeting, net::Deadline deadline);

}  // namespace cohort::meet
