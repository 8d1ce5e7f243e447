#include "train/formats/safetensors.h"

#include "train/formats/testing.h"

#include <cstring>

namespace cohort::formats {
namespace {

std::vector<std::byte> file_of(const std::string& header, std::size_t data) {
  const std::uint64_t size = header.size();
  std::vector<std::byte> bytes(sizeof size + header.size() + data);
  std::memcpy(bytes.data(), &size, sizeof size);
  std::memcpy(bytes.data() + sizeof size, header.data(), header.size());
  return bytes;
}

std::vector<std::byte> written(const std::vector<NamedTensor>& tensors,
                               const std::map<std::string, std::string>& metadata = {}) {
  std::vector<std::byte> bytes;
  const auto done = write_safetensors(
      [&](std::span<const std::byte> more) -> Result<void> {
        bytes.insert(bytes.end(), more.begin(), more.end());
        return {};
      },
      tensors, metadata);
  EXPECT_TRUE(done) << done.error().what();
  return bytes;
}

std::string refusal(const std::string& header, std::size_t data) {
  const auto bytes = file_of(header, data);
  const auto file = parse_safetensors(bytes, "x.safetensors");
  if (file) return "accepted";
  EXPECT_EQ(file.error().code(), ErrorCode::Corrupt);
  return file.error().what();
}

TEST(Safetensors, RoundTripsRandomFiles) {
  std::mt19937 random(7);
  for (int round = 0; round < 100; ++round) {
    std::vector<std::vector<std::byte>> contents;
    std::vector<NamedTensor> tensors;
    const auto count = random() % 12;
    for (unsigned i = 0; i < count; ++i) {
      NamedTensor entry{fmt::format("läyer \"{}\"\n.{}", i, random()),
                        {static_cast<ElementType>(random() % kElementTypeCount), {}, {}}};
      for (auto dimensions = random() % 4; dimensions > 0; --dimensions)
        entry.tensor.shape.push_back(static_cast<std::int64_t>(random() % 5));
      contents.push_back(random_bytes(static_cast<std::size_t>(*byte_count(entry.tensor.type, entry.tensor.shape)),
                                      static_cast<unsigned>(random())));
      tensors.push_back(std::move(entry));
    }
    for (std::size_t i = 0; i < count; ++i) tensors[i].tensor.bytes = contents[i];
    const std::map<std::string, std::string> metadata = {{"format", "pt"}, {"wörd", "a\"b\\c\x01"}};
    const auto bytes = written(tensors, metadata);
    const auto file = parse_safetensors(bytes, "x");
    ASSERT_TRUE(file) << file.error().what();
    EXPECT_EQ(file->metadata, metadata);
    ASSERT_EQ(file->tensors.size(), count);
    for (const NamedTensor& entry : tensors) {
      const TensorView* const back = file->find(entry.name);
      ASSERT_NE(back, nullptr) << entry.name;
      EXPECT_EQ(back->type, entry.tensor.type);
      EXPECT_EQ(back->shape, entry.tensor.shape);
      EXPECT_EQ(copy_of(back->bytes), copy_of(entry.tensor.bytes));
      // Aligned to its elements wherever the file lies in memory at a multiple of 64.
      EXPECT_EQ((back->bytes.data() - bytes.data()) % static_cast<std::ptrdiff_t>(info(back->type).bytes), 0);
    }
  }
}

TEST(Safetensors, RefusesEveryTruncationAndAddition) {
  const auto content = random_bytes(24, 1);
  auto bytes = written({{"a", {ElementType::Float32, {2, 2}, std::span(content).first(16)}},
                        {"b", {ElementType::Int64, {}, std::span(content).last(8)}}});
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(parse_safetensors(std::span(bytes).first(size), "cut")) << size;
  }
  bytes.push_back(std::byte{0});
  EXPECT_FALSE(parse_safetensors(bytes, "long"));
}

TEST(Safetensors, SaysWhatIsWrong) {
  const std::string a = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  EXPECT_EQ(refusal(a + "}", 8), "accepted");
  const std::pair<std::string, std::string> kCases[] = {
      {a, "not JSON"},
      {a + R"(,"a":{"dtype":"F32","shape":[0],"data_offsets":[8,8]}})", "'a' stands there twice"},
      {a + R"(,"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", "overlap"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", "belong to no tensor"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "4 bytes follow"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,16]}})", "where there are 8 bytes"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", "data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", "does not have 8 bytes"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387906],"data_offsets":[0,8]}})", "does not have 8 bytes"},
      {R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", "the number -2"},
      {R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", "the number 2.0"},
      {R"({"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}})", "unknown dtype 'F33'"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})", "unknown key 'x'"},
      {R"({"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}})", "twice"},
      {R"({"a":{"dtype":"F32","shape":[2]}})", "missing"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}})", "more than two"},
      {R"({"a":{"dtype":"F32","shape":[[2]],"data_offsets":[0,8]}})", "a list"},
      {R"({"a":[0]})", "object"},
      {R"({"a":"b"})", "object"},
      {R"({"__metadata__":{"a":1}})", "the number 1"},
      {R"({"__metadata__":{"a":"b","a":"b"}})", "twice"},
  };
  for (const auto& [header, part] : kCases) {
    const std::string message = refusal(header, 8);
    EXPECT_NE(message.find(part), std::string::npos) << header << "\n" << message;
    EXPECT_NE(message.find("x.safetensors"), std::string::npos) << message;
  }
  auto long_header = file_of("{}", 0);
  long_header[4] = std::byte{1};
  EXPECT_NE(std::string(parse_safetensors(long_header, "x").error().what()).find("at most 100000000"),
            std::string::npos);
  EXPECT_FALSE(parse_safetensors(file_of(std::string(1 << 20, '['), 0), "deep"));
  EXPECT_FALSE(parse_safetensors(file_of("{\"a\":" + std::string(1 << 20, '['), 0), "deep"));
}

