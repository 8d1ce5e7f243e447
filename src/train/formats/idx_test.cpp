#include "train/formats/idx.h"

#include "base/files.h"
#include "train/formats/testing.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>

namespace cohort::formats {
namespace {

std::vector<std::byte> bytes_of(std::initializer_list<int> values) {
  std::vector<std::byte> bytes;
  for (const int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

// Two images of 2 x 3 as MNIST has them.
const std::vector<std::byte> kImages =
    bytes_of({0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 255});

TEST(Idx, ReadsMnistPlainAndGzip) {
  for (const auto& bytes : {kImages, gzip(kImages)}) {
    const auto array = parse_idx(bytes, "images");
    ASSERT_TRUE(array) << array.error().what();
    EXPECT_EQ(array->dtype, DType::UInt8);
    EXPECT_EQ(array->shape, (std::vector<std::int64_t>{2, 2, 3}));
    EXPECT_EQ(array->elements(), 12);
    EXPECT_EQ(std::to_integer<int>(array->data[11]), 255);
  }
}

TEST(Idx, ReadsBigEndianElements) {
  const auto array = parse_idx(bytes_of({0, 0, 0x0C, 1, 0, 0, 0, 2, 0, 0, 1, 2, 0xff, 0xff, 0xff, 0xfe}), "ints");
  ASSERT_TRUE(array) << array.error().what();
  std::array<std::int32_t, 2> values{};
  std::memcpy(values.data(), array->data.data(), sizeof values);
  EXPECT_EQ(values[0], 258);
  EXPECT_EQ(values[1], -2);
}

TEST(Idx, ReadsEveryTypeFromFiles) {
  const TestFolder folder;
  const std::pair<int, DType> types[] = {{0x08, DType::UInt8}, {0x09, DType::Int8},    {0x0B, DType::Int16},
                                         {0x0C, DType::Int32}, {0x0D, DType::Float32}, {0x0E, DType::Float64}};
  for (const auto& [code, dtype] : types) {
    IdxArray array{dtype, {3, 5}, {}};
    for (std::size_t i = 0; i < 15 * size_of(dtype); ++i) array.data.push_back(static_cast<std::byte>(i * 37));
    const std::vector<std::byte> bytes = idx_bytes(array, code);
    for (const auto& file : {bytes, gzip(bytes)}) {
      ASSERT_TRUE(sys::write_file_atomically(folder / "a.idx", file));
      const auto back = read_idx(folder / "a.idx");
      ASSERT_TRUE(back) << back.error().what();
      EXPECT_EQ(back->dtype, dtype);
      EXPECT_EQ(back->shape, array.shape);
      EXPECT_EQ(back->data, array.data);
    }
  }
}

TEST(Idx, RefusesEveryTruncationAndEveryAddition) {
  for (auto bytes : {kImages, gzip(kImages)}) {
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      const auto cut = parse_idx(std::span(bytes).first(size), "cut");
      ASSERT_FALSE(cut) << size;
      EXPECT_EQ(cut.error().code(), ErrorCode::Corrupt);
    }
    bytes.push_back(std::byte{0});
    EXPECT_FALSE(parse_idx(bytes, "long"));
  }
}

TEST(Idx, NeverTakesDamagedGzipDataForOtherData) {
  const auto right = parse_idx(kImages, "right");
  int found = 0;
  const auto packed = gzip(kImages);
  for (std::size_t bit = 10 * 8; bit < packed.size() * 8; ++bit) {  // the first ten bytes are header: time, system
    auto damaged = packed;
    damaged[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    const auto array = parse_idx(damaged, "damaged");
    if (!array) {
      ++found;
    } else {  // the padding between the data and the checksum is ignored
      EXPECT_EQ(array->data, right->data) << "bit " << bit;
      EXPECT_EQ(array->shape, right->shape) << "bit " << bit;
    }
  }
  EXPECT_GE(found, static_cast<int>(packed.size() * 8) - 10 * 8 - 7);
}

TEST(Idx, RefusesHeadersThatPromiseTooMuch) {
  EXPECT_FALSE(parse_idx(bytes_of({0, 0, 8, 9}), "nine dimensions"));
  auto overflow = bytes_of({0, 0, 0x0E, 8});
  overflow.resize(4 + 32, std::byte{0xff});
  EXPECT_FALSE(parse_idx(overflow, "overflow"));
  EXPECT_FALSE(parse_idx(bytes_of({0, 0, 8, 3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0}),
                         "empty, yet too large"));
  const std::vector<std::byte> zeros(1 << 20);
  const auto bomb = parse_idx(gzip(zeros), "bomb", {.max_bytes = 1000});
  ASSERT_FALSE(bomb);
  EXPECT_NE(std::string(bomb.error().what()).find("more than 1000 bytes"), std::string::npos);
}

TEST(Idx, NamesWhatIsWrong) {
  const auto missing = read_idx("/nonexistent/images.idx");
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code(), ErrorCode::Unavailable);
  const auto longer = parse_idx(bytes_of({0, 0, 8, 1, 0, 0, 0, 9, 1}), "labels.idx");
  ASSERT_FALSE(longer);
  EXPECT_STREQ(longer.error().what(),
               "labels.idx: holds 1 bytes of data, but its header promises 9 elements of uint8 -- get the file again");
}

}  // namespace
}  // namespace cohort::formats
