#include "rendezvous/host_list.h"
#include "rendezvous/identity.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <rapidcheck.h>

#include <string>
#include <vector>

namespace cohort::rendezvous {
namespace {

using Names = std::vector<std::string>;

#define EXPECT_CONTAINS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << "in: " << (text)

TEST(SlurmHosts, ExpandsAsSlurmDoes) {
  const struct {
    const char* text;
    Names hosts;
  } cases[] = {
      {"a", {"a"}},
      {"a,b", {"a", "b"}},
      {"a[1]", {"a1"}},
      {"a[01-03,07,10-12]", {"a01", "a02", "a03", "a07", "a10", "a11", "a12"}},
      {"a[1-2]b[3-4]", {"a1b3", "a1b4", "a2b3", "a2b4"}},
      {"n[1,3],m[2-3],k", {"n1", "n3", "m2", "m3", "k"}},
      {"a1,a[3-4] b5", {"a1", "a3", "a4", "b5"}},
      {" ,a,,b,", {"a", "b"}},
      {"a\tb\nc", {"a", "b", "c"}},
      // In Slurm's order, the last bracket changes fastest, then the first, then the second.
      {"x[0-1]y[0-1]z[0-1]", {"x0y0z0", "x0y0z1", "x1y0z0", "x1y0z1", "x0y1z0", "x0y1z1", "x1y1z0", "x1y1z1"}},
      // The low bound gives the width, separately for each item.
      {"n[08-11]", {"n08", "n09", "n10", "n11"}},
      {"n[8-011]", {"n8", "n9", "n10", "n11"}},
      {"n[01-3]", {"n01", "n02", "n03"}},
      {"n[098-101]", {"n098", "n099", "n100", "n101"}},
      {"n[1,02,003]", {"n1", "n02", "n003"}},
      {"[1-3]", {"1", "2", "3"}},
      {"1[1-2]", {"11", "12"}},
      {"a[1-2],a[1]", {"a1", "a2", "a1"}},
      {"tux[2,1-2]", {"tux2", "tux1", "tux2"}},
      {"n[1-3]-ib0", {"n1-ib0", "n2-ib0", "n3-ib0"}},
      {"a[1-2]b[3-4]c", {"a1b3c", "a1b4c", "a2b3c", "a2b4c"}},
      {"r0n[1-2],r1n[1-2]", {"r0n1", "r0n2", "r1n1", "r1n2"}},
      {"n[000000000000000009-10]", {"n000000000000000009", "n000000000000000010"}},
  };
  for (const auto& one : cases) {
    const auto hosts = parse_slurm_hosts(one.text);
    ASSERT_TRUE(hosts) << one.text << ": " << hosts.error().what();
    EXPECT_EQ(*hosts, one.hosts) << one.text;
  }
}

TEST(SlurmHosts, RefusesWithThePlace) {
  const struct {
    const char* text;
    const char* why;
    int character;
  } cases[] = {
      {"", "no host", 1},
      {" , ", "no host", 1},
      {"a[]", "a number is missing", 3},
      {"a[1,,2]", "a number is missing", 5},
      {"a[1-]", "a number is missing", 5},
      {"a[-1]", "a number is missing", 3},
      {"a[1--2]", "a number is missing", 5},
      {"a[ 1-2]", "a number is missing", 3},
      {"a[2-1]", "below its beginning", 5},
      {"a[1x]", "other than a number", 4},
      {"a[1,b[2]]", "a number is missing", 5},
      {"a[1[2]]", "'[' within brackets", 4},
      {"a[", "a number is missing", 3},
      {"a[1", "without its ']'", 4},
      {"a[1-2]b[3", "without its ']'", 10},
      {"a]1", "']' without its '['", 2},
      {"a[1-2]]", "']' without its '['", 7},
      {"a[0-999999999999]", "more than 65536 hosts", 3},
      {"a[0-65536]", "more than 65536 hosts", 3},
      {"a[0-999]b[0-999]", "more than 65536 hosts", 16},
      {"a[0-60000],b[0-60000]", "more than 65536 hosts", 12},
      {"a[0-60000,0-60000]", "more than 65536 hosts", 11},
      {"a[99999999999999999999]", "more than 18 digits", 3},
      {"feature{f}", "controller", 8},
      {"a;b", "no host name has", 2},
      {"-a", "begins with '-'", 1},
  };
  for (const auto& one : cases) {
    const auto hosts = parse_slurm_hosts(one.text);
    ASSERT_FALSE(hosts) << one.text;
    EXPECT_EQ(hosts.error().code(), ErrorCode::InvalidArgument);
    EXPECT_CONTAINS(hosts.error().what(), one.why);
    EXPECT_CONTAINS(hosts.error().what(), fmt::format("at character {} --", one.character));
  }
  // The message shows a long text only around the fault, and no unprintable characters.
  const auto longer = parse_slurm_hosts(std::string(5000, 'a') + "\x01" + std::string(5000, 'b'));
  ASSERT_FALSE(longer);
  EXPECT_LT(std::string(longer.error().what()).size(), 300U);
  EXPECT_CONTAINS(longer.error().what(), "aaa?bbb");
}

TEST(SlurmHosts, KnowsTheLargestList) {
  const auto hosts = parse_slurm_hosts("a[0-65535]");
  ASSERT_TRUE(hosts);
  EXPECT_EQ(hosts->size(), kMostHosts);
  EXPECT_EQ(hosts->back(), "a65535");
}

RC_GTEST_PROP(SlurmHosts, ARangeIsWhatItsNamesAre, ()) {
  const auto low = *rc::gen::inRange(0, 2000);
  const auto size = *rc::gen::inRange(1, 300);
  const auto width = *rc::gen::inRange(1, 6);
  const std::string text = fmt::format("n[{:0{}}-{}]s", low, width, low + size - 1);
  Names expected;
  std::string plain;
  for (int i = low; i < low + size; ++i) {
    expected.push_back(fmt::format("n{:0{}}s", i, width));
    plain += expected.back() + ",";
  }
  RC_ASSERT(parse_slurm_hosts(text).value() == expected);
  RC_ASSERT(parse_slurm_hosts(plain).value() == expected);
}

RC_GTEST_PROP(SlurmHosts, AnyTextIsReadOrRefused, ()) {
  const auto text = *rc::gen::container<std::string>(rc::gen::element('a', '1', '0', '9', '[', ']', ',', '-', ' '));
  const auto hosts = parse_slurm_hosts(text);
  if (!hosts) return;
  RC_ASSERT(!hosts->empty());
  std::string joined;
  for (const std::string& host : *hosts) joined += host + ",";
  RC_ASSERT(parse_slurm_hosts(joined).value() == *hosts);  // a list of one name is that name
}

TEST(SlurmCounts, ExpandsAsSlurmDoes) {
  EXPECT_EQ(parse_slurm_counts("3,1(x3)").value(), (std::vector{3, 1, 1, 1}));
  EXPECT_EQ(parse_slurm_counts("1,2,1(x3),3,2").value(), (std::vector{1, 2, 1, 1, 1, 3, 2}));
  EXPECT_EQ(parse_slurm_counts("4").value(), (std::vector{4}));
  EXPECT_EQ(parse_slurm_counts("8(x2)").value(), (std::vector{8, 8}));
}

TEST(SlurmCounts, RefusesTheRest) {
  for (const char* text : {"", ",", "3,", ",3", "a", "3(x)", "3(2)", "3(x2", "3(x2),", "3(x2)4", "0", "-1", "3(x0)",
                           "3(x99999999)", "1(x65537)", "99999999999", "3 ", "3((x2)", "3(x2))"}) {
    const auto counts = parse_slurm_counts(text);
    ASSERT_FALSE(counts) << text;
    EXPECT_CONTAINS(counts.error().what(), "at character");
  }
}

RC_GTEST_PROP(SlurmCounts, ReadsWhatSlurmWouldWrite, ()) {
  const auto counts = *rc::gen::nonEmpty(rc::gen::container<std::vector<int>>(rc::gen::inRange(1, 4)));
  std::string text;
  for (std::size_t i = 0; i < counts.size();) {
    std::size_t same = 1;
    while (i + same < counts.size() && counts[i + same] == counts[i]) ++same;
    text += fmt::format("{}{}{}", text.empty() ? "" : ",", counts[i], same > 1 ? fmt::format("(x{})", same) : "");
    i += same;
  }
  RC_ASSERT(parse_slurm_counts(text).value() == counts);
}

TEST(HostSlots, ReadsLists) {
  const struct {
    const char* text;
    std::vector<HostSlots> hosts;
  } cases[] = {
      {"h", {{"h", {}}}},
      {"h:4", {{"h", 4}}},
      {"a:4,b,c.example.org:1", {{"a", 4}, {"b", {}}, {"c.example.org", 1}}},
      {"[fe80::1]:4", {{"fe80::1", 4}}},
      {"[::1],[fe80::2%eth0]:2", {{"::1", {}}, {"fe80::2%eth0", 2}}},
      {"10.0.0.1:2", {{"10.0.0.1", 2}}},
      {"n[01-03]:8", {{"n01", 8}, {"n02", 8}, {"n03", 8}}},
      {"n[1,3]:2,k", {{"n1", 2}, {"n3", 2}, {"k", {}}}},
      {"a,b,a", {{"a", 2}, {"b", {}}}},
      {"a:2,a:3", {{"a", 5}}},
  };
  for (const auto& one : cases) {
    const auto hosts = parse_host_slots(one.text);
    ASSERT_TRUE(hosts) << one.text << ": " << hosts.error().what();
    EXPECT_EQ(*hosts, one.hosts) << one.text;
  }
}

TEST(HostSlots, RefusesTheRest) {
  for (const char* text : {"",         ",",          "a,",         "a,,b",           ":4",           "a:",
                           "a:0",      "a:-1",       "a:4x",       "a:65537",        "fe80::1",      "fe80::1:4",
                           "[fe80::1", "[fe80::1]4", "[fe80::1]:", "[fe80::zz]:1",   "[fe80::1%]:1", "a b:2",
                           "a/b:1",    "a:1:2",      "n[2-1]:1",   "a[0-9999999]:1", "a:65536,a:1",  "-a:1",
                           "u@a:1"}) {
    const auto hosts = parse_host_slots(text);
    ASSERT_FALSE(hosts) << text;
    EXPECT_EQ(hosts.error().code(), ErrorCode::InvalidArgument);
    EXPECT_CONTAINS(hosts.error().what(), "at character");
  }
}

RC_GTEST_PROP(HostSlots, WhatIsWrittenIsReadAgain, ()) {
  std::vector<HostSlots> hosts;
  std::string text;
  for (const char* name : {"a", "b-1", "c.d", "::1", "fe80::2", "9"}) {
    if (!*rc::gen::arbitrary<bool>()) continue;
    hosts.push_back({name, *rc::gen::element(std::optional<int>(), std::optional(1), std::optional(65536)), {}});
    text += (text.empty() ? "" : ",") + to_string(hosts.back());
  }
  RC_PRE(!hosts.empty());
  RC_ASSERT(parse_host_slots(text).value() == hosts);
}

TEST(HostFile, ReadsEverySpelling) {
  const struct {
    const char* text;
    std::vector<HostSlots> hosts;
  } cases[] = {
      // Format of Horovod and DeepSpeed.
      {"host1 slots=2\nhost2 slots=4\n", {{"host1", 2}, {"host2", 4}}},
      // Format of Open MPI.
      {"# my hosts\n\nfoo.example.com\nbar.example.com slots=2\nyow slots=4 max_slots=4 # big\nzip slots = 1 "
       "max-slots=3",
       {{"foo.example.com", {}}, {"bar.example.com", 2}, {"yow", 4, 4}, {"zip", 1, 3}}},
      // Format of MPICH.
      {"donner:2\r\nfoo\r\n#shakey:3\r\n[fe80::1]:2\r\n", {{"donner", 2}, {"foo", {}}, {"fe80::1", 2}}},
      // PBS has a line for each slot; those of a host are not always adjacent.
      {"n1\nn2\nn1\nn2\n", {{"n1", 2}, {"n2", 2}}},
      {"n[1-2] slots=8\n", {{"n1", 8}, {"n2", 8}}},
      {"a slots=1\na slots=2 max_slots=4\n", {{"a", 3, 4}}},
      {"\ta\tslots=2\t", {{"a", 2}}},
      {"\xEF\xBB\xBFh1 slots=1\r\nh2 slots=2\r\n", {{"h1", 1}, {"h2", 2}}},
  };
  for (const auto& one : cases) {
    const auto hosts = parse_host_file(one.text);
    ASSERT_TRUE(hosts) << one.text << ": " << hosts.error().what();
    EXPECT_EQ(*hosts, one.hosts) << one.text;
  }
}

TEST(HostFile, RefusesWithTheLine) {
  const struct {
    const char* text;
    const char* place;
  } cases[] = {
      {"", "no host in its 0 lines"},
      {"# a\n\n", "no host in its 2 lines"},
      {"a\nb slot=2\n", "line 2 'b slot=2': 'slot', which is neither slots= nor max_slots=, at character 3"},
      {"a slots\n", "line 1 'a slots': no '=' at character 8"},
      {"a slots=\n", "at character 9"},
      {"a slots=0\n", "at character 9"},
      {"a slots=2 slots=3\n", "second time"},
      {"a:2 slots=2\n", "second time"},
      {"a slots=4 max_slots=2\n", "max_slots below slots"},
      {"a max_slots=2\na max_slots=3\n", "line 2"},
      {"a,b\n", "no host name has"},
      {"fe80::1 slots=1\n", "brackets"},
      {"a\nuser@a slots=2\n", "line 2 'user@a slots=2': a user's name before the host's, which ssh takes"},
      {"user@a\n", "~/.ssh/config, or --ssh \"ssh -l NAME\"), at character 5 --"},
      {"ab;c:2\n", "no host name has at character 3"},
      {"a\nslots=4\n", "line 2"},
  };
  for (const auto& one : cases) {
    const auto hosts = parse_host_file(one.text);
    ASSERT_FALSE(hosts) << one.text;
    EXPECT_CONTAINS(hosts.error().what(), one.place);
  }
}

TEST(HostNames, WithANulAreNone) {
  using std::string_literals::operator""s;
  EXPECT_FALSE(parse_host_slots("[::1\0]:4"s));
  EXPECT_FALSE(parse_host_file("[::1\0]:4\n"s));
}

// How ranks are divided among fake hosts.

std::vector<int> divided(const char* text, int size) {
  const auto hosts = divide_into_hosts(text, size);
  return hosts ? *hosts : std::vector<int>{-1};
}

TEST(PretendedHosts, AreANumberOrAList) {
  EXPECT_EQ(divided("", 4), std::vector<int>());
  EXPECT_EQ(divided("2", 4), (std::vector<int>{0, 0, 1, 1}));
  EXPECT_EQ(divided("3", 4), (std::vector<int>{0, 0, 1, 2}));
  EXPECT_EQ(divided("9", 2), (std::vector<int>{0, 1}));
  EXPECT_EQ(divided("1,3", 4), (std::vector<int>{0, 1, 1, 1}));
}

TEST(PretendedHosts, ThatDoNotFitAreRefused) {
  for (const char* const text : {"0", "-1", "x", "2,", "1,2", "1,,3", "4294967297", "2147483647,2147483647,6"}) {
    const auto hosts = divide_into_hosts(text, 4);
    ASSERT_FALSE(hosts) << text;
    EXPECT_NE(std::string(hosts.error().what()).find(std::string("COHORT_PRETEND_HOSTS='") + text + "'"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace cohort::rendezvous
