#include "base/env.h"
#include "base/json.h"
#include "base/log.h"
#include "base/parse.h"
#include "base/records.h"
#include "base/result.h"

#include <cohort/dtype.h>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <nlohmann/json.hpp>

#include <rapidcheck.h>

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

TEST(Json, IsNoDeeperThanWhatReadsItCanBear) {
  const auto nested = [](std::size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_TRUE(parse_json(nested(kDeepestJson)));
  EXPECT_EQ(std::string(parse_json(nested(kDeepestJson + 1)).error().what()), "more than 64 levels");
  EXPECT_TRUE(parse_json_or_discard(std::string(300'000, '[')).is_discarded());
  EXPECT_TRUE(parse_json("{\"[[[\\\"" + std::string(100, '[') + "\": [1]}")) << "in a text";
  EXPECT_EQ(std::string(parse_json("{\"a\": 1,}").error().what()), "no JSON, from character 9 on");
  EXPECT_TRUE(parse_json_or_discard("[1e999]").is_discarded());
}

TEST(Json, BytesThatAreNoTextAreReplaced) { EXPECT_EQ(json_text(nlohmann::json("a\xFF\n")), "\"a\xEF\xBF\xBD\\n\""); }

TEST(Parse, TakesTheWordsForYesAndNo) {
  for (const char* yes : {"1", "true", "Yes", "ON"}) EXPECT_EQ(parse_truth(yes), true) << yes;
  for (const char* no : {"0", "false", "No", "OFF"}) EXPECT_EQ(parse_truth(no), false) << no;
  for (const char* bad : {"", "2", " 1", "y", "truee", "on\n"}) EXPECT_EQ(parse_truth(bad), std::nullopt) << bad;
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
    EXPECT_FALSE(variable.value().empty()) << variable.name;
    EXPECT_TRUE(env::value(variable.name, env::Map())) << variable.name;
  }
}

TEST(Env, GivesTypedValuesAndDefaults) {
  const env::Map given = {{"COHORT_ENCRYPT", "yes"},
                          {"COHORT_CONNECTIONS", "16"},
                          {"COHORT_TIMEOUT", "0.0015"},
                          {"COHORT_PROGRAM", "a b"},
                          {"COHORT_TIMES", ""}};
  EXPECT_TRUE(*env::flag(env::kEncrypt, given));
  EXPECT_TRUE(*env::flag(env::kIntegrity, given));  // true by default
  EXPECT_FALSE(*env::flag(env::kTimes, given));     // empty counts as not set
  EXPECT_EQ(*env::number(env::kConnections, given), 16);
  EXPECT_EQ(*env::number(env::kConnections, env::Map()), 1);
  EXPECT_EQ(*env::seconds(env::kTimeout, given), std::chrono::milliseconds(2));
  EXPECT_EQ(*env::seconds(env::kTimeout, env::Map()), std::chrono::minutes(30));
  EXPECT_EQ(env::text(env::kProgram, given), "a b");
  EXPECT_EQ(*env::value(env::kTransport, given), env::Value(std::string("tcp")));
  EXPECT_EQ(*env::value(env::kProgram, env::Map()), env::Value());
  EXPECT_EQ(env::number(env::kSecretFd, given).error().code(), ErrorCode::Unavailable);
  EXPECT_THROW(static_cast<void>(env::value("COHORT_NO_SUCH", given)), Error);
  EXPECT_TRUE(env::check(given));
}

TEST(Env, RefusesWrongValuesInOneWay) {
  const std::pair<const char*, const char*> wrong[] = {
      {"COHORT_ENCRYPT=maybe", "COHORT_ENCRYPT='maybe' has no meaning -- give 1 (or true, yes, on) or 0"},
      {"COHORT_CONNECTIONS=17", "COHORT_CONNECTIONS='17' has no meaning -- give a number from 1 to 16, or unset it"},
      {"COHORT_CONNECTIONS=4x", "from 1 to 16"},
      {"COHORT_HOST_TIMEOUT=0", "give a number of seconds from 1 to 3600"},
      {"COHORT_TIMEOUT=nan", "give a number of seconds from 0.001 to 1000000000"},
      {"COHORT_TRANSPORT=tc", "give tcp or mpi"},
      {"COHORT_TRANSPORT=or", "give tcp or mpi"},
  };
  for (const auto& [assignment, words] : wrong) {
    const std::string_view text(assignment);
    const auto equals = text.find('=');
    const env::Map given = {{std::string(text.substr(0, equals)), std::string(text.substr(equals + 1))}};
    const auto good = env::check(given);
    ASSERT_FALSE(good) << assignment;
    EXPECT_EQ(good.error().code(), ErrorCode::InvalidArgument);
    EXPECT_NE(std::string(good.error().what()).find(words), std::string::npos) << good.error().what();
  }
  EXPECT_TRUE(env::check(env::Map{{"HOROVOD_CACHE_CAPACITY", "x"}, {"RANK", "x"}}));  // variables of others are ignored
  EXPECT_FALSE(env::number(env::kRank, env::Map{{"RANK", "x"}}));
}

TEST(DType, HasSizesAndNames) {
  EXPECT_EQ(size_of(DType::BFloat16), 2u);
  EXPECT_EQ(to_string(DType::BFloat16), "bfloat16");
  EXPECT_EQ(to_string(ReduceOp::Product), "product");
  EXPECT_EQ(to_string(DType::Complex128), "complex128");
  EXPECT_EQ(to_string(DType::Bool), "bool");
  EXPECT_EQ(to_string(ReduceOp::BitXor), "bit_xor");
  EXPECT_EQ(size_of(DType::Complex64), sizeof(std::complex<float>));
  EXPECT_EQ(size_of(DTypeOf<std::complex<double>>::value), 16u);
  EXPECT_EQ(size_of(DTypeOf<bool>::value), 1u);
}

TEST(DType, HasNamesForAll) {
  std::set<std::string_view> names;
  for (int d = 0; d < kDTypeCount; ++d) EXPECT_TRUE(names.insert(to_string(static_cast<DType>(d))).second);
  for (int op = 0; op < kReduceOpCount; ++op) EXPECT_TRUE(names.insert(to_string(static_cast<ReduceOp>(op))).second);
  EXPECT_EQ(names.count("unknown"), 0u);
  EXPECT_EQ(to_string(static_cast<DType>(kDTypeCount)), "unknown");
  EXPECT_EQ(to_string(static_cast<ReduceOp>(kReduceOpCount)), "unknown");
}

TEST(DType, KnowsWhatCanBeReduced) {
  int floating = 0;
  int complex = 0;
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    floating += is_floating(dtype) ? 1 : 0;
    complex += is_complex(dtype) ? 1 : 0;
    EXPECT_EQ(is_scalable(dtype), is_floating(dtype) || is_complex(dtype));
    EXPECT_TRUE(supports(dtype, ReduceOp::Sum));
    EXPECT_TRUE(supports(dtype, ReduceOp::Product));
    EXPECT_EQ(supports(dtype, ReduceOp::Average), dtype != DType::Bool);
    EXPECT_EQ(supports(dtype, ReduceOp::Min), !is_complex(dtype));
    EXPECT_EQ(supports(dtype, ReduceOp::BitXor), !is_scalable(dtype));
    EXPECT_FALSE(supports(dtype, static_cast<ReduceOp>(kReduceOpCount)));
  }
  EXPECT_EQ(floating, 4);
  EXPECT_EQ(complex, 2);
  EXPECT_TRUE(supports(DType::Bool, ReduceOp::Max));
  EXPECT_FALSE(supports(static_cast<DType>(kDTypeCount), ReduceOp::Sum));
}

TEST(Ranges, AreReadAndWritten) {
  EXPECT_EQ(*parse_ranges("0,3-5", 8), (std::vector<int>{0, 3, 4, 5}));
  EXPECT_EQ(*parse_ranges("5,1-2,2", 8), (std::vector<int>{1, 2, 5}));
  for (const char* wrong : {"", "a", "1-", "-1", "3-1", "1,,2", "8", "0-8", "1 2"})
    EXPECT_FALSE(parse_ranges(wrong, 8));
  EXPECT_EQ(to_ranges({0, 1, 2, 5}), "0-2,5");
  EXPECT_EQ(to_ranges({}), "");
  EXPECT_EQ(to_ranges({7}), "7");
}

}  // namespace
}  // namespace cohort

namespace cohort::codec {
namespace {

TEST(Codec, ReadsBackWhatWasWritten) {
  Writer writer;
  writer.number<std::uint32_t>(7).text("seven").number(-1.5).text("");
  Reader reader(writer.bytes());
  EXPECT_EQ(reader.number<std::uint32_t>().value(), 7u);
  EXPECT_EQ(reader.text(16).value(), "seven");
  EXPECT_EQ(reader.number<double>().value(), -1.5);
  EXPECT_EQ(reader.text(0).value(), "");
  EXPECT_TRUE(reader.at_end());
}

TEST(Codec, RefusesEveryTruncation) {
  Writer writer;
  writer.number<std::uint64_t>(1).text("payload");
  const std::string whole = writer.take();
  for (std::size_t length = 0; length < whole.size(); ++length) {
    Reader reader(std::string_view(whole).substr(0, length));
    const auto number = reader.number<std::uint64_t>();
    if (!number) {
      EXPECT_EQ(number.error().code(), ErrorCode::Corrupt);
      continue;
    }
    EXPECT_EQ(reader.text(64).error().code(), ErrorCode::Corrupt) << "cut at " << length;
  }
}

TEST(Codec, RefusesTextLongerThanAllowed) {
  Writer writer;
  writer.text("four");
  EXPECT_FALSE(Reader(writer.bytes()).text(3));
}

// Properties that the codec has for any values.

RC_GTEST_PROP(CodecProperty, ReadsBackWhatWasWritten, (std::uint64_t whole, std::int16_t small, std::string text)) {
  Writer writer;
  writer.number(whole).text(text).number(small);
  Reader reader(writer.bytes());
  RC_ASSERT(reader.number<std::uint64_t>().value() == whole);
  RC_ASSERT(reader.text(text.size()).value() == text);
  RC_ASSERT(reader.number<std::int16_t>().value() == small);
  RC_ASSERT(reader.at_end());
}

}  // namespace
}  // namespace cohort::codec
