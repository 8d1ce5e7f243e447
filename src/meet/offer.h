// What rank 0 tells the others through the launcher's meeting place: a secret of this world and the addresses at which
// it may be reached. Texts come from the launcher and are read strictly. Pure; any thread.
#pragma once

#include "base/result.h"
#include "net/address.h"
#include "net/secret.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::meet {

struct JoinOffer {
  std::optional<net::Secret> secret;    ///< nullopt: the one that all ranks have
  std::vector<net::Address> addresses;  ///< the likeliest first; never none
};

/// In one word of at most `longest` bytes; addresses that do not fit are left out. InvalidArgument if not one does.
Result<std::string> encode(const JoinOffer& offer, std::size_t longest);
Result<JoinOffer> decode_offer(std::string_view text);

}  // namespace cohort::meet
