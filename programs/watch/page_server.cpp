#include "watch/page_server.h"

#include "base/parse.h"
#include "watch/page_text.h"

#include <fmt/format.h>

namespace cohort::watch {
namespace {

constexpr std::chrono::milliseconds kPollPageEvery{200};
constexpr std::size_t kLogLines = 500;

std::string digits_of(const net::Secret& token) {
  std::string text;
  text.reserve(2 * net::Secret::kBytes);
  token.append_digits(text);
  return text;
}

net::HttpResponse refusal(int status, const std::string& why) { return {.status = status, .body = why + "\n"}; }

}  // namespace

PageServer::PageServer(RunFiles& files, const net::Address& at, const net::Secret& token)
    : files_(files),
      token_(token),
      server_({.at = at,
               .token = digits_of(token),
               .clients = net::HttpClients::Browsers,
               .handler = [this](const net::HttpRequest& request) { return answer(request); }}) {}

std::string PageServer::url() const {
  return fmt::format("http://{}/?token={}", net::to_string(server_.address()), digits_of(token_));
}

net::HttpResponse PageServer::answer(const net::HttpRequest& request) {
  // Looked at when somebody asks, and not again for those who ask at the same moment.
  if (net::passed(poll_again_)) {
    files_.poll();
    poll_again_ = net::deadline_in(kPollPageEvery);
    last_data_.clear();
  }
  if (request.path == "/") return page();
  if (request.path == "/data") return data(request);
  if (request.path == "/log") return log(request);
  return refusal(404, "there is no such page");
}

net::HttpResponse PageServer::page() {
  const std::string nonce = digits_of(value_or_throw(net::Secret::generate()));
  net::HttpResponse response{200, "text/html; charset=utf-8", std::string(kPage)};
  constexpr std::string_view kMark = "NONCE";
  for (auto at = response.body.find(kMark); at != std::string::npos; at = response.body.find(kMark, at))
    response.body.replace(at, kMark.size(), nonce);
  response.headers["Content-Security-Policy"] = fmt::format(
      "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; img-src data:; "
      "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
      nonce);
  return response;
}

net::HttpResponse PageServer::data(const net::HttpRequest& request) {
  const View& view = files_.view();
  net::HttpResponse response{200, "application/json", {}};
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

net::HttpResponse PageServer::log(const net::HttpRequest& request) {
  const auto rank = request.query.find("rank");
  const auto number = rank == request.query.end() ? std::nullopt : parse_integer<int>(rank->second);
  if (!number || *number < 0 || static_cast<std::size_t>(*number) >= files_.view().run.ranks.size())
    return refusal(404, "there is no such rank");
  const auto stream = request.query.find("stream");
  const bool errors = stream != request.query.end() && stream->second == "err";
  const LogTail tail = files_.log(*number, errors ? launch::Stream::Stderr : launch::Stream::Stdout, kLogLines);
  if (!tail.why.empty()) return refusal(404, tail.why);
  net::HttpResponse response;
  for (const std::string& line : tail.lines) response.body += line + "\n";
  return response;
}

}  // namespace cohort::watch
