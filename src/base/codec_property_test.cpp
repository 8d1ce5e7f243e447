// What the codec promises for any values.
#include "base/codec.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

namespace cohort::codec {
namespace {

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
