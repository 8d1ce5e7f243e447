#include "net/http.h"
#include "base/hardware.h"
#include "net/address.h"
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

TEST(Http, ARequestIsRead) {
  const auto request = parse_request(
      "GET /log?rank=3&stream=err&a=%2Fb HTTP/1.1\r\nHost: LOCALHOST:4711\r\ncookie: a=1; cohort_4711=abc ; b\r\n"
      "Authorization: Bearer xyz\r\nAccept: */*\r\nACCEPT:\ta/b \r\n\r\n");
  ASSERT_TRUE(request) << request.error().why;
  EXPECT_EQ(request->path, "/log");
  EXPECT_EQ(request->query.at("rank"), "3");
  EXPECT_EQ(request->query.at("a"), "/b");
  EXPECT_EQ(request->host, "localhost");
  EXPECT_EQ(request->cookies.at("cohort_4711"), "abc");
  EXPECT_EQ(request->bearer, "xyz");
  EXPECT_EQ(request->accept, "*/*,a/b");
  EXPECT_EQ(parse_request("GET / HTTP/1.1\r\nHost: [::1]:80\r\n\r\n")->host, "::1");
  EXPECT_EQ(parse_request("HEAD / HTTP/1.0\r\nAuthorization:bearer  xyz \r\n\r\n")->bearer, "xyz");
}

TEST(Http, WhatTwoReadersCouldSeeDifferentlyIsRefused) {
  const auto status = [](const char* text) {
    const auto request = parse_request(text);
    return request ? 200 : request.error().status;
  };
  EXPECT_EQ(status("GET / HTTP/1.1\r\nHost: a\r\n\r\n"), 200);
  EXPECT_EQ(status("POST / HTTP/1.1\r\nHost: a\r\n\r\n"), 405);
  for (const char* const text :
       {"GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        "GET / HTTP/2\r\nHost: a\r\n\r\n",
        "GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
        "GET /%g1 HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET /%2 HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a:b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost : a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nA\r\n\r\n",
        "GET / x HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nA: 1\n2\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\rX: b\r\n\r\n",
        "GET /\xc3\xa4 HTTP/1.1\r\nHost: a\r\n\r\n",
        "",
        "\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\n",
        "GET / HTTP/1.1 \r\nHost: a\r\n\r\n"}) {
    EXPECT_EQ(status(text), 400) << text;
  }
}

TEST(Http, TheTypeIsTheOneThatTheClientPrefers) {
  const auto chosen = [](std::string_view accept) { return preferred_type(accept, "text/plain", "a/open"); };
  EXPECT_EQ(chosen(""), 0U);
  EXPECT_EQ(chosen("*/*"), 0U);
  EXPECT_EQ(chosen("a/open;version=1.0.0;q=0.5, text/plain;q=0.3, */*;q=0.1"), 1U);
  EXPECT_EQ(chosen("A/Open , text/plain;q=0.9"), 1U);
  EXPECT_EQ(chosen("a/open;q=0.5,text/plain"), 0U);
  EXPECT_EQ(chosen("a/open;q=0"), 0U);
  EXPECT_EQ(chosen("a/open;q=nan,;;,="), 0U);
}

TEST(Http, WhatAServerSaysIsOnePlainLine) {
  EXPECT_EQ(as_line("a\r\n\x1b[2Jb\x7f"), "a [2Jb");
  EXPECT_EQ(as_line("a\xC2\x9B"
                    "2J gr\xC3\xBCn\xC2\xA0 \xC2"),
            "a2J gr\xC3\xBCn\xC2\xA0 \xC2")
      << "CSI as one character";
}

TEST(Http, AResponseHasALengthAndLetsNothingBeLoaded) {
  const std::string bytes = to_bytes({404, "text/plain; charset=utf-8", "no\n"});
  EXPECT_TRUE(bytes.starts_with("HTTP/1.1 404 ") && bytes.ends_with("\r\n\r\nno\n")) << bytes;
  EXPECT_NE(bytes.find("Content-Length: 3\r\n"), std::string::npos);
  EXPECT_NE(bytes.find("default-src 'none'"), std::string::npos);
}

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

/// Returns all bytes until the server closes; nullopt if it does not close.
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

TEST(HttpServer, AtAllAddressesItIsFoundByEachAndByItsName) {
  HttpServerOptions page = options(kToken);
  page.clients = HttpClients::Browsers;
  const auto status = [&](const HttpServer& server, const std::string& host) {
    return ask(server, fmt::format("GET /a?token={} HTTP/1.1\r\nHost: {}\r\n\r\n", kToken, host)).substr(9, 3);
  };
  page.at.host = "0.0.0.0";
  const HttpServer all(page);
  for (const std::string host : {"192.0.2.7:80", "[2001:db8::1]:80", "localhost", "127.0.0.1"})
    EXPECT_EQ(status(all, host), "200") << host;
  EXPECT_EQ(status(all, sys::host_name()), "200");
  for (const std::string host : {"evil.example", "192.0.2.7.evil.example"})  // may be made to resolve to this host
    EXPECT_EQ(status(all, host), "421") << host;
  page.at.host = "127.0.0.1";
  EXPECT_EQ(status(HttpServer(page), "192.0.2.7"), "421") << "from outside nobody comes here";
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
  const sys::UniqueFd lazy = connect_to(server);  // does not read the response to its request
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
