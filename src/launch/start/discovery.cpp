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

Discovery::Discovery(Loop& loop, const JobSpec& spec, StartMethod method) : loop_(loop), spec_(spec), method_(method) {
  next_ = Timer(loop_, {}, [this] { look(); });
}

void Discovery::look() {
  text_.clear();
  SideCommand::Options options;
  options.shell = spec_.elastic.script;
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
  news_.trouble = fmt::format("--host-discovery-script {}: {}; the hosts stay as they are", spec_.elastic.script, why);
}

void Discovery::on_ended(const sys::ExitStatus& status) {
  script_.reset();
  if (!status.success()) return fail(sys::to_string(status));
  if (text_.size() > kMostListed) return fail("it prints more than 1 MiB");
  auto hosts = listed_hosts(spec_, method_, text_);
  if (!hosts) return fail(hosts.error().what());
  trouble_.clear();
  look_again();
  news_.hosts = *std::move(hosts);
}

std::vector<PlannedHost> discover_hosts(const JobSpec& spec, StartMethod method, int least,
                                        std::chrono::milliseconds limit) {
  Loop loop;
  std::vector<PlannedHost> found;
  std::string trouble;
  Discovery discovery(loop, spec, method);
  for (const net::Deadline end = net::deadline_in(limit); !net::passed(end);) {
    loop.run_for(end - std::chrono::steady_clock::now());
    Discovery::News news = discovery.take();
    if (!news.trouble.empty()) trouble = "; " + news.trouble;
    if (!news.hosts) continue;
    found = *std::move(news.hosts);
    trouble.clear();
    if (sum_of_slots(found) >= least) return found;
  }
  const int slots = sum_of_slots(found);
  raise(ErrorCode::Unavailable,
        "--host-discovery-script {}: its hosts take {} rank{} after {:g} s, and {} are wanted (--start-timeout){}",
        spec.elastic.script, slots, slots == 1 ? "" : "s", std::chrono::duration<double>(limit).count(), least,
        trouble);
}

}  // namespace cohort::launch
