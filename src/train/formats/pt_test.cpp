#include "train/formats/pt.h"

#include "train/formats/testing.h"
#include "train/formats/weights.h"

#include <cstring>

namespace cohort::formats {
namespace {

std::vector<std::byte> written(const PtValue& value, const PtWriteOptions& options = {}) {
  std::vector<std::byte> bytes;
  const auto done = write_pt(
      [&](std::span<const std::byte> more) -> Result<void> {
        bytes.insert(bytes.end(), more.begin(), more.end());
        return {};
      },
      value, options);
  EXPECT_TRUE(done) << done.error().what();
  return bytes;
}

PtValue dict(std::vector<std::pair<PtValue, PtValue>> items) {
  return std::make_shared<const PtDict>(PtDict{std::move(items)});
}

const PtDict& as_dict(const PtValue& value) { return *std::get<std::shared_ptr<const PtDict>>(value); }

/// Text that shows every bit of a value.
std::string show(const PtValue& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "T" : "F";
  if (const auto* number = std::get_if<std::int64_t>(&value)) return std::to_string(*number);
  if (const auto* real = std::get_if<double>(&value)) return fmt::format("{:a}", *real);
  if (const auto* text = std::get_if<std::string>(&value)) return "'" + *text + "'";
  if (const auto* tensor = std::get_if<PtTensor>(&value)) {
    std::string out = fmt::format("<{} {}", info(tensor->type).torch, shape_text(tensor->shape));
    for (const std::byte byte : tensor->gather()) out += fmt::format(" {:02x}", std::to_integer<int>(byte));
    return out + ">";
  }
  std::string out;
  if (const auto* list = std::get_if<std::shared_ptr<const PtList>>(&value)) {
    for (const auto& item : (*list)->items) out += show(item) + ",";
    return "[" + out + "]";
  }
  if (const auto* tuple = std::get_if<std::shared_ptr<const PtTuple>>(&value)) {
    for (const auto& item : (*tuple)->items) out += show(item) + ",";
    return "(" + out + ")";
  }
  if (std::holds_alternative<std::shared_ptr<const PtDict>>(value)) {
    for (const auto& [key, item] : as_dict(value).items) out += show(key) + ":" + show(item) + ",";
    return "{" + out + "}";
  }
  return "None";
}

/// Nested values of all kinds over `content`.
PtValue random_value(std::mt19937& random, std::span<const std::byte> content, int depth) {
  switch (random() % (depth > 3 ? 6 : 9)) {
    case 0: return std::monostate();
    case 1: return random() % 2 == 0;
    case 2: return static_cast<std::int64_t>(std::uint64_t{random()} << 32 | random()) >> random() % 64;
    case 3: return static_cast<double>(random()) / 7;
    case 4: return fmt::format("tëxt {}", random());
    case 5: {
      PtTensor tensor{static_cast<ElementType>(random() % kElementTypeCount), {}, {}, 0, content};
      const auto columns = static_cast<std::int64_t>(1 + random() % 3),
                 rows = static_cast<std::int64_t>(1 + random() % 3);
      tensor.shape = {rows, columns};
      tensor.strides = {1, rows};  // column-major: has to be gathered
      tensor.offset = static_cast<std::int64_t>(random() % 4);
      tensor.storage = content.first(128);
      return tensor;
    }
    case 6:
    case 7: {
      std::vector<PtValue> items;
      for (auto count = random() % 4; count > 0; --count) items.push_back(random_value(random, content, depth + 1));
      if (random() % 2 == 0) return std::make_shared<const PtList>(PtList{std::move(items)});
      return std::make_shared<const PtTuple>(PtTuple{std::move(items)});
    }
    default: {
      PtDict out;
      for (auto count = random() % 4; count > 0; --count) {
        if (random() % 2 == 0)
          out.add(fmt::format("key{}", count), random_value(random, content, depth + 1));
        else
          out.add(static_cast<std::int64_t>(count), random_value(random, content, depth + 1));
      }
      return std::make_shared<const PtDict>(std::move(out));
    }
  }
}

TEST(Pt, RoundTripsRandomValues) {
  std::mt19937 random(11);
  const auto content = random_bytes(128, 5);
  for (int round = 0; round < 300; ++round) {
    const PtValue value = random_value(random, content, 0);
    const auto bytes = written(value, {.zip64 = round % 2 == 0 ? Zip64::WhereNeeded : Zip64::Always});
    const auto back = parse_pt(bytes, "x.pt");
    ASSERT_TRUE(back) << back.error().what();
    EXPECT_EQ(show(*back), show(value));
  }
}

TEST(Pt, AlignsEveryStorageTo64BytesAndSharesThem) {
  const auto content = random_bytes(128, 5);
  const PtTensor whole = std::get<PtTensor>(pt_tensor({ElementType::Float32, {32}, content}));
  PtTensor half = whole;
  half.shape = {16};
  half.offset = 16;
  const auto bytes = written(dict({{"whole", whole},
                                   {"half", half},
                                   {"odd", pt_tensor({ElementType::Int8, {3}, std::span(content).first(3)})},
                                   {"last", pt_tensor({ElementType::Float64, {1}, std::span(content).first(8)})}}));
  const auto archive = ZipReader::parse(bytes, "x");
  ASSERT_TRUE(archive) << archive.error().what();
  int storages = 0;
  for (const ZipEntry& entry : archive->entries()) {
    EXPECT_EQ(entry.offset % 64, 0u) << entry.name;
    storages += entry.name.find("/data/") != std::string::npos ? 1 : 0;
  }
  EXPECT_EQ(storages, 3);
  const auto back = parse_pt(bytes, "x");
  ASSERT_TRUE(back);
  const auto& a = std::get<PtTensor>(*as_dict(*back).find("whole"));
  const auto& b = std::get<PtTensor>(*as_dict(*back).find("half"));
  EXPECT_EQ(a.storage.data(), b.storage.data());
}

TEST(Pt, RefusesEveryTruncation) {
  const auto content = random_bytes(64, 5);
  for (const Zip64 zip64 : {Zip64::WhereNeeded, Zip64::Always}) {
    const auto bytes = written(dict({{"w", pt_tensor({ElementType::Float32, {16}, content})}}), {.zip64 = zip64});
    for (std::size_t size = 0; size < bytes.size(); ++size)
      ASSERT_FALSE(parse_pt(std::span(bytes).first(size), "cut")) << size;
  }
}

TEST(Pt, NeverTakesAFlippedBitForOtherValues) {
  const auto content = random_bytes(64, 5);
  const PtValue value =
      dict({{"w", pt_tensor({ElementType::Float32, {4, 4}, content})}, {"step", std::int64_t{70000}}});
  const auto bytes = written(value);
  int harmless = 0;
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    auto damaged = bytes;
    damaged[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    const auto back = parse_pt(damaged, "damaged");
    if (!back) continue;
    ++harmless;  // time stamps, versions and padding are ignored
    ASSERT_EQ(show(*back), show(value)) << "bit " << bit;
  }
  EXPECT_LT(harmless, static_cast<int>(bytes.size() * 8 / 2));
}

std::string refusal(std::string_view program) {
  const auto bytes = as_bytes(program);
  const auto value = unpickle(bytes, "x.pt", {}, [](const std::string&) -> Result<std::span<const std::byte>> {
    static const std::vector<std::byte> kBytes(16);
    return std::span<const std::byte>(kBytes);
  });
  if (value) return "accepted " + show(*value);
  return value.error().what();
}

TEST(Pickle, RunsNothing) {
  using std::string_view_literals::operator""sv;
  const std::pair<std::string_view, std::string_view> kCases[] = {
      {"\x80\x02"
       "cos\nsystem\nX\x02\0\0\0ls\x85R."sv,
       "'os.system'"},
      {"\x80\x02"
       "cbuiltins\neval\nX\x01\0\0\0"
       "1\x85R."sv,
       "'builtins.eval'"},
      {"\x80\x02"
       "ctorch\nload\n."sv,
       "'torch.load'"},
      {"\x80\x04\x8c\x02os\x8c\x06system\x93."sv, "'os.system'"},
      {"(i"sv, "opcode 0x69"},
      {"\x80\x02K\x01K\x02\x86\x81."sv, "opcode 0x81"},
      {"\x80\x02K\x01K\x02."sv, "one value"},
      {"\x80\x02."sv, "one value"},
      {"\x80\x02(."sv, "one value"},
      {"\x80\x02K\x01.K"sv, "follow its end"},
      {"\x80\x02t."sv, "mark"},
      {"\x80\x02]q\0h\0a."sv, "contains itself"},
      {"\x80\x02h\x05."sv, "never made"},
      {"\x80\x02K\x01K\x01"
       "a."sv,
       "no list"},
      {"\x80\x02}(K\x01u."sv, "no value"},
      {"\x80\x02}(K\x01K\x02K\x01K\x03u."sv, "twice"},
      {"\x80\x02}(]K\x02u."sv, "neither text nor an integer"},
      {"\x80\x02K\x01R."sv, "empty"},
      {"\x80\x02K\x01)R."sv, "no function"},
      {"\x80\x02"
       "ctorch\nFloatStorage\n)R."sv,
       "calls a type"},
      {"\x80\x02X\xff\xff\xff\xff."sv, "within a text"},
      {"\x80\x02X\x01\0\0\0\xff."sv, "UTF-8"},
      {"\x80\x02\x8a\x09"
       "123456789."sv,
       "64 bits"},
      {"\x80\x02K\x01}b."sv, "no OrderedDict"},
  };
  for (const auto& [program, part] : kCases) {
    EXPECT_NE(refusal(program).find(part), std::string::npos) << refusal(program) << " does not say " << part;
  }
  std::string deep = "\x80\x02";
  for (int i = 0; i < 100'000; ++i) deep += "](";
  deep += std::string(100'000, 'e') + ".";
  EXPECT_NE(refusal(deep).find("nested deeper"), std::string::npos) << refusal(deep);
}

TEST(Pickle, ChecksTensorsAgainstTheirStorage) {
  // shape, strides and offset over a storage of 4 floats
  const auto tensor = [](const std::string& offset, const std::string& shape, const std::string& strides, int count) {
    using std::string_view_literals::operator""sv;
    return std::string(
               "\x80\x02"
               "ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0"
               "0X\x03\0\0\0cpuK"sv) +
           static_cast<char>(count) + "tQ" + offset + "(" + shape + "t(" + strides + "t\x89NtR.";
  };
  const std::string one("K\1", 2), four("K\4", 2), five("K\5", 2), zero("K\0", 2), minus("J\xff\xff\xff\xff", 5);
  const std::string huge("\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", 10);
  EXPECT_EQ(refusal(tensor(zero, four, one, 4)).substr(0, 8), "accepted") << refusal(tensor(zero, four, one, 4));
  EXPECT_NE(refusal(tensor(zero, four, one, 5)).find("said to have 5"), std::string::npos);
  EXPECT_NE(refusal(tensor(zero, five, one, 4)).find("beyond its storage"), std::string::npos);
  EXPECT_NE(refusal(tensor(one, four, one, 4)).find("beyond its storage"), std::string::npos);
  EXPECT_NE(refusal(tensor(minus, four, one, 4)).find("no offset"), std::string::npos);
  EXPECT_NE(refusal(tensor(zero, four, minus, 4)).find("from 0 on"), std::string::npos);
  EXPECT_NE(refusal(tensor(zero, four + four, one, 4)).find("as many strides"), std::string::npos);
  EXPECT_NE(refusal(tensor(zero, huge + huge, one + one, 4)).find("too large"), std::string::npos);
  EXPECT_NE(refusal(tensor(zero, four, huge, 4)).find("too large"), std::string::npos);
}

constexpr const char* kPythonWrites = R"(
import sys, collections, torch
torch.manual_seed(1)
base = torch.arange(24.).reshape(4, 6)
bn = torch.nn.BatchNorm1d(3)
net = torch.nn.Sequential(torch.nn.Linear(2, 3), bn)
optimizer = torch.optim.Adam(net.parameters(), lr=0.125)
net(torch.ones(4, 2)).sum().backward(); optimizer.step()
torch.save(collections.OrderedDict(f32=torch.ones(2, 3), f64=torch.full((2,), 0.1, dtype=torch.float64), half=torch.tensor([1.5]).half(),
    bf16=torch.tensor([1.5, -2]).bfloat16(), i64=torch.tensor(-5), i32=torch.tensor([1], dtype=torch.int32), i16=torch.tensor([-1], dtype=torch.int16),
    i8=torch.tensor([-1], dtype=torch.int8), u8=torch.tensor([255], dtype=torch.uint8), flag=torch.tensor([True, False]),
    view=base[1:3, ::2], transposed=base.t(), empty=torch.empty(0, 3), expanded=torch.ones(1).expand(3),
    parameter=torch.nn.Parameter(torch.zeros(2)), tied=base), sys.argv[1] + '/tensors.pt')
torch.save(net.state_dict(), sys.argv[1] + '/state.pt')
torch.save({'model': net.state_dict(), 'optimizer': optimizer.state_dict(), 'epoch': 3, 'big': 2**40, 'minus': -2**40, 'loss': 0.5,
    'list': [1, 'two', (None, True)], 'size': torch.Size([1, 2]), 'dtype': torch.float32}, sys.argv[1] + '/all.pt')
class Evil:
    def __reduce__(self):
        import os
        return os.mkdir, (sys.argv[1] + '/evil',)
torch.save({'w': torch.ones(1), 'x': Evil()}, sys.argv[1] + '/evil.pt')
torch.save(torch.ones(2), sys.argv[1] + '/legacy.pt', _use_new_zipfile_serialization=False)
torch.jit.script(torch.nn.Linear(1, 1)).save(sys.argv[1] + '/script.pt')
)";

Result<PtValue> read(const std::string& path, sys::FileBytes& bytes) {
  auto file = sys::read_file(path);
  if (!file) return tl::unexpected(file.error());
  bytes = std::move(*file);
  return parse_pt(bytes.bytes(), path);
}

std::string hex_of(std::initializer_list<float> values) {
  std::string out;
  for (const float value : values) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    for (int shift = 0; shift < 32; shift += 8) out += fmt::format(" {:02x}", bits >> shift & 0xff);
  }
  return out;
}

TEST(PtInterop, ReadsWhatPythonSaved) {
  if (pythons_with_torch().empty()) GTEST_SKIP() << "no Python with torch here";
  for (const std::string& python : pythons_with_torch()) {
    SCOPED_TRACE(python);
    TestFolder folder;
    ASSERT_TRUE(run_python(python, kPythonWrites, folder.path()));
    sys::FileBytes bytes;
    const auto value = read(folder / "tensors.pt", bytes);
    ASSERT_TRUE(value) << value.error().what();
    const PtDict& tensors = as_dict(*value);
    const auto shown = [&](std::string_view key) { return show(*tensors.find(key)); };
    EXPECT_EQ(shown("f32"), "<float32 [2, 3]" + hex_of({1, 1, 1, 1, 1, 1}) + ">");
    EXPECT_EQ(shown("f64"), "<float64 [2] 9a 99 99 99 99 99 b9 3f 9a 99 99 99 99 99 b9 3f>");
    EXPECT_EQ(shown("half"), "<float16 [1] 00 3e>");
    EXPECT_EQ(shown("bf16"), "<bfloat16 [2] c0 3f 00 c0>");
    EXPECT_EQ(shown("i64"), "<int64 [] fb ff ff ff ff ff ff ff>");
    EXPECT_EQ(shown("i32"), "<int32 [1] 01 00 00 00>");
    EXPECT_EQ(shown("i16"), "<int16 [1] ff ff>");
    EXPECT_EQ(shown("i8"), "<int8 [1] ff>");
    EXPECT_EQ(shown("u8"), "<uint8 [1] ff>");
    EXPECT_EQ(shown("flag"), "<bool [2] 01 00>");
    EXPECT_EQ(shown("view"), "<float32 [2, 3]" + hex_of({6, 8, 10, 12, 14, 16}) + ">");
    EXPECT_EQ(shown("transposed"),
              "<float32 [6, 4]" +
                  hex_of({0, 6, 12, 18, 1, 7, 13, 19, 2, 8, 14, 20, 3, 9, 15, 21, 4, 10, 16, 22, 5, 11, 17, 23}) + ">");
    EXPECT_EQ(shown("empty"), "<float32 [0, 3]>");
    EXPECT_EQ(shown("expanded"), "<float32 [3]" + hex_of({1, 1, 1}) + ">");
    EXPECT_EQ(shown("parameter"), "<float32 [2]" + hex_of({0, 0}) + ">");
    EXPECT_EQ(std::get<PtTensor>(*tensors.find("tied")).storage.data(),
              std::get<PtTensor>(*tensors.find("view")).storage.data());

    const auto state = read_weights(folder / "state.pt");
    ASSERT_TRUE(state) << state.error().what();
    EXPECT_EQ(state->tensors.size(), 7u);
    EXPECT_EQ(state->tensors.front().name, "0.weight");

    sys::FileBytes more;
    const auto all = read(folder / "all.pt", more);
    ASSERT_TRUE(all) << all.error().what();
    const PtDict& root = as_dict(*all);
    EXPECT_EQ(show(*root.find("big")), std::to_string(std::int64_t{1} << 40));
    EXPECT_EQ(show(*root.find("minus")), std::to_string(-(std::int64_t{1} << 40)));
    EXPECT_EQ(show(*root.find("loss")), show(PtValue(0.5)));
    EXPECT_EQ(show(*root.find("list")), "[1,'two',(None,T,),]");
    EXPECT_EQ(show(*root.find("size")), "(1,2,)");
    EXPECT_EQ(show(*root.find("dtype")), "'torch.float32'");
    const PtDict& optimizer = as_dict(*root.find("optimizer"));
    EXPECT_EQ(as_dict(*optimizer.find("state")).items.size(), 4u);
    EXPECT_TRUE(read_weights(folder / "all.pt", {.key = "model"}));
    const auto unkeyed = read_weights(folder / "all.pt");
    ASSERT_FALSE(unkeyed);
    EXPECT_NE(std::string(unkeyed.error().what()).find("its keys: 'model' (a dict)"), std::string::npos)
        << unkeyed.error().what();

    for (const auto& [file, part] : {std::pair("evil.pt", "mkdir"), std::pair("legacy.pt", "before torch 1.6"),
                                     std::pair("script.pt", "TorchScript")}) {
      const auto refused = read_weights(folder / file);
      ASSERT_FALSE(refused) << file;
      EXPECT_NE(std::string(refused.error().what()).find(part), std::string::npos) << refused.error().what();
    }
    EXPECT_NE(::access((folder / "evil").c_str(), F_OK), 0) << "the pickle was run";
  }
}

constexpr const char* kPythonReads = R"(
import sys, torch
for name in ('plain.pt', 'zip64.pt'):
    v = torch.load(sys.argv[1] + '/' + name, weights_only=True)
    assert list(v) == ['w', 'tied', 'bf16', 'flag', 'scalar', 'empty', 'nested'], list(v)
    assert v['w'].dtype == torch.float32 and v['w'].shape == (2, 3) and v['w'].tolist() == [[0, 1, 2], [3, 4, 5]]
    v['w'].add_(1)
    assert v['tied'].tolist() == [[1, 4], [2, 5], [3, 6]] and not v['tied'].requires_grad
    assert v['bf16'].dtype == torch.bfloat16 and v['bf16'].tolist() == [1.5, -2]
    assert v['flag'].dtype == torch.bool and v['flag'].tolist() == [True, False]
    assert v['scalar'].shape == () and v['scalar'].item() == -7
    assert v['empty'].shape == (0, 3)
    n = v['nested']
    assert n['ints'] == [0, 255, 256, -1, 2**31, -2**63, 2**63 - 1] and n['text'] == 'grün' and n['yes'] is True and n['none'] is None, n
    assert n['tuple'] == (1, 'a') and n[5] == {} and float(n['pi']) == 3.140625
    print(name, torch.__version__)
)";

TEST(PtInterop, WritesWhatPythonLoadsWithWeightsOnly) {
  if (pythons_with_torch().empty()) GTEST_SKIP() << "no Python with torch here";
  const std::vector<float> numbers = {0, 1, 2, 3, 4, 5};
  const auto bf16 = std::vector<std::byte>{std::byte{0xc0}, std::byte{0x3f}, std::byte{0x00}, std::byte{0xc0}};
  const auto flags = std::vector<std::byte>{std::byte{1}, std::byte{0}};
  const std::int64_t minus_seven = -7;
  const PtValue w = pt_tensor({ElementType::Float32, {2, 3}, std::as_bytes(std::span(numbers))});
  PtTensor tied = std::get<PtTensor>(w);
  tied.shape = {3, 2};
  tied.strides = {1, 3};
  const auto list = [](std::vector<PtValue> items) { return std::make_shared<const PtList>(PtList{std::move(items)}); };
  const PtValue nested = dict({{"ints", list({std::int64_t{0}, std::int64_t{255}, std::int64_t{256}, std::int64_t{-1},
                                              std::int64_t{1} << 31, INT64_MIN, INT64_MAX})},
                               {"text", std::string("grün")},
                               {"yes", true},
                               {"none", std::monostate()},
                               {"tuple", std::make_shared<const PtTuple>(PtTuple{{std::int64_t{1}, std::string("a")}})},
                               {std::int64_t{5}, dict({})},
                               {"pi", 3.140625}});
  const PtValue root = dict({{"w", w},
                             {"tied", tied},
                             {"bf16", pt_tensor({ElementType::BFloat16, {2}, bf16})},
                             {"flag", pt_tensor({ElementType::Bool, {2}, flags})},
                             {"scalar", pt_tensor({ElementType::Int64, {}, std::as_bytes(std::span(&minus_seven, 1))})},
                             {"empty", pt_tensor({ElementType::Float32, {0, 3}, {}})},
                             {"nested", nested}});
  for (const std::string& python : pythons_with_torch()) {
    TestFolder folder;
    const bool old = !run_python(python, "import torch, sys; sys.exit(int(torch.__version__.startswith('1.')))", "");
    const PtFloats floats = old ? PtFloats::Tensor : PtFloats::Number;
    ASSERT_TRUE(write_pt(folder / "plain.pt", root, {.floats = floats}));
    ASSERT_TRUE(write_pt(folder / "zip64.pt", root, {.floats = floats, .zip64 = Zip64::Always}));
    EXPECT_TRUE(run_python(python, kPythonReads, folder.path()));
  }
}

}  // namespace
}  // namespace cohort::formats
