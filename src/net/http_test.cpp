#include "net/http.h"

#include <gtest/gtest.h>

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
  EXPECT_EQ(as_line("a\r\n\x1b[2Jb\x7f"), "a   [2Jb");
  EXPECT_EQ(as_line("a\xC2\x9B"
                    "2J gr\xC3\xBCn\xC2\xA0 \xC2"),
            "a  2J gr\xC3\xBCn\xC2\xA0 \xC2")
      << "CSI as one character";
}

TEST(Http, AResponseIsReadBack) {
  const std::string bytes = to_bytes({404, "text/plain; charset=utf-8", "no\n"});
  const auto head = parse_response_head(bytes);
  ASSERT_TRUE(head);
  EXPECT_EQ(head->status, 404);
  EXPECT_EQ(bytes.substr(head->body), "no\n");
  EXPECT_NE(bytes.find("Content-Length: 3\r\n"), std::string::npos);
  EXPECT_NE(bytes.find("default-src 'none'"), std::string::npos);
  EXPECT_FALSE(parse_response_head("SSH-2.0-OpenSSH\r\n\r\n"));
  EXPECT_FALSE(parse_response_head("HTTP/1.1 x\r\n\r\n"));
  EXPECT_FALSE(parse_response_head("HTTP/1.1 200 OK\r\n"));
}

}  // namespace
}  // namespace cohort::net
