#include "base/env.h"
#include "base/log.h"
#include "base/parse.h"
#include "base/result.h"

#include <cohort/dtype.h>

#include <gtest/gtest.h>

#include <cerrno>
#include <set>

namespace cohort {
namespace {

TEST(Parse, TakesTheWholeTextOrNothing) {
  EXPECT_EQ(parse_integer<int>("42"), 42);
  EXPECT_EQ(parse_integer<int>("-1"), -1);
  for (const char* bad : {"", " 1", "1 ", "+1", "0x10", "1.0", "99999999999"}) {
    EXPECT_EQ(parse_integer<int>(bad), std::nullopt) << bad;
  }
}

TEST(Result, ThrowsItsErrorAtTheBoundary) {
  Result<int> failed = fail(ErrorCode::Io, "{}: cannot read", "a.txt");
  try {
    value_or_throw(std::move(failed));
    FAIL() << "no exception";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Io);
    EXPECT_STREQ(error.what(), "a.txt: cannot read");
  }
}

TEST(Result, NamesErrno) { EXPECT_EQ(errno_text(ENOENT), "No such file or directory (ENOENT)"); }

TEST(Log, KeepsOneLevelPerSubsystem) {
  log::configure("error,net=debug");
  EXPECT_TRUE(log::enabled("net", log::Level::Debug));
  EXPECT_FALSE(log::enabled("comm", log::Level::Warn));
  EXPECT_TRUE(log::enabled("comm", log::Level::Error));
  EXPECT_THROW(log::configure("loud"), Error);
  log::configure("warn");
}

TEST(Env, NamesEachVariableOnce) {
  std::set<std::string_view> names;
  for (const env::Variable& variable : env::variables()) {
    EXPECT_TRUE(names.insert(variable.name).second) << variable.name;
    EXPECT_FALSE(variable.meaning.empty()) << variable.name;
  }
}

TEST(DType, HasSizesAndNames) {
  EXPECT_EQ(size_of(DType::BFloat16), 2u);
  EXPECT_EQ(to_string(DType::BFloat16), "bfloat16");
  EXPECT_EQ(to_string(ReduceOp::Product), "product");
  EXPECT_FALSE(is_floating(DType::Int8));
}

}  // namespace
}  // namespace cohort
