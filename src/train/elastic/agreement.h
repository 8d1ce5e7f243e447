// From which state the ranks of a new world go on: a pure decision over what each says of itself, and the two steps
// that carry it out, which are collective: comparing digests, and sending the state to those who lack it. One thread
// per communicator.
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
  std::int64_t steps = 0;    ///< that it has ended
  bool fresh = true;         ///< it has been in no world yet
  bool whole = true;         ///< its parts are as its last step left them
  bool interrupted = false;  ///< it left its world within a step
  std::int32_t first_size = 0;
  std::string host = {};
  std::vector<std::string> names = {};  ///< of what its state consists of
  bool came_anew = true;  ///< its process has had no state of this job's, as one that trains a second time has
  std::int64_t reached =
      -1;  ///< by others in this attempt of the job, as a first rank that came anew has found; -1: none
  std::string checkpoint = {};  ///< and their last one, for people
  std::string not_asked = {};   ///< why it does not know that
};

struct Agreement {
  std::int64_t steps = 0;    ///< with which all go on
  std::vector<int> sources;  ///< ranks whose state is that, ascending: the first one's counts
  std::vector<int> takers;   ///< all others
  bool begins = false;       ///< nobody has trained yet: the first rank's state is everybody's
  bool interrupted = false;
  std::int32_t first_size = 0;
};

/// The furthest step that any rank has ended and that has a whole state. An error is the same on all ranks: Mismatch
/// where states consist of different things, Unavailable where nobody's is whole, or what is not has gone further, or
/// all have come anew where others had trained.
Result<Agreement> agree_on_step(const std::vector<Standing>& standings);

using Parts = std::map<std::string, std::shared_ptr<Part>>;
using PartContents = std::map<std::string, Contents>;

/// Digests of all items, in the order of names.
std::vector<Digest> digests_of(const PartContents& contents, const DigestKey& key);

/// Which ranks' digests are those of more than half of all that are given; empty if there is no such half.
std::vector<int> majority(const std::map<int, std::vector<Digest>>& digests);

/// Compares what sources hold: those that differ from most become takers, and are named in a warning. Where nobody has
/// trained yet, those that differ from the first do. `mine` has this rank's digests if it is a source. Collective.
/// Throws Mismatch, naming tensor and ranks, if no more than half of them are equal.
void compare_sources(Communicator& comm, Agreement& agreement, const PartContents& contents,
                     const std::vector<Digest>& mine);

/// Contents that takers receive.
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

/// Each taker gets an equal slice of the state from every source of its host, or else from all; of several takers of a
/// host without a source, the first passes it on. What has been received is compared with its digests. Collective;
/// returns it on takers. `mine` counts on sources. Throws Corrupt if bytes have changed on their way.
Received send_state(Communicator& comm, const Agreement& agreement, const std::vector<std::string>& hosts,
                    const Supply& mine, const DigestKey& key);

}  // namespace cohort::elastic
