#include "observe/doctor/facts.h"

#include "base/env.h"
#include "base/files.h"
#include "base/hardware.h"
#include "base/json.h"
#include "base/log.h"
#include "launch/output/live_run.h"
#include "net/socket.h"
#include "observe/doctor/examination.h"
#include "observe/doctor/probe.h"

#include <poll.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

namespace cohort::doctor {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(NetworkFacts, interface, address, mtu, offered)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(NameFacts, name, addresses, error)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(LimitFacts, open_files, open_files_most, processes, locked_memory, core)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(MachineFacts, processor, processors, affinity, quota, cores, numa_nodes,
                                                threads, load, memory, memory_available, memory_limit, shared,
                                                shared_free, shared_error, gpus, gpu_driver, gpu_error, gpu_nodes,
                                                card_nodes, gpu_links, gpu_strangers, nccl, nccl_path, nccl_error,
                                                infiniband)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(SoftwareFacts, version, build, commit, path, python, python_path,
                                                python_error, torch, package, mpi)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(FolderFacts, path, error, writable, free, file_system)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(HostFacts, name, port, networks, network_error, names, limits, machine,
                                                software, folder, environment)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(ProbeFacts, peer, address, result, detail, from, milliseconds)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(SpeedFacts, from, to, address, there, back, milliseconds, error)

namespace {

/// Longest report of a host, in bytes.
constexpr std::size_t kLongest = std::size_t{4} << 20;
/// Most elements of one kind in a host's report.
constexpr std::size_t kMost = 4096;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 60;

template <class T>
std::string dumped(const T& value) {
  // Names and versions may hold any bytes.
  return nlohmann::json(value).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

/// Fields that may have a fraction; all other numbers are whole.
constexpr std::array<std::string_view, 5> kReals = {"quota", "load", "milliseconds", "there", "back"};

/// Deepest nesting of a host's report.
constexpr int kDeepest = 8;

/// Returns whether all fields for whole numbers have such, in 64 bits. nlohmann would convert 4e26 to an int with
/// undefined behaviour.
bool numbers_are_whole(const nlohmann::json& said, int depth = 0) {
  if (depth > kDeepest) return false;
  // Whole numbers beyond 2^63 are converted to negative ones, and would compare equal to them.
  constexpr auto kMostWhole = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (said.is_number_unsigned()) return said.get<std::uint64_t>() <= kMostWhole;
  if (!said.is_structured()) return !said.is_number_float();
  for (const auto& [name, value] : said.items()) {
    const bool real = value.is_number_float() && std::find(kReals.begin(), kReals.end(), name) != kReals.end();
    if (!real && !numbers_are_whole(value, depth + 1)) return false;
  }
  return true;
}

/// Returns whether all known fields were decoded as they were sent. A number too large for its field is not.
bool was_understood(const nlohmann::json& said, const nlohmann::json& understood) {
  if (said.is_object() && understood.is_object()) {
    return std::all_of(understood.items().begin(), understood.items().end(), [&said](const auto& item) {
      const auto found = said.find(item.key());
      return found == said.end() || was_understood(*found, item.value());
    });
  }
  if (said.is_array() && understood.is_array()) {
    return std::equal(said.begin(), said.end(), understood.begin(), understood.end(), was_understood);
  }
  return said == understood;
}

template <class T>
Result<T> parsed(std::string_view text, const char* what) {
  if (text.size() > kLongest) return fail(ErrorCode::Corrupt, "{}: {} bytes are too many", what, text.size());
  const auto said = parse_json(text);
  if (!said) return fail(ErrorCode::Corrupt, "{}: {}", what, said.error().what());
  try {
    if (!numbers_are_whole(*said)) return fail(ErrorCode::Corrupt, "{}: a number should be whole", what);
    auto value = said->get<T>();
    if (!was_understood(*said, value)) return fail(ErrorCode::Corrupt, "{}: a number is too large", what);
    return value;
  } catch (const nlohmann::json::exception& error) {
    return fail(ErrorCode::Corrupt, "{}: {}", what, error.what());
  }
}

bool is_port(int port) { return port > 0 && port < 65536; }

}  // namespace

std::string to_json(const HostFacts& facts) { return dumped(facts); }
std::string to_json(const std::vector<ProbeFacts>& probes) { return dumped(probes); }
std::string to_json(const SpeedFacts& speed) { return dumped(speed); }

Result<HostFacts> parse_host_facts(std::string_view text) {
  auto facts = parsed<HostFacts>(text, "what a host says of itself");
  if (!facts) return facts;
  if (!is_port(facts->port) || facts->networks.size() > kMost || facts->names.size() > kMost ||
      facts->machine.gpus.size() > kMost || facts->machine.gpu_nodes.size() > kMost ||
      facts->machine.card_nodes.size() > kMost) {
    return fail(ErrorCode::Corrupt, "what a host says of itself: its ports or lists are none");
  }
  for (const std::int64_t bytes : {facts->machine.memory, facts->machine.memory_available, facts->machine.memory_limit,
                                   facts->machine.shared, facts->machine.shared_free, facts->folder.free}) {
    if (bytes < 0 || bytes > kMostBytes) return fail(ErrorCode::Corrupt, "what a host says of itself: {} bytes", bytes);
  }
  return facts;
}

Result<std::vector<ProbeFacts>> parse_probes(std::string_view text) {
  auto probes = parsed<std::vector<ProbeFacts>>(text, "what a host says of its peers");
  if (!probes) return probes;
  for (const ProbeFacts& probe : *probes) {
    if (probe.peer < 0 || !std::isfinite(probe.milliseconds))
      return fail(ErrorCode::Corrupt, "what a host says of its peers: there is no peer {}", probe.peer);
  }
  return probes;
}

Result<SpeedFacts> parse_speed(std::string_view text) {
  auto speed = parsed<SpeedFacts>(text, "what a host says of a transfer");
  if (speed && (!std::isfinite(speed->there) || !std::isfinite(speed->back) || speed->from < 0 || speed->to < 0))
    return fail(ErrorCode::Corrupt, "what a host says of a transfer: it has no speed");
  return speed;
}

namespace {

using nlohmann::json;

/// Time to wait for an order, until an order sets another. Ends this process even if another one holds stdin open.
constexpr std::chrono::seconds kIdleLimit(60);
constexpr std::chrono::seconds kLongestIdle(3600);
constexpr std::chrono::milliseconds kProgramLimit(3500);
constexpr std::chrono::milliseconds kNameLimit(3000);
/// This is below the examination's limit by the time that a probe may take.
constexpr std::chrono::milliseconds kProbeBegins(2500);
constexpr std::size_t kLongestOrder = std::size_t{4} << 20;

/// nullopt at the end of the input.
std::optional<std::string> read_line(std::string& rest, std::chrono::seconds limit) {
  const net::Deadline deadline = net::deadline_in(limit);
  while (true) {
    if (const auto end = rest.find('\n'); end != std::string::npos) {
      std::string line = rest.substr(0, end);
      rest.erase(0, end + 1);
      return line;
    }
    if (rest.size() > kLongestOrder || !net::wait_ready(0, POLLIN, deadline).value_or(false)) return std::nullopt;
    std::string piece(std::size_t{64} << 10, '\0');
    const ssize_t got = ::read(0, piece.data(), piece.size());
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got <= 0) return std::nullopt;
    rest.append(piece, 0, static_cast<std::size_t>(got));
  }
}

bool answer(std::string_view to, const std::string& data) {
  const std::string line = fmt::format("\n{}{{\"did\":\"{}\",\"data\":{}}}\n", kAnswerMark, to, data);
  return sys::write_all(1, line);
}

HostFacts look_around(const json& order, const ProbeServer& server) {
  const launch::Environment environment = launch::Environment::current();
  HostFacts facts;
  facts.name = sys::host_name();
  facts.port = server.port();
  std::vector<std::string> names = {facts.name};
  for (const json& name : order.at("names")) names.push_back(name.get<std::string>());
  const std::string folder = order.at("folder").get<std::string>();
  // These functions wait for other hosts or take long, so they run in parallel.
  std::jthread lookups = beside([&] { facts.names = resolve_names(names, kNameLimit); });
  std::jthread programs = beside([&] { facts.software = probe_software(environment, kProgramLimit); });
  facts.networks = probe_networks(facts.network_error);
  facts.limits = probe_limits();
  // This process has a worker's soft limit, like a job's ranks.
  facts.machine = probe_machine("");
  facts.folder = probe_folder(folder);
  probe_gpus(facts.machine, "", kProgramLimit);
  probe_gpu_links(facts.machine, "", kProgramLimit);
  probe_nccl(facts.machine);
  facts.environment = variables_that_matter(environment);
  for (std::jthread* const thread : {&lookups, &programs}) {
    if (thread->joinable()) thread->join();
  }
  return facts;
}

/// Returns whether a file that another host has made is seen here; a file system over a network may need a moment.
bool sees(const std::string& path, const std::string& content) {
  for (int tries = 0; tries < 15; ++tries) {
    std::ifstream file(path);
    std::string text;
    if (file && std::getline(file, text)) return text == content;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return false;
}

/// nlohmann would convert 4e26 to an int with undefined behaviour.
int whole(const json& said) {
  const bool fits = said.is_number_unsigned() ? said.get<std::uint64_t>() <= std::numeric_limits<int>::max()
                                              : said.is_number_integer() && said.get<std::int64_t>() >= -1;
  if (!fits)
    raise(ErrorCode::Corrupt, "an order of `cohort doctor` is none: {} is no number that it gives", said.dump());
  return said.get<int>();
}

bool obey(const json& order, int host, const net::Secret& secret, const ProbeServer& server) {
  const std::string what = order.at("do").get<std::string>();
  if (what == "facts") return answer(what, to_json(look_around(order, server)));
  if (what == "clock") return answer(what, fmt::format("{:.6f}", launch::seconds_now()));
  if (what == "see") {
    const bool seen = sees(order.at("path").get<std::string>(), order.at("content").get<std::string>());
    return answer(what, seen ? "true" : "false");
  }
  if (what == "probe") {
    std::vector<PeerAddress> addresses;
    for (const json& each : order.at("peers"))
      addresses.push_back({whole(each.at(0)), each.at(1).get<std::string>(), whole(each.at(2))});
    return answer(what, to_json(probe(addresses, secret, kProbeBegins)));
  }
  if (what == "measure") {
    SpeedRequest request;
    request.from = host;
    request.to = whole(order.at("to"));
    request.address = order.at("address").get<std::string>();
    request.port = whole(order.at("port"));
    return answer(what, to_json(measure(request, secret)));
  }
  log::info("doctor", "there is no order '{}'", what);
  return true;
}

}  // namespace

int run_doctor_host() {
  const auto descriptor = env::number(env::kSecretFd);
  const auto host = env::number(env::kRank);
  if (!descriptor || !host)
    raise(ErrorCode::Unavailable, "`cohort doctor-host` is started by `cohort doctor`, through its agents");
  const net::Secret secret = value_or_throw(net::Secret::from_sealed_memfd(*descriptor));
  const ProbeServer server = value_or_throw(ProbeServer::open(*host, secret));
  std::string rest;
  std::chrono::seconds idle = kIdleLimit;
  while (const auto line = read_line(rest, idle)) {
    const json order = parse_json_or_discard(*line);
    try {
      if (order.is_object() && order.contains("stay"))
        idle = std::clamp(std::chrono::seconds(order.at("stay").get<std::int64_t>()), kIdleLimit, kLongestIdle);
      if (!order.is_object() || !obey(order, *host, secret, server)) return 1;
    } catch (const json::exception& error) {
      raise(ErrorCode::Corrupt, "an order of `cohort doctor` is none: {}", error.what());
    }
  }
  return 0;
}

}  // namespace cohort::doctor
