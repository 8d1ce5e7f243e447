#include "launch/watch/post_mortem.h"

#include <cohort/exit_status.h>

#include "base/parse.h"
#include "launch/watch/advice.h"
#include "status/last_words.h"
#include "sys/signals.h"

#include <algorithm>
#include <csignal>
#include <string_view>
#include <tuple>

namespace cohort::launch {
namespace {

bool struck(const Ending& ending) { return ending.status.signal != 0 && ending.status.signal != SIGABRT; }

std::string indented(std::string_view rest) {
  std::string text;
  while (!rest.empty()) {
    const auto end = rest.find('\n');
    text += fmt::format("cohort:   > {}\n", rest.substr(0, end));
    if (end == std::string_view::npos) break;
    rest.remove_prefix(end + 1);
  }
  return text;
}

/// What it said before its stack, which is for the log, and of that the frames that say most: a crash's first with
/// names. Nor the line of an error's fields, which its text has.
std::string essence(const std::string& words, bool logged) {
  if (!logged) return words;
  constexpr std::size_t kFrames = 3;
  const std::size_t thrown = words.find(status::kThrowStack), native = words.find(status::kNativeStack);
  const std::string_view all = words;
  std::string text;
  const auto take = [&text](std::string_view from, const auto& wanted) {
    while (!from.empty()) {
      const std::size_t end = std::min(from.find('\n'), from.size() - 1) + 1;
      if (wanted(from.substr(0, end))) text += from.substr(0, end);
      from.remove_prefix(end);
    }
  };
  take(all.substr(0, std::min(thrown, native)), [](std::string_view line) { return !line.starts_with("  code "); });
  std::size_t frames = 0;
  if (native != std::string_view::npos) {
    take(all.substr(native + status::kNativeStack.size()), [&frames](std::string_view line) {
      return line.find(" in ") != std::string_view::npos && ++frames <= kFrames;
    });
  }
  return text;
}

/// stderr without what the last words say.
std::string without(std::string_view words, std::string_view errors) {
  std::string text;
  while (!errors.empty()) {
    const std::size_t end = std::min(errors.find('\n'), errors.size() - 1) + 1;
    std::string_view line = errors.substr(0, end);
    errors.remove_prefix(end);
    std::string_view bare = line.substr(0, line.find_last_not_of('\n') + 1);
    constexpr std::string_view kWhat = "  what():  ";
    if (bare.starts_with(kWhat)) bare.remove_prefix(kWhat.size());
    const bool of_runtime = bare.starts_with("terminate called ");
    if (!of_runtime && (bare.empty() || words.find(bare) == std::string_view::npos)) text += line;
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

bool is_exception(const Ending& ending) { return ending.words.starts_with(status::kUncaught); }

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
  if (first.last.joined) {
    const char* const verb = has_left(first.last) ? "had" : "was";
    text += fmt::format("cohort:   it {} {}{}\n", verb, doing(first), at_step(first.last));
  }
  // Each sentence once: a Python traceback is on stderr, what a C++ runtime prints of an exception is in the words.
  std::string words = essence(first.words, !post_mortem.log_folder.empty());
  if (!words.empty() && !is_exception(first) && first.last_stderr.find(last_line(words)) != std::string::npos)
    words = "";
  const std::string errors = words.empty() ? first.last_stderr : without(words, first.last_stderr);
  if (!errors.empty()) {
    text += "cohort:   the last lines of its stderr:\n" + indented(errors);
  } else if (words.empty()) {
    text += "cohort:   it wrote nothing to stderr\n";
  }
  if (!words.empty()) text += "cohort:   its own last words:\n" + indented(words);
  if (!post_mortem.missed.empty()) {
    text +=
        "cohort:   a DistributedSampler gives each rank as many; a loop over data that was split otherwise, or one "
        "that "
        "some ranks leave, does not\n";
  } else if (const std::string why = advice(first); !why.empty())
    text += fmt::format("cohort:   {}\n", why);
  const bool of_ranks = first.role == Role::Worker;
  const int others = post_mortem.world_size - (of_ranks ? 1 : 0) - post_mortem.ended_well - post_mortem.running;
  if (others > 0) {
    text += fmt::format("cohort:   {} {}rank{} ended as a result\n", others, of_ranks ? "other " : "",
                        others == 1 ? " was" : "s were");
  }
  if (post_mortem.running > 0) {
    text += fmt::format("cohort:   {} rank{} being told to end\n", post_mortem.running,
                        post_mortem.running == 1 ? " is" : "s are");
  }
  for (const std::string& line : post_mortem.others) text += fmt::format("cohort:   then, {}\n", line);
  if (!post_mortem.log_folder.empty()) {
    text += fmt::format("cohort:   full logs: {}\n", post_mortem.log_folder);
  }
  return text;
}

}  // namespace cohort::launch
