#include "doctor/facts.h"
#include "base/json.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string_view>

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

/// What a host says can hardly be longer.
constexpr std::size_t kLongest = std::size_t{4} << 20;
/// More than so many of anything is no host.
constexpr std::size_t kMost = 4096;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 60;

template <class T>
std::string dumped(const T& value) {
  // Names and versions may hold any bytes.
  return nlohmann::json(value).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

/// What may have a fraction; all other numbers are whole.
constexpr std::array<std::string_view, 5> kReals = {"quota", "load", "milliseconds", "there", "back"};

/// Deeper than so much nesting is nothing that a host says.
constexpr int kDeepest = 8;

/// Whether whole numbers are whole, and of 64 bits: nlohmann would convert 4e26 to an int as the language does, by
/// undefined behaviour.
bool numbers_are_whole(const nlohmann::json& said, int depth = 0) {
  if (depth > kDeepest) return false;
  // Beyond 2^63 whole numbers are converted to negative ones, and compare equal to them.
  constexpr auto kMostWhole = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (said.is_number_unsigned()) return said.get<std::uint64_t>() <= kMostWhole;
  if (!said.is_structured()) return !said.is_number_float();
  for (const auto& [name, value] : said.items()) {
    const bool real = value.is_number_float() && std::find(kReals.begin(), kReals.end(), name) != kReals.end();
    if (!real && !numbers_are_whole(value, depth + 1)) return false;
  }
  return true;
}

/// Whether all that we know of was understood as it was said: a number too large for its field is not.
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

}  // namespace cohort::doctor
