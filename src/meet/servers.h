// What cohort/servers.h keeps of a server that is started again. Any thread.
#pragma once

#include <cohort/servers.h>

#include <optional>
#include <string>
#include <vector>

namespace cohort::meet {

/// Where this server has listened before `cohort run --server-restarts` started it again, and where the others look for
/// it. Nothing: it has not been started before, or had not said it.
std::optional<std::string> earlier_server_address();

/// What TF_CONFIG says, where there is no job of `cohort run` (whose own --tf-config says the same).
std::optional<std::vector<std::string>> listed_servers();

}  // namespace cohort::meet
