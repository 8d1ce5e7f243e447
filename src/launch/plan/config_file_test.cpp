#include "launch/plan/config_file.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cohort::launch {
namespace {

std::string why_not(const std::string& text) {
  const auto got = parse_config(text, "f.toml");
  EXPECT_FALSE(got) << text;
  return got ? "" : got.error().what();
}

TEST(ConfigFile, GivesTheEntriesOfRunInTheirOrder) {
  const auto got = parse_config(
      "# a comment\n[run]\nnp = 4\ngrace = 2.5\nquiet = true\nprefix = \"full\"\n"
      "env = [\"A=1\", \"B=x y\"]\n",
      "f.toml");
  ASSERT_TRUE(got) << got.error().what();
  ASSERT_EQ(got->size(), 5U);
  EXPECT_EQ((*got)[0].key, "np");
  EXPECT_EQ((*got)[0].line, 3);
  EXPECT_EQ((*got)[0].values, std::vector<std::string>{"4"});
  EXPECT_EQ((*got)[1].values, std::vector<std::string>{"2.5"});
  EXPECT_EQ((*got)[2].values, std::vector<std::string>{"true"});
  EXPECT_EQ((*got)[3].values, std::vector<std::string>{"full"});
  EXPECT_FALSE((*got)[3].is_list);
  EXPECT_TRUE((*got)[4].is_list);
  EXPECT_EQ((*got)[4].values, (std::vector<std::string>{"A=1", "B=x y"}));
}

TEST(ConfigFile, ATableIsAListOfAssignments) {
  const auto got = parse_config("[run.env]\nOMP_NUM_THREADS = 2\nX = \"a\"\n", "f.toml");
  ASSERT_TRUE(got) << got.error().what();
  ASSERT_EQ(got->size(), 1U);
  EXPECT_EQ((*got)[0].values, (std::vector<std::string>{"OMP_NUM_THREADS=2", "X=a"}));
}

TEST(ConfigFile, SaysInWhichLineItIsWrong) {
  EXPECT_EQ(why_not("[run]\nnp = \n").rfind("f.toml:2: ", 0), 0U) << why_not("[run]\nnp = \n");
  EXPECT_NE(why_not("[run]\n\n[rnu]\nnp = 1\n").find("f.toml:3: 'rnu' is not known"), std::string::npos);
  EXPECT_NE(why_not("np = 1\n").find("f.toml:1: 'np' is not known here; options stand in the table [run]"),
            std::string::npos);
  EXPECT_NE(why_not("[run]\nnp = 1979-05-27\n").find("f.toml:2: np: a text, a number"), std::string::npos);
  EXPECT_NE(why_not("[run]\nenv = [[1]]\n").find("f.toml:2: env: "), std::string::npos);
}

TEST(ConfigFile, OtherThanAsciiStandsInQuotesAndComments) {
  for (const char* stray : {"[run]\n\xef\xaf\xaf = 1\n", "[run]\n\xc3\xa4 = 1\n", "#\xc3\xa4\n[\xc3\xa4\n"}) {
    EXPECT_NE(why_not(stray).find("f.toml:2: "), std::string::npos) << why_not(stray);
  }
  const auto got = parse_config(
      "\xef\xbb\xbf[run] # \xc3\xa4 \"\na = \"\\\"\xc3\xa4\" # '\nb = '\\\xc3\xa4'\n"
      "c = \"\"\"\n\"\xc3\xa4\"\"\"\"\nd = '''\xc3\xa4'''\ne = \"\" # \xc3\xa4\n",
      "f.toml");
  ASSERT_TRUE(got) << got.error().what();
  ASSERT_EQ(got->size(), 5U);
  EXPECT_EQ((*got)[0].values[0], "\"\xc3\xa4");
  EXPECT_EQ((*got)[1].values[0], "\\\xc3\xa4");
  EXPECT_EQ((*got)[2].values[0], "\"\xc3\xa4\"");
  EXPECT_EQ((*got)[3].values[0], "\xc3\xa4");
}

TEST(ConfigFile, AFileThatCannotBeReadIsNamed) {
  EXPECT_NE(std::string(read_config("/nowhere/x.toml").error().what()).find("/nowhere/x.toml: No such file"),
            std::string::npos);
  EXPECT_FALSE(read_config("/"));
  EXPECT_NE(std::string(read_config("/dev/zero").error().what()).find("longer than 1 MiB"), std::string::npos);
}

TEST(ConfigFile, TextsComeBackAsTheyWere) {
  for (const std::string text : {"plain", "a\"b\\c", "tab\tline\n", "\xc3\xa4"}) {
    const auto got = parse_config("[run]\nx = " + toml_text(text) + "\n", "f");
    ASSERT_TRUE(got) << toml_text(text) << got.error().what();
    EXPECT_EQ((*got)[0].values[0], text);
  }
}

}  // namespace
}  // namespace cohort::launch
