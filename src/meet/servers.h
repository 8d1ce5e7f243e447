// What the job's store has of servers: where they listen, and, by the launcher's word, how they have ended. Any thread.
#pragma once

#include <cohort/servers.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::meet {

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

}  // namespace cohort::meet
