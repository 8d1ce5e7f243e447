#include "watch/page_server.h"

#include "base/parse.h"
#include "net/socket.h"
#include "sys/cpus.h"
#include "watch/page_text.h"

#include <fmt/format.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

namespace cohort::watch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kRequestTime{5};
constexpr seconds kAnswerTime{20};
constexpr milliseconds kPollEvery{200};
constexpr std::size_t kLogLines = 500;

std::string digits_of(const net::Secret& token) {
  std::string text;
  text.reserve(2 * net::Secret::kBytes);
  token.append_digits(text);
  return text;
}

HttpResponse refusal(int status, const std::string& why) { return {status, "text/plain; charset=utf-8", why + "\n"}; }

std::string random_digits() {
  unsigned char bytes[16];
  std::string out;
  if (::getrandom(bytes, sizeof bytes, 0) != static_cast<ssize_t>(sizeof bytes)) std::terminate();
  for (const unsigned char byte : bytes) out += fmt::format("{:02x}", byte);
  return out;
}

}  // namespace

struct PageServer::Connection {
  sys::UniqueFd fd;
  std::string head;
  std::string answer;
  std::size_t sent = 0;
  bool answered = false;
  launch::Timer limit;
  launch::Watch watch;
};

PageServer::PageServer(launch::Loop& loop, RunFiles& files, PageOptions options)
    : loop_(loop), files_(files), options_(std::move(options)) {
  listener_ = value_or_throw(net::listen_on({{options_.address, options_.port}, {}}));
  port_ = value_or_throw(net::local_endpoint(listener_.get())).tcp.port;
  names_ = {"localhost", "127.0.0.1", "[::1]"};
  if (!net::is_loopback_name(options_.address)) {
    names_.push_back(options_.address);
    names_.push_back("[" + options_.address + "]");
    names_.push_back(sys::host_name());
  }
  watch_ = launch::Watch(loop_, listener_.get());
  watch_.on_readable([this] { on_stranger(); });
  files_.poll();
}

PageServer::~PageServer() = default;

std::string PageServer::url() const {
  return fmt::format("http://{}/?token={}", net::to_string(net::Address{options_.address, port_}),
                     digits_of(options_.token));
}

void PageServer::on_stranger() {
  auto accepted = net::accept_one(listener_.get());
  if (!accepted) {  // no descriptors: later
    watch_.on_readable(nullptr);
    again_ = launch::Timer(loop_, milliseconds(100), [this] { watch_.on_readable([this] { on_stranger(); }); });
    return;
  }
  if (!*accepted) return;
  if (connections_.size() >= kMostConnections) {
    // The first goes that has its answer, or else has not said what it wants: so no crowd keeps anybody out.
    const auto has_all = [](const Connection& each) { return each.answered && each.sent == each.answer.size(); };
    auto goes = std::find_if(connections_.begin(), connections_.end(), has_all);
    if (goes == connections_.end())
      goes = std::find_if(connections_.begin(), connections_.end(), [](const auto& each) { return !each.answered; });
    if (goes == connections_.end()) return;  // who has come is closed
    drop(*goes);
  }
  Connection& connection = connections_.emplace_back();
  connection.fd = *std::move(*accepted);
  connection.watch = launch::Watch(loop_, connection.fd.get());
  connection.watch.on_readable([this, &connection] { on_readable(connection); });
  connection.limit = launch::Timer(loop_, kRequestTime, [this, &connection] { drop(connection); });
}

void PageServer::on_readable(Connection& connection) {
  char bytes[4096];
  const ssize_t got = ::recv(connection.fd.get(), bytes, sizeof bytes, 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) return drop(connection);
  connection.head.append(bytes, static_cast<std::size_t>(got));
  const auto end = head_end(connection.head);
  if (!end && connection.head.size() < kLongestHead) return;
  if (!end || *end > kLongestHead) return respond(connection, refusal(431, "the request is too long"));
  const auto request = parse_request(std::string_view(connection.head).substr(0, *end));
  respond(connection, request ? answer(*request) : refusal(request.error().status, request.error().why));
}

void PageServer::respond(Connection& connection, const HttpResponse& response) {
  connection.answered = true;
  connection.answer = to_bytes(response);
  connection.watch.on_readable(nullptr);
  connection.limit = launch::Timer(loop_, kAnswerTime, [this, &connection] { drop(connection); });
  connection.watch.on_writable([this, &connection] { on_writable(connection); });
}

