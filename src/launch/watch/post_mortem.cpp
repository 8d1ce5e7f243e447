#include "launch/watch/post_mortem.h"

#include <cohort/exit_status.h>

#include "base/ranges.h"
#include "launch/watch/advice.h"
#include "sys/signals.h"

#include <algorithm>
#include <csignal>
#include <string_view>
#include <tuple>

namespace cohort::launch {
namespace {

bool struck(const Ending& ending) { return ending.status.signal != 0 && ending.status.signal != SIGABRT; }

std::string quoted(std::string_view rest) {
  std::string text;
  while (!rest.empty()) {
    const auto end = rest.find('\n');
    text += fmt::format("cohort:   > {}\n", rest.substr(0, end));
    if (end == std::string_view::npos) break;
    rest.remove_prefix(end + 1);
  }
  return text;
}

std::string_view last_line(std::string_view text) {
  while (text.ends_with('\n')) text.remove_suffix(1);
  const auto begin = text.rfind('\n');
  return begin == std::string_view::npos ? text : text.substr(begin + 1);
}

}  // namespace

bool follows_another(const Ending& ending) {
  if (ending.status.success() || struck(ending)) return false;
  if (ending.cause.code >= 0) {
    const auto code = static_cast<ErrorCode>(ending.cause.code);
    return code == ErrorCode::PeerLost || code == ErrorCode::Aborted;
  }
  const std::string& text = ending.words.empty() ? ending.last_stderr : ending.words;
  constexpr std::string_view kOfGloo = "Connection closed by peer";
  constexpr std::string_view kOfSockets = "Connection reset by peer";
  return text.find(kOfGloo) != std::string::npos || text.find(kOfSockets) != std::string::npos;
}

bool asks_for_requeue(const Ending& ending) {
  return ending.status.signal == 0 && ending.status.code == kRequeueStatus;
}

bool has_ended_well(const Ending& ending) {
  if (ending.spared) return true;
  if (ending.status.success() || asks_for_requeue(ending)) return true;
  if (!ending.asked) return false;
  // What follows SIGTERM where the time is over is told when it happens. (A shell gives its command's.)
  const int signal = ending.status.signal != 0 ? ending.status.signal : ending.status.code - 128;
  return signal == SIGTERM || signal == SIGKILL;
}

std::optional<Ending> first_failure(const std::vector<Ending>& endings) {
  const auto order = [](const Ending& ending) {
    return std::tuple(!ending.before_stop, follows_another(ending), !struck(ending), ending.after_seconds, ending.role,
                      ending.rank);
  };
  std::optional<Ending> first;
  for (const Ending& ending : endings) {
    if (has_ended_well(ending)) continue;
    if (!first || order(ending) < order(*first)) first = ending;
  }
  return first;
}

std::string doing(const Ending& ending) {
  if (ending.role == Role::Worker || !ending.last.groups.empty()) return doing(ending.last);
  return fmt::format("running, in no world, as {}s are", to_string(ending.role));
}

std::string to_string(const PostMortem& post_mortem) {
  const Ending& first = post_mortem.first;
  const char* const strong = post_mortem.colour ? "\033[1;31m" : "";
  const char* const plain = post_mortem.colour ? "\033[0m" : "";
  std::string text;
  if (const std::vector<int>& missed = post_mortem.missed; !missed.empty()) {
    const bool one = missed.size() == 1;
    text += fmt::format(
        "cohort: {}rank{} {} had ended with 0 while {} went on{}: do all ranks take the same number of steps?\n",
        strong, one ? "" : "s", to_ranges(missed), first.name(), plain);
  }
  text += fmt::format("cohort: {}{} failed{}: {} (host {}, pid {}) after {:.1f} s\n", strong, first.name(), plain,
                      sys::to_string(first.status), first.host, first.pid, first.after_seconds);
  if (first.asked) text += "cohort:   it had been asked to end, since the workers were done\n";
  if (first.restarts > 0) {
    text += fmt::format("cohort:   it had been started again {} time{}; the first time it had failed by: {}\n",
                        first.restarts, first.restarts == 1 ? "" : "s", first.first_cause);
  }
  if (first.last.joined) text += fmt::format("cohort:   it was {}{}\n", doing(first), at_step(first.last));
  if (first.last_stderr.empty()) {
    text += "cohort:   it wrote nothing to stderr\n";
  } else {
    text += "cohort:   the last lines of its stderr:\n" + quoted(first.last_stderr);
  }
  // Mostly it is in those lines already: the runtime prints it, too.
  if (!first.words.empty() && first.last_stderr.find(last_line(first.words)) == std::string::npos) {
    text += "cohort:   what ended it, as it said itself:\n" + quoted(first.words);
  }
  if (!post_mortem.missed.empty()) {
    text +=
        "cohort:   a DistributedSampler gives each rank as many; a loop over data that was split otherwise, or one "
        "that "
        "some ranks leave, does not\n";
  } else if (const std::string why = advice(first); !why.empty())
    text += fmt::format("cohort:   {}\n", why);
  const bool of_ranks = first.role == Role::Worker;
  const int others = post_mortem.world_size - (of_ranks ? 1 : 0) - post_mortem.ended_well - post_mortem.running;
  if (others > 0)
    text +=
        fmt::format("cohort:   {} {}rank{} ended with it\n", others, of_ranks ? "other " : "", others == 1 ? "" : "s");
  if (post_mortem.running > 0) {
    text += fmt::format("cohort:   {} rank{} being told to end\n", post_mortem.running,
                        post_mortem.running == 1 ? " is" : "s are");
  }
  for (const std::string& line : post_mortem.others) text += fmt::format("cohort:   then, {}\n", line);
  if (!post_mortem.log_folder.empty()) {
    text += fmt::format("cohort:   complete logs: {}/{}.err and beside it\n", post_mortem.log_folder,
                        file_name(first.role, first.rank));
  }
  return text;
}

}  // namespace cohort::launch
