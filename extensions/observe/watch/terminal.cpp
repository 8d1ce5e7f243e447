#include "observe/watch/screen.h"

#include "base/files.h"
#include "base/signals.h"
#include "base/terminal.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort::watch {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Time between two looks at the files.
constexpr milliseconds kLook{200};

bool put(std::string_view bytes) { return sys::write_all(1, bytes); }

/// Uses the alternate screen, without cursor and echo, until destruction.
class Screen {
 public:
  Screen() : guard_(0) { enter(); }
  ~Screen() { leave(); }
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  void enter() {
    termios settings{};
    if (::tcgetattr(0, &settings) == 0) {
      before_ = settings;
      settings.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
      settings.c_cc[VMIN] = 1;
      settings.c_cc[VTIME] = 0;
      ::tcsetattr(0, TCSANOW, &settings);
    }
    put("\033[?1049h\033[?25l\033[?7l\033[2J");
    shown_.clear();
  }
  void leave() {
    put("\033[?7h\033[?25h\033[?1049l");
    ::tcsetattr(0, TCSANOW, &before_);
  }
  /// Lines that have not changed are not written again.
  bool show(const std::vector<std::string>& lines, std::size_t rows) {
    std::string out;
    for (std::size_t i = 0; i < rows; ++i) {
      const std::string& line = i < lines.size() ? lines[i] : std::string();
      if (i < shown_.size() && shown_[i] == line) continue;
      out += "\033[" + std::to_string(i + 1) + ";1H" + line + "\033[K";
    }
    shown_ = lines;
    shown_.resize(rows);
    return out.empty() || put(out);
  }
  void forget() {
    shown_.clear();
    put("\033[2J");
  }

 private:
  sys::TerminalGuard guard_;
  termios before_{};
  std::vector<std::string> shown_;
};

enum class Key { None, Quit, Sort, Hosts, Freeze, Up, Down, PageUp, PageDown, Home, End, Enter, Back, Stream };

/// Decodes typed keys: letters, and terminals' sequences for other keys.
std::vector<Key> keys_of(std::string_view typed) {
  static constexpr std::pair<std::string_view, Key> kKeys[] = {
      {"\033[A", Key::Up},   {"\033OA", Key::Up},      {"\033[B", Key::Down},
      {"\033OB", Key::Down}, {"\033[5~", Key::PageUp}, {"\033[6~", Key::PageDown},
      {"\033[H", Key::Home}, {"\033OH", Key::Home},    {"\033[F", Key::End},
      {"\033OF", Key::End},  {"\033[C", Key::Enter},   {"\033OC", Key::Enter},
      {"\033[D", Key::Back}, {"\033OD", Key::Back},    {"\r", Key::Enter},
      {"\n", Key::Enter},    {"q", Key::Quit},         {"s", Key::Sort},
      {"h", Key::Hosts},     {"f", Key::Freeze},       {" ", Key::Freeze},
      {"k", Key::Up},        {"j", Key::Down},         {"l", Key::Enter},
      {"b", Key::Back},      {"\x7f", Key::Back},      {"e", Key::Stream},
      {"g", Key::Home},      {"G", Key::End},          {"\033", Key::Back}};
  std::vector<Key> keys;
  while (!typed.empty()) {
    const auto known = std::find_if(std::begin(kKeys), std::end(kKeys),
                                    [typed](const auto& key) { return typed.starts_with(key.first); });
    if (known != std::end(kKeys)) keys.push_back(known->second);
    typed.remove_prefix(known != std::end(kKeys) ? known->first.size() : 1);
  }
  return keys;
}

class Viewer {
 public:
  Viewer(Source& source, const WatchOptions& options) : source_(source) {
    look_.unicode = !options.ascii && sys::speaks_unicode();
    look_.colour = sys::wants_colour(1);
  }

