#include "watch/remote_page.h"

#include "net/http.h"
#include "net/socket.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace cohort::watch {
namespace {

constexpr std::size_t kLongestAnswer = std::size_t{256} << 20;
constexpr auto kPatience = std::chrono::seconds(3);
constexpr auto kAskEvery = std::chrono::milliseconds(400);

}  // namespace

RemotePage::RemotePage(net::Address address, const net::Secret& token) : address_(std::move(address)), token_(token) {
  view_.place = net::to_string(address_);
  poll();
  if (!trouble_.empty()) raise(ErrorCode::Unavailable, "watching {} failed -- {}", net::to_string(address_), trouble_);
}

Result<std::string> RemotePage::get(const std::string& target) const {
  const net::Deadline deadline = net::deadline_in(kPatience);
  auto connected = net::connect_once({address_, {}}, deadline);
  if (!connected) return tl::unexpected(connected.error().error);
  const int fd = connected->get();
  std::string digits;
  digits.reserve(2 * net::Secret::kBytes);
  token_.append_digits(digits);
  const std::string request =
      fmt::format("GET {} HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {}\r\nConnection: close\r\n\r\n", target,
                  net::to_string(address_), digits);
  std::string_view rest(request);
  while (!rest.empty()) {
    const ssize_t put = ::send(fd, rest.data(), rest.size(), MSG_NOSIGNAL);
    if (put > 0) {
      rest.remove_prefix(static_cast<std::size_t>(put));
      continue;
    }
    if (put < 0 && errno != EAGAIN && errno != EINTR) return fail(ErrorCode::Io, "sending: {}", errno_text(errno));
    const auto ready = net::wait_ready(fd, POLLOUT, deadline);
    if (!ready) return tl::unexpected(ready.error());
    if (!*ready) return fail(ErrorCode::Timeout, "it does not answer");
  }
  std::string answer;
  while (true) {
    char bytes[65536];
    const ssize_t got = ::recv(fd, bytes, sizeof bytes, 0);
    if (got == 0) break;
    if (got > 0) {
      answer.append(bytes, static_cast<std::size_t>(got));
      if (answer.size() > kLongestAnswer) return fail(ErrorCode::Corrupt, "its answer has no end");
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return fail(ErrorCode::Io, "receiving: {}", errno_text(errno));
    const auto ready = net::wait_ready(fd, POLLIN, deadline);
    if (!ready) return tl::unexpected(ready.error());
    if (!*ready) return fail(ErrorCode::Timeout, "it does not answer");
  }
  const auto head = net::parse_response_head(answer);
  if (!head) return tl::unexpected(head.error());
  const std::string_view body = std::string_view(answer).substr(head->body);
  if (head->status == 200) return std::string(body);
  return fail(ErrorCode::Unavailable, "it answers {}: {}", head->status, net::as_line(body));
}

bool RemotePage::poll() {
  if (std::chrono::steady_clock::now() < next_) return false;
  auto text = get("/data?by=rank");
  next_ = std::chrono::steady_clock::now() + kAskEvery;
  auto view = text ? parse_view(*text) : Result<View>(tl::unexpected(text.error()));
  if (!view) {
    trouble_ = view.error().what();
    return true;
  }
  trouble_.clear();
  view_ = *std::move(view);
  ahead_ = view_.now - launch::seconds_now();
  view_.place = net::to_string(address_);
  return true;
}

LogTail RemotePage::log(int rank, launch::Stream stream, std::size_t lines) {
  LogTail tail;
  tail.path = fmt::format("rank {}, {}", rank, stream == launch::Stream::Stdout ? "stdout" : "stderr");
  auto text = get(fmt::format("/log?rank={}&stream={}", rank, stream == launch::Stream::Stdout ? "out" : "err"));
  if (!text) {
    tail.why = text.error().what();
    return tail;
  }
  for (std::string_view rest(*text); !rest.empty();) {
    const auto end = rest.find('\n');
    tail.lines.emplace_back(rest.substr(0, end));
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  }
  if (tail.lines.size() > lines)
    tail.lines.erase(tail.lines.begin(), tail.lines.end() - static_cast<std::ptrdiff_t>(lines));
  return tail;
}

}  // namespace cohort::watch
