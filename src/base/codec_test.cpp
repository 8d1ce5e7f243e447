#include "base/codec.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace cohort::codec
