#include "launch/health/elastic.h"

#include "base/parse.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

namespace cohort::launch {
namespace {

/// A member of the world before is older than all others, be they started earlier: it knows the training.
using Age = std::pair<bool, int>;
Age age_of(const Elastic::Worker& worker, const rendezvous::Membership& before) {
  return {!place_of(before, worker.number).has_value(), worker.number};
}

/// The age of each host's oldest worker.
std::map<int, Age> ages_of_hosts(const std::vector<Elastic::Worker>& workers, const rendezvous::Membership& before) {
  std::map<int, Age> ages;
  for (const Elastic::Worker& worker : workers) {
    const auto [at, fresh] = ages.try_emplace(worker.host, age_of(worker, before));
    at->second = std::min(at->second, age_of(worker, before));
  }
  return ages;
}

// Hosts in the order of their oldest workers, so that rank 0 is the oldest of all.
std::vector<rendezvous::Member> by_rank(std::vector<Elastic::Worker> workers, const rendezvous::Membership& before) {
  std::map<int, Age> hosts = ages_of_hosts(workers, before);
  std::ranges::sort(workers, {}, [&](const Elastic::Worker& worker) {
    return std::pair(hosts[worker.host], age_of(worker, before));
  });
  std::vector<rendezvous::Member> members;
  int host_number = -1;
  for (std::size_t i = 0; i < workers.size(); ++i) {
    if (i == 0 || workers[i].host != workers[i - 1].host) ++host_number;
    members.push_back({workers[i].number, workers[i].host_name, host_number});
  }
  return members;
}

}  // namespace

Elastic::Elastic(Limits limits, std::vector<Worker> workers) : limits_(limits), workers_(std::move(workers)) {
  current_.epoch = limits_.first_epoch;
  current_.members = by_rank(workers_, {});
  current_.cause = "the job's start";
}

bool Elastic::changes_are_used_up() const {
  return limits_.most_changes && changes() >= static_cast<std::uint64_t>(*limits_.most_changes);
}

int Elastic::room() const {
  if (over_ || finishing_ || changes_are_used_up()) return 0;
  return std::max(0, (limits_.most > 0 ? limits_.most : kMostProcesses) - size());
}

Result<void> Elastic::can_spare(int workers) const {
  if (over_) return fail(ErrorCode::Unavailable, "the job is about to end");
  if (finishing_) return fail(ErrorCode::Unavailable, "ranks have done their part: the job is about to end");
  if (waits_) return fail(ErrorCode::Unavailable, "the job has too few ranks, and waits for hosts");
  if (changes_are_used_up())
    return fail(ErrorCode::Unavailable, "its members have changed {} times (--reset-limit)", changes());
  if (size() - workers < limits_.least)
    return fail(ErrorCode::Unavailable, "fewer than --min-np {} would be left", limits_.least);
  return {};
}

bool Elastic::can_lose(int workers) const {
  if (over_ || finishing_ || changes_are_used_up() || size() <= workers) return false;
  return size() - workers >= limits_.least || limits_.others_may_come;
}

std::vector<int> Elastic::youngest_hosts_first() const {
  std::map<int, Age> ages = ages_of_hosts(workers_, current_);
  std::vector<int> hosts;
  for (const auto& [host, age] : ages) hosts.push_back(host);
  std::ranges::sort(hosts, std::greater<>(), [&ages](int host) { return ages[host]; });
  return hosts;
}

Elastic::Decision Elastic::end(std::string why) {
  over_ = true;
  waits_ = false;
  return {Decision::Kind::End, std::move(why)};
}

Elastic::Decision Elastic::announce(const std::string& cause) {
  if (changes_are_used_up())
    return end(fmt::format("its members have changed {} time{} (--reset-limit)", changes(), changes() == 1 ? "" : "s"));
  const auto fresh = std::ranges::count_if(
      workers_, [this](const Worker& one) { return !place_of(current_, one.number).has_value(); });
  sizes_ = fresh == 0 ? fmt::format("{} of {} workers", size(), current_.members.size())
                      : fmt::format("{} workers, {} of them new", size(), fresh);
  current_ = {current_.epoch + 1, by_rank(workers_, current_), cause};
  waits_ = false;
  return {Decision::Kind::Announce};
}

Elastic::Decision Elastic::leave(const std::vector<int>& workers, std::string cause,
                                 const std::vector<Worker>& spares) {
  const auto left = std::erase_if(workers_, [&workers](const Worker& worker) {
    return std::ranges::find(workers, worker.number) != workers.end();
  });
  if (left == 0 || over_) return {};
  // Those that have come since know nothing of the training yet.
  if (std::ranges::none_of(workers_, [this](const Worker& one) { return place_of(current_, one.number).has_value(); }))
    return end("no worker is left");
  if (const int taken = std::min(room(), static_cast<int>(spares.size()));
      taken > 0 && size() + taken >= limits_.least) {
    std::vector<int> numbers;
    for (int i = 0; i < taken; ++i) {
      workers_.push_back(spares[static_cast<std::size_t>(i)]);
      numbers.push_back(workers_.back().number);
    }
    cause += fmt::format("; worker{} {} {}", taken == 1 ? "" : "s", to_ranges(numbers),
                         taken == 1 ? "takes its place" : "take their place");
  }
  if (size() >= limits_.least) return announce(cause);
  const std::string few =
      fmt::format("{} worker{} left, and {} are wanted", size(), size() == 1 ? " is" : "s are", limits_.least);
  if (changes_are_used_up()) return end(fmt::format("{}; --reset-limit {} lets no others come", few, changes()));
  if (!limits_.others_may_come || finishing_) return end(few);
  if (std::exchange(waits_, true)) return {};
  return {Decision::Kind::Wait, few};
}

void Elastic::finish(int worker) {
  finishing_ = std::erase_if(workers_, [worker](const Worker& one) { return one.number == worker; }) > 0 || finishing_;
}

Elastic::Decision Elastic::leave_out_finished() {
  const auto goes_on = [this](const rendezvous::Member& member) {
    return std::ranges::any_of(workers_, [&](const Worker& one) { return one.number == member.worker; });
  };
  if (over_ || !finishing_ || workers_.empty() || std::ranges::all_of(current_.members, goes_on)) return {};
  return announce("others have done their part");
}

Elastic::Decision Elastic::come(const std::vector<Worker>& workers, const std::string& cause) {
  if (over_ || finishing_ || workers.empty()) return {};
  workers_.insert(workers_.end(), workers.begin(), workers.end());
  if (size() < limits_.least) return {};
  return announce(cause);
}

Elastic::Decision Elastic::give_up(const std::string& why) {
  if (!waits_) return {};
  return end(why);
}

}  // namespace cohort::launch
