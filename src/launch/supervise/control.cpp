#include "launch/supervise/control.h"

#include "base/files.h"
#include "launch/output/live_run.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <utility>

namespace cohort::launch {
namespace {

constexpr const char* kName = "control";
constexpr std::size_t kLongestOrder = 512;
constexpr std::size_t kMostClients = 8;
constexpr auto kClientTime = std::chrono::seconds(5);
constexpr timeval kAnswerTime{30, 0};
constexpr std::uint64_t kLongestLive = std::uint64_t{256} << 20;

/// Uses the folder's descriptor: a socket's path has at most 107 bytes, and the folder's path may be longer.
sockaddr_un address_in(int folder) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = fmt::format("/proc/self/fd/{}/{}", folder, kName);
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  return address;
}

template <class Call>
int with(const sockaddr_un& address, int fd, Call call) {
  return call(fd, reinterpret_cast<const sockaddr*>(&address), static_cast<socklen_t>(sizeof address));
}

bool is_heard(int connection) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
         (peer.uid == ::geteuid() || peer.uid == 0);
}

/// Says why no job takes orders in this folder.
std::string why_nobody(const std::string& folder, int error) {
  const auto content = sys::read_file(folder + "/" + kLiveFile, {.max_bytes = kLongestLive});
  const auto run = content ? parse_live_run(content->text()) : fail(ErrorCode::Unavailable, "none");
  if (!run) return fmt::format("{} is no folder of a run", folder);
  if (run->state == "ended") return "the job has ended";
  if (!run->members) return "the job is not elastic: it was started without --min-np";
  return fmt::format("nobody takes orders there ({}): the job has ended, or runs on another host", errno_text(error));
}

}  // namespace

Result<ControlOrder> parse_order(std::string_view line) {
  constexpr std::array kinds = {std::pair{std::string_view("add "), ControlOrder::Kind::Add},
                                std::pair{std::string_view("drain "), ControlOrder::Kind::Drain},
                                std::pair{std::string_view("remove "), ControlOrder::Kind::Remove}};
  constexpr std::string_view kAllowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:@%[]";
  for (const auto& [word, kind] : kinds) {
    if (!line.starts_with(word)) continue;
    const std::string_view host = line.substr(word.size());
    if (host.empty() || host.front() == '-' || host.find_first_not_of(kAllowed) != std::string_view::npos) break;
    return ControlOrder{kind, std::string(host)};
  }
  return fail(ErrorCode::InvalidArgument, "add HOST[:SLOTS], drain HOST or remove HOST is wanted");
}

ControlSocket::ControlSocket(Loop& loop, const RunFolder& folder) : loop_(loop), folder_(folder) {
  listener_ = sys::UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  ::unlinkat(folder_.fd.get(), kName, 0);  // left by a command that was killed
  // The mode is set before anybody can connect.
  if (!listener_ || with(address_in(folder_.fd.get()), listener_.get(), ::bind) != 0 ||
      ::fchmodat(folder_.fd.get(), kName, 0600, 0) != 0 || ::listen(listener_.get(), kMostClients) != 0)
    raise(ErrorCode::Io, "{}/{}: {}", folder_.shown, kName, errno_text(errno));
  watch_ = Watch(loop_, listener_.get());
  watch_.on_readable([this] { accept(); });
}

ControlSocket::~ControlSocket() { ::unlinkat(folder_.fd.get(), kName, 0); }

void ControlSocket::accept() {
  sys::UniqueFd connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!connection || clients_.size() >= kMostClients || !is_heard(connection.get())) return;
  const auto client = clients_.emplace(clients_.end());
  client->watch = Watch(loop_, connection.get());
  client->connection = std::move(connection);
  client->watch.on_readable([this, client] { read(client); });
  client->limit = Timer(loop_, kClientTime, [this, client] { clients_.erase(client); });
}

void ControlSocket::read(std::list<Client>::iterator client) {
  std::array<char, kLongestOrder> bytes{};
  const ssize_t got = ::read(client->connection.get(), bytes.data(), bytes.size());
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got > 0) client->line.append(bytes.data(), static_cast<std::size_t>(got));
  const auto end = client->line.find('\n');
  if (got > 0 && end == std::string::npos && client->line.size() <= kLongestOrder) return;
  if (end == std::string::npos) return void(clients_.erase(client));
  client->watch = Watch();
  client->limit = Timer();
  clients_.splice(clients_.begin(), clients_, client);
  // (An order is one line; text after it is refused together with it.)
  if (auto order = parse_order(std::string_view(client->line).substr(0, client->line.size() - 1)))
    client->order = *std::move(order);
  else
    answer(tl::unexpected(order.error()));
}

std::optional<ControlOrder> ControlSocket::next() { return clients_.empty() ? std::nullopt : clients_.front().order; }

void ControlSocket::answer(const Result<std::string>& done) {
  const std::string text = done ? "ok " + *done + "\n" : fmt::format("no {}\n", done.error().what());
  // (A socket's buffer has space for the answer; a client that is gone does not need it.)
  static_cast<void>(!::send(clients_.front().connection.get(), text.data(), text.size(), MSG_NOSIGNAL));
  clients_.pop_front();
}

Result<std::string> ask_job(const std::string& run_folder, const std::string& order) {
  const auto folder = open_folder(run_folder);
  if (!folder) return fail(ErrorCode::Unavailable, "{}: {}", run_folder, folder.error().what());
  const sys::UniqueFd connection(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!connection || with(address_in(folder->get()), connection.get(), ::connect) != 0)
    return fail(ErrorCode::Unavailable, "{}", why_nobody(run_folder, errno));
  ::setsockopt(connection.get(), SOL_SOCKET, SO_RCVTIMEO, &kAnswerTime, sizeof kAnswerTime);
  const std::string line = order + "\n";
  std::string answer;
  bool more = ::send(connection.get(), line.data(), line.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(line.size());
  while (more && !answer.ends_with('\n') && answer.size() < (std::size_t{64} << 10)) {
    std::array<char, 4096> bytes{};
    const ssize_t got = ::read(connection.get(), bytes.data(), bytes.size());
    if (got < 0 && errno == EINTR) continue;
    more = got > 0;
    if (more) answer.append(bytes.data(), static_cast<std::size_t>(got));
  }
  if (answer.ends_with('\n')) answer.pop_back();
  if (answer.starts_with("ok ")) return answer.substr(3);
  if (answer.starts_with("no ")) return fail(ErrorCode::Unavailable, "{}", answer.substr(3));
  return fail(ErrorCode::Unavailable, "the job has not answered; it may be about to end");
}

}  // namespace cohort::launch
