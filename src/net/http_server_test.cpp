#include "net/http_server.h"

#include "net/deadline.h"
#include "net/socket.h"

#include <cohort/error.h>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

namespace cohort::net {
namespace {

constexpr auto kPatience = std::chrono::seconds(20);
constexpr const char* kToken = "0123456789abcdef0123456789abcdef";

HttpServerOptions options(std::string token = {}) {
  return {
      .at = {"127.0.0.1", 0}, .token = std::move(token), .handler = [](const HttpRequest& request) {
        return HttpResponse{.body = request.path == "/big" ? std::string(std::size_t{64} << 20, 'x') : request.path};
      }};
}

sys::UniqueFd connect_to(const HttpServer& server) {
  auto connected = connect_once({server.address(), {}}, deadline_in(kPatience));
  EXPECT_TRUE(connected.has_value());
  return std::move(*connected);
}

/// All until the server ends; nullopt if it does not.
std::optional<std::string> rest_of(int fd) {
  std::string got;
  const Deadline until = deadline_in(kPatience);
  for (;;) {
    const auto ready = wait_ready(fd, POLLIN, until);
    if (!ready || !*ready) return std::nullopt;
    char bytes[65536];
    const ssize_t count = ::recv(fd, bytes, sizeof bytes, 0);
    if (count <= 0) return got;
    got.append(bytes, static_cast<std::size_t>(count));
  }
}

void say(int fd, const std::string& text) {
  ASSERT_EQ(::send(fd, text.data(), text.size(), MSG_NOSIGNAL), ssize_t(text.size()));
}

std::string ask(const HttpServer& server, const std::string& request) {
  const sys::UniqueFd fd = connect_to(server);
  say(fd.get(), request);
  return rest_of(fd.get()).value_or("no answer");
}

TEST(HttpServer, AnswersWhoAsksProperly) {
  const HttpServer server(options());
  const std::string answer = ask(server, "GET /a?b HTTP/1.1\r\nHost: localhost:1\r\n\r\n");
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 OK\r\n")) << answer;
  EXPECT_NE(answer.find("Content-Length: 2\r\nConnection: close\r\nCache-Control: no-store\r\n"
                        "X-Content-Type-Options: nosniff\r\n"),
            std::string::npos)
      << answer;
  EXPECT_TRUE(answer.ends_with("\r\n\r\n/a")) << answer;
  EXPECT_TRUE(ask(server, "HEAD /a HTTP/1.0\r\n\r\n").ends_with("\r\n\r\n"));
  EXPECT_TRUE(ask(server, "POST /a HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
  EXPECT_TRUE(ask(server, "\x16\x03\x01 tls?\r\n\r\n").starts_with("HTTP/1.1 400 "));
  EXPECT_TRUE(ask(server, "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n").starts_with("HTTP/1.1 403 "));
  EXPECT_TRUE(ask(server, "GET / HTTP/1.1\r\nHost: [::1]:80\r\n\r\n").starts_with("HTTP/1.1 200 "));
}

TEST(HttpServer, OnlyTheTokenLetsIn) {
  const HttpServer server(options(kToken));
  const auto with = [&](const std::string& header) {
    return ask(server, "GET / HTTP/1.1\r\nHost: any.name\r\n" + header + "\r\n").substr(0, 13);
  };
  EXPECT_EQ(with(""), "HTTP/1.1 401 ");
  EXPECT_EQ(with("Authorization: Bearer x\r\n"), "HTTP/1.1 401 ");
  EXPECT_EQ(with(std::string("Authorization: Basic ") + kToken + "\r\n"), "HTTP/1.1 401 ");
  EXPECT_EQ(with(std::string("Authorization: Bearer ") + kToken + "0\r\n"), "HTTP/1.1 401 ");
  EXPECT_EQ(with(std::string("authorization:bearer  ") + kToken + " \r\n"), "HTTP/1.1 200 ");
}

TEST(HttpServer, ABrowserShowsTheTokenOnceAndThenItsCookie) {
  HttpServerOptions page = options(kToken);
  page.clients = HttpClients::Browsers;
  const HttpServer server(page);
  const auto get = [&](const std::string& target, const std::string& headers = "Host: localhost\r\n") {
    return ask(server, "GET " + target + " HTTP/1.1\r\n" + headers + "\r\n");
  };
  const std::string query = std::string("?token=") + kToken;
  const std::string first = get("/" + query);
  EXPECT_TRUE(first.starts_with("HTTP/1.1 303 ")) << first;
  const std::string set = "Location: /\r\nSet-Cookie: ", end = "; HttpOnly; SameSite=Strict; Path=/\r\n";
  const auto begin = first.find(set);
  ASSERT_NE(begin, std::string::npos) << first;
  const std::string cookie = first.substr(begin + set.size(), first.find(end) - begin - set.size());
  EXPECT_TRUE(cookie.starts_with(fmt::format("cohort_{}=", server.address().port))) << cookie;
  EXPECT_EQ(cookie.find(kToken), std::string::npos) << "other ports of this host see it";
  EXPECT_TRUE(get("/a" + query).ends_with("\r\n\r\n/a"));
  EXPECT_TRUE(get("/a", "Host: [::1]\r\nCookie: " + cookie + "\r\n").ends_with("\r\n\r\n/a"));
  EXPECT_TRUE(get("/a").starts_with("HTTP/1.1 403 "));
  EXPECT_TRUE(get("/a?token=x").starts_with("HTTP/1.1 403 "));
  EXPECT_TRUE(get("/a" + query, "Host: evil.example\r\n").starts_with("HTTP/1.1 421 "));
}

TEST(HttpServer, OthersThanLoopbackNeedAToken) {
  HttpServerOptions open = options();
  open.at.host = "0.0.0.0";
  try {
    const HttpServer server(open);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    EXPECT_NE(std::string(error.what()).find("ssh -L"), std::string::npos) << error.what();
  }
  open.token = kToken;
  EXPECT_GT(HttpServer(open).address().port, 0);
  HttpServerOptions taken = options();
  const HttpServer first(options());
  taken.at.port = first.address().port;
  EXPECT_THROW(HttpServer{taken}, Error);
}

TEST(HttpServer, SlowAndLongAndManyStrangersAreBounded) {
  HttpServerOptions hurried = options();
  hurried.request_time = hurried.answer_time = std::chrono::milliseconds(300);
  hurried.most_connections = 4;
  const HttpServer server(hurried);
  {
    std::vector<sys::UniqueFd> idle;
    for (int i = 0; i < 4; ++i) {
      idle.push_back(connect_to(server));
      say(idle.back().get(), "GET / HTTP/1.1\r\n");
    }
    EXPECT_TRUE(ask(server, "GET / HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 200 ")) << "who asks is let in";
    for (const auto& fd : idle) EXPECT_EQ(rest_of(fd.get()), "") << "one too many, or out of time";
  }
  EXPECT_TRUE(ask(server, "GET /" + std::string(9000, 'a')).starts_with("HTTP/1.1 431 "));
  const sys::UniqueFd lazy = connect_to(server);  // does not read what it has asked for
  say(lazy.get(), "GET /big HTTP/1.0\r\n\r\n");
  pollfd waiting{lazy.get(), POLLRDHUP, 0};
  EXPECT_EQ(::poll(&waiting, 1, 20'000), 1) << "it is ended";
}

TEST(HttpServer, TokensThatCanBeGuessedOrReadAreRefused) {
  std::string name = (std::filesystem::temp_directory_path() / "cohort-token-XXXXXX").string();
  const sys::UniqueFd made(::mkstemp(name.data()));
  const auto holds = [&](const std::string& text) { std::ofstream(name, std::ios::trunc) << text; };
  holds(std::string(kToken) + "\n");
  EXPECT_EQ(read_token_file(name), kToken);
  ASSERT_EQ(::chmod(name.c_str(), 0644), 0);
  EXPECT_THROW((void)read_token_file(name), Error);
  ASSERT_EQ(::chmod(name.c_str(), 0640), 0);
  holds("short");
  EXPECT_THROW((void)read_token_file(name), Error);
  holds("two words 0123456789abcdef");
  EXPECT_THROW((void)read_token_file(name), Error);
  std::filesystem::remove(name);
  EXPECT_THROW((void)read_token_file(name), Error);
}

}  // namespace
}  // namespace cohort::net
