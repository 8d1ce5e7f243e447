#include "launch/start/discovery.h"

#include "launch/start/hosts.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <utility>

namespace cohort::launch {
namespace {

constexpr auto kDiscoverEvery = std::chrono::seconds(1);
constexpr auto kScriptTime = std::chrono::seconds(30);
constexpr std::size_t kMostListed = std::size_t{1} << 20;

}  // namespace

Discovery::Discovery(Loop& loop, const JobSpec& spec, StartMethod method, Events events)
    : loop_(loop), spec_(spec), method_(method), events_(std::move(events)) {
  next_ = Timer(loop_, {}, [this] { look(); });
}

void Discovery::look() {
  text_.clear();
  SideCommand::Options options;
  options.spawn.path = "/bin/sh";
  options.spawn.arguments = {"sh", "-c", spec_.elastic.script};
  options.spawn.environment = Environment::current().assignments();
  options.spawn.group = sys::Group::Session;
  options.spawn.parent_death_signal = SIGKILL;
  options.output = SideCommand::Options::Output::Results;
  options.on_output = [this](std::string_view bytes) {
    if (text_.size() <= kMostListed) text_.append(bytes);
  };
  options.on_ended = [this](const sys::ExitStatus& status) { on_ended(status); };
  try {
    script_.emplace(loop_, std::move(options));
  } catch (const Error& error) {
    return fail(error.what());
  }
  late_ = Timer(loop_, kScriptTime, [this] {
    script_.reset();
    fail(fmt::format("it has not ended within {} s", kScriptTime.count()));
  });
}

void Discovery::look_again() {
  late_ = Timer();
  next_ = Timer(loop_, kDiscoverEvery, [this] { look(); });
}

void Discovery::fail(const std::string& why) {
  look_again();
  if (std::exchange(trouble_, why) == why) return;
  events_.on_trouble(
      fmt::format("--host-discovery-script {}: {}; the hosts stay as they are", spec_.elastic.script, why));
}

void Discovery::on_ended(const sys::ExitStatus& status) {
  script_.reset();
  if (!status.success()) return fail(sys::to_string(status));
  if (text_.size() > kMostListed) return fail("it prints more than 1 MiB");
  const auto hosts = listed_hosts(spec_, method_, text_);
  if (!hosts) return fail(hosts.error().what());
  trouble_.clear();
  look_again();
  const auto tell = events_.on_hosts;  // which may end this
  tell(*hosts);
}

std::vector<PlannedHost> discover_hosts(const JobSpec& spec, StartMethod method, int least,
                                        std::chrono::milliseconds limit) {
  Loop loop;
  std::vector<PlannedHost> found;
  std::string trouble;
  bool enough = false;
  const auto slots = [&found] {
    int sum = 0;
    for (const PlannedHost& host : found) sum += host.slots;
    return sum;
  };
  Discovery::Events events;
  events.on_hosts = [&](const std::vector<PlannedHost>& hosts) {
    found = hosts;
    trouble.clear();
    enough = slots() >= least;
    if (enough) loop.stop();
  };
  events.on_trouble = [&trouble](const std::string& why) { trouble = "; " + why; };
  const Timer late(loop, limit, [&loop] { loop.stop(); });
  const Discovery discovery(loop, spec, method, std::move(events));
  loop.run();
  if (enough) return found;
  raise(ErrorCode::Unavailable,
        "--host-discovery-script {}: its hosts take {} rank{} after {:g} s, and {} are wanted (--start-timeout){}",
        spec.elastic.script, slots(), slots() == 1 ? "" : "s", std::chrono::duration<double>(limit).count(), least,
        trouble);
}

}  // namespace cohort::launch
