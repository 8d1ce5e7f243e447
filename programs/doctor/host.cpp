#include "doctor/examination.h"

#include "base/env.h"
#include "base/files.h"
#include "base/hardware.h"
#include "base/json.h"
#include "base/log.h"
#include "doctor/facts.h"
#include "doctor/peers.h"
#include "doctor/probe.h"
#include "net/socket.h"

#include <poll.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <thread>

namespace cohort::doctor {
namespace {

using nlohmann::json;

/// How long to wait for an order, until one says how rarely they come: where stdin is held open by another process,
/// this one does not stay.
constexpr std::chrono::seconds kIdleLimit(60);
constexpr std::chrono::seconds kLongestIdle(3600);
constexpr std::chrono::milliseconds kProgramLimit(3500);
constexpr std::chrono::milliseconds kNameLimit(3000);
/// Below the examination's limit by what a knock may take.
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
  // They wait for others, or take their time: side by side.
  std::jthread lookups = beside([&] { facts.names = resolve_names(names, kNameLimit); });
  std::jthread programs = beside([&] { facts.software = probe_software(environment, kProgramLimit); });
  facts.networks = probe_networks(facts.network_error);
  facts.limits = probe_limits();
  // The soft limit here is a worker's, as a job's ranks have it.
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

/// Whether a file that another host has made is seen here; a file system over a network may need a moment.
bool sees(const std::string& path, const std::string& content) {
  for (int tries = 0; tries < 15; ++tries) {
    std::ifstream file(path);
    std::string text;
    if (file && std::getline(file, text)) return text == content;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return false;
}

/// nlohmann would convert 4e26 to an int as the language does, by undefined behaviour.
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
  if (what == "clock") return answer(what, fmt::format("{:.6f}", wall_clock()));
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

double wall_clock() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

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
