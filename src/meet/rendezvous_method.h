// What the ranks of a world have in common since they met through their launcher. Any thread. (`rendezvous_method` is
// in cohort/join_options.h.)
#pragma once

#include "net/secret.h"

#include <optional>

namespace cohort::meet {

/// The ranks of a world that has been formed through a launcher's meeting place have a secret in common from then on.
void keep_launchers_secret(const net::Secret& of_the_meeting);
std::optional<net::Secret> launchers_secret();

}  // namespace cohort::meet
