// PMI version 1, as Hydra (MPICH, Intel MPI) and Slurm's pmi2 plug-in speak it: lines of words over an inherited
// socket. Spoken here and not through a library, since the libraries that exist are parts of an MPI.
#include "base/parse.h"
#include "meet/exchange.h"
#include "net/secret.h"
#include "net/socket.h"
#include "sys/unique_fd.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>

namespace cohort::meet {
namespace {

using Reply = std::map<std::string, std::string, std::less<>>;

constexpr std::size_t kLongestLine = 64 * 1024;
constexpr std::chrono::seconds kAnswer{30};  // of the launcher's process on this host
constexpr std::chrono::seconds kGoodBye{1};

class PmiExchange final : public Exchange {
 public:
  PmiExchange(sys::UniqueFd fd, int rank, int size)
      : fd_(std::move(fd)), process_(::getpid()), rank_(rank), size_(size) {}

  // Hydra and Slurm take a process that ends without this word for one that has failed.
  ~PmiExchange() override {
    if (process_ != ::getpid() || broken_) return;
    (void)ask("cmd=finalize", "finalize_ack", net::deadline_in(kGoodBye));
  }

  Result<void> open() {
    const net::Deadline deadline = net::deadline_in(kAnswer);
    // MPI may have said it already; it may be said again.
    if (auto hello = ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init", deadline); !hello)
      return tl::unexpected(hello.error());
    const auto limits = ask("cmd=get_maxes", "maxes", deadline);
    if (!limits) return tl::unexpected(limits.error());
    longest_value_ = number(*limits, "vallen_max").value_or(256) - 1;
    const auto space = ask("cmd=get_my_kvsname", "my_kvsname", deadline);
    if (!space) return tl::unexpected(space.error());
    const auto name = space->find("kvsname");
    if (name == space->end() || name->second.empty()) return bad("a reply without kvsname");
    space_ = name->second;
    return {};
  }

  std::string_view name() const override { return "PMI"; }
  std::size_t longest_value() const override { return longest_value_; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Result<std::string> share(const std::string& key, const std::optional<std::string>& mine,
                            net::Deadline deadline) override {
    const std::lock_guard lock(mutex_);
    if (process_ != ::getpid()) return fail(ErrorCode::InvalidArgument, "PMI cannot be used in a forked child");
    if (broken_) return fail(ErrorCode::Unavailable, "PMI: an earlier exchange failed in this process");
    auto result = share_once(key, mine, deadline);
    if (!result) broken_ = true;
    return result;
  }

 private:
  static tl::unexpected<Error> bad(std::string_view why) {
    return fail(ErrorCode::Unavailable, "PMI (at PMI_FD): {}", why);
  }

  static std::optional<std::size_t> number(const Reply& reply, std::string_view name) {
    const auto found = reply.find(name);
    if (found == reply.end()) return std::nullopt;
    const auto value = parse_integer<std::size_t>(found->second);
    return value && *value > 1 && *value < kLongestLine ? value : std::nullopt;
  }

  Result<std::string> share_once(const std::string& key, const std::optional<std::string>& mine,
                                 net::Deadline deadline) {
    const std::string place = fmt::format("kvsname={} key={}", space_, key);
    if (mine) {
      if (mine->size() > longest_value_) return bad(fmt::format("it takes no value of {} bytes", mine->size()));
      std::string request;
      const net::Wiping wiping(request);
      const std::string_view cmd = "cmd=put ", value = " value=";
      request.reserve(cmd.size() + place.size() + value.size() + mine->size());
      request.append(cmd).append(place).append(value).append(*mine);
      const auto put = ask(request, "put_result", deadline);
      if (!put) return tl::unexpected(put.error());
    }
    const auto all = ask("cmd=barrier_in", "barrier_out", deadline);
    if (!all) {
      if (all.error().code() != ErrorCode::Timeout) return tl::unexpected(all.error());
      return fail(ErrorCode::Timeout,
                  "PMI's barrier: not all {} processes came in time -- does every one of them call join?", size_);
    }
    auto got = ask(fmt::format("cmd=get {}", place), "get_result", deadline);
    if (!got) return tl::unexpected(got.error());
    const auto value = got->find("value");
    if (value == got->end()) return bad("a reply without value");
    return std::move(value->second);
  }

  // One request, one reply. A reply with another rc than 0 is an error.
  Result<Reply> ask(const std::string& request, std::string_view command, net::Deadline deadline) {
    std::string line;
    const net::Wiping wiping_line(line);
    line.reserve(request.size() + 1);
    line.append(request).append("\n");
    for (std::string_view rest = line; !rest.empty();) {
      const ssize_t n = ::send(fd_.get(), rest.data(), rest.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n > 0) {
        rest.remove_prefix(static_cast<std::size_t>(n));
      } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        if (auto ready = wait(POLLOUT, deadline); !ready) return tl::unexpected(ready.error());
      } else {
        return bad(fmt::format("the launcher does not listen any more: {} -- ranks have to join before MPI_Finalize",
                               errno_text(errno)));
      }
    }
    auto text = read_line(deadline);
    if (!text) return tl::unexpected(text.error());
    const net::Wiping wiping_text(*text);
    auto reply = parse_pmi_line(*text);
    if (!reply) return tl::unexpected(reply.error());
    const std::string asked = request.substr(0, request.find(" value="));  // which is not for messages
    if ((*reply)["cmd"] != command) return bad(fmt::format("the reply '{}' to '{}'", (*reply)["cmd"], asked));
    if (const auto rc = reply->find("rc"); rc != reply->end() && rc->second != "0")
      return bad(fmt::format("'{}' was refused: {}", asked, (*reply)["msg"]));
    return reply;
  }

  Result<void> wait(short events, net::Deadline deadline) {
    const auto ready = net::wait_ready(fd_.get(), events, deadline);
    if (!ready) return tl::unexpected(ready.error());
    if (!*ready) return fail(ErrorCode::Timeout, "PMI (at PMI_FD): no answer in time");
    return {};
  }

  // Not a byte further than the line's end: MPI reads from the same socket.
  Result<std::string> read_line(net::Deadline deadline) {
    std::string line;
    line.reserve(kLongestLine);  // so that it stays in one place
    std::string buffer(512, '\0');
    const net::Wiping wiping(buffer);
    while (line.size() < kLongestLine) {
      const ssize_t seen = ::recv(fd_.get(), buffer.data(), buffer.size(), MSG_PEEK | MSG_DONTWAIT);
      if (seen == 0) return bad("the launcher has closed its side -- ranks have to join before MPI_Finalize");
      if (seen < 0) {
        if (errno != EAGAIN && errno != EINTR) return bad(errno_text(errno));
        if (auto ready = wait(POLLIN, deadline); !ready) return tl::unexpected(ready.error());
        continue;
      }
      const std::string_view part(buffer.data(), static_cast<std::size_t>(seen));
      const std::size_t newline = part.find('\n');
      const std::size_t take = newline == std::string_view::npos ? part.size() : newline + 1;
      if (::recv(fd_.get(), buffer.data(), take, MSG_DONTWAIT) != static_cast<ssize_t>(take))
        return bad("somebody else reads the launcher's replies");
      line.append(part.substr(0, newline));
      if (newline != std::string_view::npos) return line;
    }
    return bad("a reply without an end");
  }

  std::mutex mutex_;
  sys::UniqueFd fd_;
  pid_t process_;
  int rank_;
  int size_;
  bool broken_ = false;
  std::size_t longest_value_ = 255;
  std::string space_;
};

std::optional<int> value_of(const cluster::Environment& environment, std::string_view name) {
  const auto found = environment.find(name);
  return found == environment.end() ? std::nullopt : parse_integer<int>(found->second);
}

}  // namespace

Result<Reply> parse_pmi_line(std::string_view line) {
  Reply reply;
  while (!line.empty()) {
    const std::size_t space = std::min(line.find(' '), line.size());
    const std::string_view word = line.substr(0, space);
    line.remove_prefix(std::min(line.size(), space + 1));
    if (word.empty()) continue;
    const std::size_t equals = word.find('=');
    // Slurm's messages for people have spaces in them; what counts has none.
    if (equals == 0 || equals == std::string_view::npos) continue;
    reply.emplace(word.substr(0, equals), word.substr(equals + 1));
  }
  if (!reply.contains("cmd")) return fail(ErrorCode::Corrupt, "PMI (at PMI_FD): a reply that is no PMI message");
  return reply;
}

Result<std::shared_ptr<Exchange>> open_pmi(const cluster::Environment& environment) {
  static std::mutex mutex;
  static std::shared_ptr<PmiExchange> opened;  // its destructor says good-bye at the process's end
  const std::lock_guard lock(mutex);
  if (opened) return opened;
  const auto number = value_of(environment, "PMI_FD");
  const auto rank = value_of(environment, "PMI_RANK");
  const auto size = value_of(environment, "PMI_SIZE");
  if (!number || *number < 0 || !rank || !size)
    return fail(ErrorCode::Unavailable, "PMI_FD, PMI_RANK or PMI_SIZE is not set to a number");
  int type = 0;
  socklen_t length = sizeof type;
  if (::getsockopt(*number, SOL_SOCKET, SO_TYPE, &type, &length) != 0 || type != SOCK_STREAM) {
    return fail(ErrorCode::Unavailable,
                "PMI_FD={} is not the launcher's socket any more (a program in between closed it, or MPI has ended)",
                *number);
  }
  // A descriptor of our own: MPI closes that one when it ends, and its number may then be another file's.
  sys::UniqueFd fd(::fcntl(*number, F_DUPFD_CLOEXEC, 3));
  if (!fd) return fail(ErrorCode::Io, "PMI_FD={}: {}", *number, errno_text(errno));
  auto exchange = std::make_shared<PmiExchange>(std::move(fd), *rank, *size);
  if (auto open = exchange->open(); !open) return tl::unexpected(open.error());
  opened = exchange;
  return opened;
}

}  // namespace cohort::meet
