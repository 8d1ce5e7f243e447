// What hosts are asked for, one thing after the other: the time, a file, each other's addresses, and how fast they are.
#include "doctor/examination_impl.h"
#include "doctor/host.h"
#include "doctor/rounds.h"
#include "doctor/shared_file.h"

#include <nlohmann/json.hpp>

#include <utility>

namespace cohort::doctor {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kClockLimit(1500);
constexpr int kClockRounds = 3;
constexpr milliseconds kFolderLimit(3500);
constexpr milliseconds kProbeLimit(10000);
constexpr milliseconds kSpeedLimit(3500);
/// Above so many hosts only neighbours measure their speed.
constexpr std::size_t kAllPairs = 8;

}  // namespace

void Examination::compare_clocks() {
  for (int round = 0; round < kClockRounds; ++round) {
    for (const std::size_t at : all_ready()) {
      if (state(at).here) continue;
      ask(at, {{"do", "clock"}}, [this, at](const std::string& data) {
        const json said = json::parse(data, nullptr, false);
        if (!said.is_number()) return;
        const double now = wall_clock();
        const double error = (now - examined_[at].asked_at) / 2;
        if (state(at).clock_offset && state(at).clock_error <= error) return;
        state(at).clock_offset = said.get<double>() - (examined_[at].asked_at + now) / 2;
        state(at).clock_error = error;
      });
    }
    wait_for_answers(kClockLimit * 2, "when it was asked for the time");
  }
}

void Examination::compare_folders() {
  if (!checkup_.several_hosts && checkup_.hosts.front().here) return;
  const SharedFile shared_file;
  if (!shared_file) return;  // the row about the folder says why, if this host is among them
  for (const std::size_t at : all_ready()) {
    if (state(at).here || !state(at).facts->folder.error.empty()) continue;
    ask(at, {{"do", "see"}, {"path", shared_file.path()}, {"content", shared_file.content()}},
        [this, at](const std::string& data) { state(at).same_folder = data == "true"; });
  }
  wait_for_answers(kFolderLimit, "when it looked for a file");
}

void Examination::probe_peers() {
  const auto hosts = all_ready();
  if (hosts.size() < 2) return;
  for (const std::size_t from : hosts) {
    json peers = json::array();
    for (const std::size_t to : hosts) {
      if (to == from) continue;
      for (const NetworkFacts& network : state(to).facts->networks)
        peers.push_back({to, network.address, state(to).facts->port});
    }
    ask(from, {{"do", "probe"}, {"peers", std::move(peers)}}, [this, from](const std::string& data) {
      auto probes = parse_probes(data);
      if (!probes) return give_up(from, "lost", probes.error().what(), "");
      for (ProbeFacts& probe : *probes) {
        if (static_cast<std::size_t>(probe.peer) >= examined_.size()) continue;
        if (state(static_cast<std::size_t>(probe.peer)).facts)
          checkup_.probes.push_back({static_cast<int>(from), std::move(probe)});
      }
    });
  }
  std::vector<bool> told(examined_.size());
  wait_for_answers(kProbeLimit, "while it knocked at the others");
  for (const auto& probe : checkup_.probes) told[static_cast<std::size_t>(probe.from)] = true;
  for (const std::size_t from : hosts) {
    if (!told[from]) checkup_.silent.push_back(static_cast<int>(from));
  }
}

void Examination::measure_speeds() {
  const auto hosts = all_ready();
  for (const auto& round : rounds_of_pairs(hosts.size(), hosts.size() <= kAllPairs)) {
    for (const auto& [first, second] : round) {
      std::size_t from = hosts[first], to = hosts[second];
      const ProbeFacts* way = chosen_way(checkup_, static_cast<int>(from), static_cast<int>(to));
      if (way == nullptr) {
        std::swap(from, to);
        way = chosen_way(checkup_, static_cast<int>(from), static_cast<int>(to));
      }
      if (way == nullptr || !ready(from) || !ready(to)) continue;
      ask(from, {{"do", "measure"}, {"to", to}, {"address", way->address}, {"port", state(to).facts->port}},
          [this, from, to](const std::string& data) {
            auto speed = parse_speed(data);
            if (!speed) return give_up(from, "lost", speed.error().what(), "");
            speed->from = static_cast<int>(from);
            speed->to = static_cast<int>(to);
            checkup_.speeds.push_back(*std::move(speed));
          });
    }
    // A way that is as slow as that is named; its host is not lost.
    wait_for_answers(kSpeedLimit * 2, "while it measured a way");
    if (signal_ != 0 || Clock::now() > begun_ + options_.whole_limit - kSpeedLimit) return;
  }
}

}  // namespace cohort::doctor