void PageServer::on_writable(Connection& connection) {
  const std::string_view rest = std::string_view(connection.answer).substr(connection.sent);
  if (rest.empty()) {
    // Until the reader has taken it and closes: a close with bytes unread would take the answer back.
    ::shutdown(connection.fd.get(), SHUT_WR);
    connection.watch.on_writable(nullptr);
    connection.limit = launch::Timer(loop_, seconds(2), [this, &connection] { drop(connection); });
    connection.watch.on_readable([this, &connection] {
      char bytes[4096];
      if (::recv(connection.fd.get(), bytes, sizeof bytes, 0) <= 0) drop(connection);
    });
    return;
  }
  const ssize_t put = ::send(connection.fd.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
  if (put > 0)
    connection.sent += static_cast<std::size_t>(put);
  else if (put < 0 && errno != EAGAIN && errno != EINTR)
    drop(connection);
}

void PageServer::drop(Connection& connection) {
  connections_.remove_if([&connection](const Connection& each) { return &each == &connection; });
}

bool PageServer::is_ours(const std::string& host) const {
  return std::find(names_.begin(), names_.end(), host) != names_.end();
}

bool PageServer::admitted(const HttpRequest& request) const {
  const auto is_token = [this](const std::string& text) {
    const auto token = net::Secret::from_digits(text);
    return token && *token == options_.token;  // in constant time
  };
  if (is_token(request.bearer)) return true;
  if (const auto query = request.query.find("token"); query != request.query.end() && is_token(query->second))
    return true;
  const auto cookie = request.cookies.find(fmt::format("cohort_{}", port_));
  return cookie != request.cookies.end() && is_token(cookie->second);
}

HttpResponse PageServer::answer(const HttpRequest& request) {
  // A page of somebody else's whose name leads here (DNS rebinding) is refused before anything is looked at.
  if (!is_ours(request.host)) return refusal(421, "this page is at localhost or 127.0.0.1, not at another name");
  if (!admitted(request))
    return refusal(403, "the token is missing or wrong: open the whole address that `cohort watch --page` has printed");
  if (request.path == "/" && request.query.contains("token")) {
    // The token is not for the history and the screen.
    HttpResponse response = refusal(303, "");
    response.headers["Location"] = "/";
    response.headers["Set-Cookie"] =
        fmt::format("cohort_{}={}; HttpOnly; SameSite=Strict; Path=/", port_, digits_of(options_.token));
    return response;
  }
  if (request.path == "/") return page();
  if (request.path == "/data") return data(request);
  if (request.path == "/log") return log(request);
  return refusal(404, "there is no such page");
}

HttpResponse PageServer::page() const {
  const std::string nonce = random_digits();
  HttpResponse response{200, "text/html; charset=utf-8", std::string(kPage)};
  constexpr std::string_view kMark = "NONCE";
  for (auto at = response.body.find(kMark); at != std::string::npos; at = response.body.find(kMark, at))
    response.body.replace(at, kMark.size(), nonce);
  response.headers["Content-Security-Policy"] = fmt::format(
      "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; img-src data:; "
      "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
      nonce);
  return response;
}

HttpResponse PageServer::data(const HttpRequest& request) {
  // Looked at when somebody asks, and not again for those who ask at the same moment.
  if (!polled_) {
    files_.poll();
    polled_ = launch::Timer(loop_, kPollEvery, [this] { polled_ = launch::Timer(); });
    last_data_.clear();
  }
  const View& view = files_.view();
  HttpResponse response{200, "application/json", {}};
  const auto by = request.query.find("by");
  const auto host = request.query.find("host");
  if (host != request.query.end()) {
    const auto index = parse_integer<std::size_t>(host->second);
    if (!index) return refusal(400, "host is a number");
    View part = view;
    part.run = of_host(view.run, *index);
    response.body = to_text(part, Rows::Ranks);
  } else if (by != request.query.end()) {
    response.body = to_text(view, by->second == "host" ? Rows::Hosts : Rows::Ranks);
  } else {
    if (last_data_.empty()) last_data_ = to_text(view, view.run.ranks.size() > kManyRanks ? Rows::Hosts : Rows::Ranks);
    response.body = last_data_;
  }
  return response;
}

HttpResponse PageServer::log(const HttpRequest& request) {
  const auto rank = request.query.find("rank");
  const auto number = rank == request.query.end() ? std::nullopt : parse_integer<int>(rank->second);
  if (!number || *number < 0 || static_cast<std::size_t>(*number) >= files_.view().run.ranks.size())
    return refusal(404, "there is no such rank");
  const auto stream = request.query.find("stream");
  const bool errors = stream != request.query.end() && stream->second == "err";
  const LogTail tail = files_.log(*number, errors ? launch::Stream::Stderr : launch::Stream::Stdout, kLogLines);
  if (!tail.why.empty()) return refusal(404, tail.why);
  HttpResponse response;
  for (const std::string& line : tail.lines) response.body += line + "\n";
  return response;
}

}  // namespace cohort::watch