TEST(Safetensors, RefusesToWriteNonsense) {
  const Sink sink = [](std::span<const std::byte>) -> Result<void> { return {}; };
  const std::vector<std::byte> four(4);
  const TensorView one{ElementType::Float32, {1}, four};
  const auto code = [&](const std::vector<NamedTensor>& tensors) {
    return write_safetensors(sink, tensors).error().code();
  };
  EXPECT_EQ(code({{"a", one}, {"a", one}}), ErrorCode::InvalidArgument);
  EXPECT_EQ(code({{"__metadata__", one}}), ErrorCode::InvalidArgument);
  EXPECT_EQ(code({{"\xff", one}}), ErrorCode::InvalidArgument);
  EXPECT_EQ(code({{"a", {ElementType::Float32, {2}, four}}}), ErrorCode::InvalidArgument);
}

TEST(Safetensors, AgreesWithTheReferenceImplementation) {
  const std::string python = pythons_with_torch().empty() ? "python3" : pythons_with_torch().front();
  if (!run_python(python, "import safetensors.numpy, numpy", "")) GTEST_SKIP() << "no Python package safetensors here";
  TestFolder folder;
  const auto content = random_bytes(24, 3);
  const std::vector<NamedTensor> tensors = {{"w", {ElementType::Float32, {2, 3}, content}}};
  ASSERT_TRUE(write_safetensors(folder / "a.safetensors", tensors, {{"format", "pt"}}));
  ASSERT_TRUE(run_python(python,
                         "import sys, safetensors.numpy as s\n"
                         "t = s.load_file(sys.argv[1]); assert t['w'].shape == (2, 3)\n"
                         "s.save_file(t, sys.argv[2], {'k': 'v'})\n",
                         folder / "a.safetensors" + " " + (folder / "b.safetensors")));
  const auto bytes = sys::read_file(folder / "b.safetensors");
  ASSERT_TRUE(bytes);
  const auto back = parse_safetensors(bytes->bytes(), "b");
  ASSERT_TRUE(back) << back.error().what();
  EXPECT_EQ(copy_of(back->find("w")->bytes), content);
  EXPECT_EQ(back->metadata.at("k"), "v");
}

}  // namespace
}  // namespace cohort::formats