  int run() {
    sys::SignalFd signals =
        value_or_throw(sys::SignalFd::create({SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGWINCH, SIGTSTP, SIGCONT}));
    Screen screen;
    measure();
    source_.poll();
    // The run's size decides the initial choice; `h` changes it.
    if (source_.view().run.ranks.size() > kManyRanks) look_.shown = Rows::Hosts;
    view_ = source_.view();
    auto next = Clock::now();
    while (true) {
      if (Clock::now() >= next) {
        next = Clock::now() + kLook;
        if (source_.poll() && !look_.frozen) view_ = source_.view();
        if (log_shown_ && !look_.frozen) log_ = source_.log(log_rank_, stream_, static_cast<std::size_t>(look_.rows));
      }
      look_.now = look_.frozen ? view_.run.time : source_.now();
      look_.log = log_shown_ ? &log_ : nullptr;
      look_.trouble = source_.trouble();
      if (!screen.show(draw(view_, look_), static_cast<std::size_t>(look_.rows))) return 0;
      pollfd waiting[2] = {{0, POLLIN, 0}, {signals.fd(), POLLIN, 0}};
      const auto left = std::chrono::duration_cast<milliseconds>(next - Clock::now()).count();
      ::poll(waiting, 2, static_cast<int>(std::clamp<long>(left, 0, kLook.count())) + 1);
      while (const auto signal = signals.next()) {
        if (*signal == SIGWINCH) {
          measure();
          screen.forget();
        } else if (*signal == SIGTSTP) {
          screen.leave();
          ::raise(SIGSTOP);
          screen.enter();
          measure();
        } else if (*signal != SIGCONT) {
          return *signal == SIGINT ? 0 : 128 + *signal;
        }
      }
      if ((waiting[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0 && !take_keys()) return 0;
    }
  }

 private:
  void measure() {
    winsize size{};
    const bool known = ::ioctl(1, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 && size.ws_row > 0;
    look_.columns = known ? size.ws_col : 80;
    look_.rows = known ? size.ws_row : 24;
  }

  bool take_keys() {
    char typed[256];
    const ssize_t got = ::read(0, typed, sizeof typed);
    if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) return false;
    for (const Key key : keys_of({typed, static_cast<std::size_t>(std::max<ssize_t>(got, 0))})) {
      if (key == Key::Quit) return false;
      take(key);
    }
    return true;
  }

  void take(Key key) {
    const std::vector<std::size_t> order = order_of(view_, look_);
    const std::size_t last = order.empty() ? 0 : order.size() - 1;
    const auto page = static_cast<std::size_t>(std::max(look_.rows - 6, 1));
    std::size_t& at = look_.selected;
    at = std::min(at, last);
    switch (key) {
      case Key::Sort: look_.sort = watch::next(look_.sort); break;
      case Key::Hosts:
        look_.shown = look_.shown == Rows::Hosts ? Rows::Ranks : Rows::Hosts;
        look_.host.reset();
        log_shown_ = false;
        at = 0;
        break;
      case Key::Freeze: look_.frozen = !look_.frozen; break;
      case Key::Up: at -= at > 0 ? 1 : 0; break;
      case Key::Down: at = std::min(at + 1, last); break;
      case Key::PageUp: at -= std::min(at, page); break;
      case Key::PageDown: at = std::min(at + page, last); break;
      case Key::Home: at = 0; break;
      case Key::End: at = last; break;
      case Key::Stream:
        stream_ = stream_ == launch::Stream::Stdout ? launch::Stream::Stderr : launch::Stream::Stdout;
        if (log_shown_) show_log(log_rank_);
        break;
      case Key::Enter:
        if (order.empty() || log_shown_) break;
        if (look_.shown == Rows::Hosts && !look_.host) {
          look_.host = order[at];
          at = 0;
        } else {
          show_log(static_cast<int>(order[at]));
        }
        break;
      case Key::Back:
        if (std::exchange(log_shown_, false)) break;
        if (look_.host) at = *look_.host;
        look_.host.reset();
        break;
      default: break;
    }
  }

  void show_log(int rank) {
    log_shown_ = true;
    log_rank_ = rank;
    log_ = source_.log(rank, stream_, static_cast<std::size_t>(look_.rows));
  }

  Source& source_;
  Look look_;
  View view_;
  bool log_shown_ = false;
  int log_rank_ = 0;
  launch::Stream stream_ = launch::Stream::Stdout;
  LogTail log_;
};

/// For pipes and dumb terminals: writes a line after each change, until the run has ended.
int write_lines(Source& source, const WatchOptions& options) {
  sys::SignalFd signals = value_or_throw(sys::SignalFd::create({SIGINT, SIGTERM, SIGHUP}));
  const auto patience = Clock::now() + std::chrono::seconds(10);
  source.poll();
  // Waits, since a run that has just started will soon make its live.json.
  while (!source.trouble().empty() && Clock::now() < patience) {
    pollfd waiting{signals.fd(), POLLIN, 0};
    if (::poll(&waiting, 1, static_cast<int>(kLook.count())) > 0) return 0;
    source.poll();
  }
  if (const std::string trouble = source.trouble(); !trouble.empty())
    raise(ErrorCode::Unavailable, "watching {} failed -- {}", source.view().place, trouble);
  if (options.once) {
    Look look;
    look.columns = 160;
    look.rows = 0;
    look.keys = look.colour = false;
    look.unicode = !options.ascii && sys::speaks_unicode();
    look.now = source.now();
    if (source.view().run.ranks.size() > kManyRanks) look.shown = Rows::Hosts;
    std::string out;
    for (const std::string& line : draw(source.view(), look)) out += line + "\n";
    put(out);
    return 0;
  }
  double told = -1;
  while (true) {
    const View& view = source.view();
    const bool ended = view.run.state == "ended";
    if (view.run.time != told || ended) {
      told = view.run.time;
      if (!put(fitted(line_of(view, source.now()), 1000, !options.ascii) + "\n")) return 0;
    }
    if (ended) return 0;
    for (auto until = Clock::now() + options.interval; Clock::now() < until && source.view().run.state != "ended";) {
      pollfd waiting{signals.fd(), POLLIN, 0};
      if (::poll(&waiting, 1, static_cast<int>(kLook.count())) > 0) return 0;
      source.poll();
    }
  }
}

}  // namespace

int watch(Source& source, const WatchOptions& options) {
  const char* const kind = std::getenv("TERM");
  const bool terminal = ::isatty(0) != 0 && ::isatty(1) != 0 && kind != nullptr && std::string_view(kind) != "dumb";
  if (options.once || !terminal) return write_lines(source, options);
  return Viewer(source, options).run();
}

}  // namespace cohort::watch
