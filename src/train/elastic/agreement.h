// Decides from which state the ranks of a new world continue. The decision is a pure function of the ranks' reports.
// Two collective steps carry it out: comparing digests, and sending the state to the ranks that lack it. One thread per
// communicator.
#pragma once

#include "base/result.h"

#include "train/elastic/progress.h"

#include <cohort/digest.h>
#include <cohort/elastic.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace cohort::elastic {

/// A rank's report of its state.
struct Standing {
  std::int64_t steps = 0;    ///< steps that the rank has ended
  bool fresh = true;         ///< the rank has been in no world yet
  bool whole = true;         ///< the rank's parts are unchanged since the end of its last step
  bool interrupted = false;  ///< the rank left its world within a step
  std::int32_t first_size = 0;
  std::string host = {};
  std::vector<std::string> names = {};  ///< names of the parts and values of its state
  bool came_anew = true;                ///< the rank's process has never had a state of this job
  std::int64_t reached =
      -1;  ///< step that earlier ranks reached in this attempt of the job, as a new rank 0 looked up; -1: none
  std::string checkpoint = {};  ///< last checkpoint of these earlier ranks, for messages
  std::string not_asked = {};   ///< reason why `reached` could not be looked up
};

struct Agreement {
  std::int64_t steps = 0;    ///< number of steps from which all continue
  std::vector<int> sources;  ///< ranks that have this state, ascending; the first one's is used
  std::vector<int> takers;   ///< all other ranks
  bool begins = false;       ///< no rank has trained yet: all take the first rank's state
  bool interrupted = false;
  std::int32_t first_size = 0;
};

/// Finds the furthest step whose whole state some rank has. An error is the same on all ranks: Mismatch if the states
/// consist of different parts; Unavailable if no rank's state is whole, if a state that is not whole is further, or if
/// all ranks are new although earlier ranks had trained.
Result<Agreement> agree_on_step(const std::vector<Standing>& standings);

using Parts = std::map<std::string, std::shared_ptr<Part>>;
using PartContents = std::map<std::string, Contents>;

/// Returns the digests of all items, in the order of names.
std::vector<Digest> digests_of(const PartContents& contents, const DigestKey& key);

/// Returns the ranks whose digests are equal, if they are more than half of the given ranks; empty otherwise.
std::vector<int> majority(const std::map<int, std::vector<Digest>>& digests);

/// Compares the sources' states: sources that differ from the majority become takers, and a warning names them. If no
/// rank has trained yet, sources that differ from the first one become takers. `mine`: this rank's digests if it is a
/// source. Collective. Throws Mismatch, naming tensor and ranks, if at most half of the sources are equal.
void compare_sources(Communicator& comm, Agreement& agreement, const PartContents& contents,
                     const std::vector<Digest>& mine);

/// The state that takers receive.
struct Received {
  PartContents contents;
  std::map<std::string, std::string> values;
  std::vector<Digest> digests;
};

struct Supply {
  const PartContents& contents;
  const std::map<std::string, std::string>& values;
  const std::vector<Digest>& digests;
};

/// Sends the state to all takers. Each taker gets an equal slice from every source of its host (from all sources if it
/// has none); then the host's first taker passes the state on to the others. Received data is compared with the
/// digests. Collective; returns the state on takers, and uses `mine` on sources. Throws Corrupt if bytes changed.
Received send_state(Communicator& comm, const Agreement& agreement, const std::vector<std::string>& hosts,
                    const Supply& mine, const DigestKey& key);

}  // namespace cohort::elastic
