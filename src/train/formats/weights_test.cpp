#include "train/formats/weights.h"

#include "train/formats/checkpoint_folder.h"
#include "train/formats/safetensors.h"
#include "train/formats/testing.h"

#include <cstdlib>
#include <filesystem>
#include <limits>
#include <tuple>

namespace cohort::formats {
namespace {

namespace fs = std::filesystem;

/// While it lives, a folder comes first in PATH.
class FirstInPath {
 public:
  explicit FirstInPath(const std::string& folder) { ::setenv("PATH", (folder + ":" + before_).c_str(), 1); }
  FirstInPath(const FirstInPath&) = delete;
  FirstInPath& operator=(const FirstInPath&) = delete;
  ~FirstInPath() { ::setenv("PATH", before_.c_str(), 1); }

 private:
  std::string before_ = std::getenv("PATH");
};

/// Compares an error's code, and looks for `part` in its text.
template <class T>
void expect_error(const Result<T>& result, ErrorCode code, const std::string& part) {
  ASSERT_FALSE(result) << part;
  EXPECT_EQ(result.error().code(), code) << result.error().what();
  EXPECT_NE(std::string(result.error().what()).find(part), std::string::npos) << result.error().what();
}

constexpr const char* kPythonWrites = R"(
import sys, collections, torch
base, folder = torch.arange(24.).reshape(4, 6), sys.argv[1]
net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
tensors = collections.OrderedDict(f32=torch.ones(2, 3), f64=torch.full((2,), 0.1, dtype=torch.float64),
    half=torch.tensor([1.5]).half(), bf16=torch.tensor([1.5, -2]).bfloat16(), i64=torch.tensor(-5),
    i32=torch.tensor([1], dtype=torch.int32), i16=torch.tensor([-1], dtype=torch.int16), i8=torch.tensor([-1], dtype=torch.int8),
    u8=torch.tensor([255], dtype=torch.uint8), flag=torch.tensor([True, False]), c64=torch.tensor([1 + 2j]), conj=torch.tensor([1 + 2j]).conj(),
    view=base[1:3, ::2], transposed=base.t(), empty=torch.empty(0, 3), expanded=torch.ones(1).expand(3),
    parameter=torch.nn.Parameter(torch.zeros(2)), tied=base)
torch.save(tensors, folder + '/tensors.pt')
torch.save({'a': {'model': net.state_dict()}, 'epoch': 3, 'list': [1, 'two', (None, True)]}, folder + '/nested.pt')
torch.save({'w': torch.ones(1), 'c128': torch.ones(1, dtype=torch.complex128)}, folder + '/c128.pt')
class Evil:
    def __reduce__(self):
        import os
        return os.mkdir, (folder + '/evil',)
torch.save({'w': torch.ones(1), 'x': Evil()}, folder + '/evil.pt')
)";

constexpr const char* kPythonCompares = R"(
import sys, torch
ours, theirs = (torch.load(sys.argv[1] + name, weights_only=True) for name in ('/again.pt', '/tensors.pt'))
assert sorted(ours) == sorted(theirs), ours.keys()
for name, one in theirs.items():
    other = ours[name]
    assert (other.dtype, other.shape) == (one.dtype, one.shape) and torch.equal(other, one), name
    storage = other.untyped_storage() if hasattr(other, 'untyped_storage') else other.storage()
    assert storage.nbytes() == other.numel() * other.element_size(), name
)";

TEST(Pt, ComesAndGoesByTorchWithTheSameBits) {
  if (!python_has_torch()) GTEST_SKIP() << "no python3 with torch in PATH";
  for (const std::string& python : pythons_with_torch()) {
    SCOPED_TRACE(python);
    TestFolder folder;
    const FirstInPath first(python == "python3" ? "/" : "/usr/bin");
    ASSERT_TRUE(run_python("python3", kPythonWrites, folder.path()));
    const auto weights = read_weights(folder / "tensors.pt");
    ASSERT_TRUE(weights) << weights.error().what();
    EXPECT_EQ(weights->tensors.size(), 18u);
    for (const auto& [name, tensor] : weights->tensors) {
      if (name == "bf16") {
        EXPECT_EQ(copy_of(tensor.bytes), copy_of(as_bytes(std::string_view("\xc0\x3f\x00\xc0", 4))));
      }
    }
    ASSERT_TRUE(write_safetensors(folder / "again.safetensors", weights->tensors));
    ASSERT_TRUE(export_weights({.from = folder / "again.safetensors", .to = folder / "again.pt"}));
    EXPECT_TRUE(run_python("python3", kPythonCompares, folder.path()));
  }
}

// Other files that are refused: python/tests/test_checkpoint.py.
TEST(Pt, WhatIsNoPlainDictOfTensorsIsRefusedByName) {
  if (!python_has_torch()) GTEST_SKIP() << "no python3 with torch in PATH";
  TestFolder folder;
  ASSERT_TRUE(run_python("python3", kPythonWrites, folder.path()));
  ASSERT_TRUE(export_weights({.from = folder / "nested.pt", .to = folder / "a.safetensors", .key = "a/model"}));
  EXPECT_EQ(read_weights(folder / "a.safetensors")->tensors.size(), 7u);
  expect_error(read_weights(folder / "nested.pt"), ErrorCode::InvalidArgument, "'a' is a dict where tensors belong");
  expect_error(read_weights(folder / "c128.pt"), ErrorCode::InvalidArgument, "tensor 'c128' is of type complex128");
  expect_error(read_weights(folder / "evil.pt"), ErrorCode::Corrupt, "mkdir");
  EXPECT_FALSE(fs::exists(folder / "evil"));
  const auto bytes = sys::read_file(folder / "tensors.pt");
  std::vector<std::byte> damaged = copy_of(bytes->bytes());
  for (const std::string_view global("_rebuild_tensor_v2"); std::byte & byte : damaged) {
    if (std::string_view(reinterpret_cast<const char*>(&byte), global.size()) != global) continue;
    byte = std::byte{'?'};
    break;
  }
  ASSERT_TRUE(sys::write_file_atomically(folder / "damaged.pt", damaged));
  expect_error(read_weights(folder / "damaged.pt"), ErrorCode::Corrupt, "damaged.pt: not a .pt file that can be read");
}

TEST(Pt, WithoutTorchTheWayOutIsSaid) {
  TestFolder folder, bin;
  ASSERT_TRUE(sys::write_file_atomically(bin / "python3", "#!/bin/sh\necho \"No module named 'torch'\" >&2; exit 1\n"));
  fs::permissions(bin / "python3", fs::perms::owner_all);
  const FirstInPath first(bin.path());
  ASSERT_TRUE(sys::write_file_atomically(folder / "a.pt", "PK, and more"));
  ASSERT_TRUE(write_safetensors(folder / "a.safetensors", {}));
  expect_error(read_weights(folder / "a.pt"), ErrorCode::Unavailable, "there No module named 'torch' -- pip install");
  expect_error(export_weights({.from = folder / "a.safetensors", .to = folder / "b.pt"}), ErrorCode::Unavailable,
               "b.pt: torch itself reads and writes .pt files");
  EXPECT_FALSE(fs::exists(folder / "b.pt"));
}

/// Saves a checkpoint of one tensor "w", and of an optimizer's state in it.
void save_training(const std::string& folder, std::int64_t generation, const std::vector<std::byte>& bytes) {
  auto writer = CheckpointWriter::open(folder);
  ASSERT_TRUE(writer && writer->begin(generation, generation));
  Manifest manifest;
  manifest.generation = manifest.step = generation;
  manifest.place = "rank0";
  manifest.sampler = SamplerPosition{.seed = ~std::uint64_t{0}, .epoch = 1, .cursor = 2, .size = 3};
  manifest.values = {{"best", std::numeric_limits<double>::infinity()}, {"name", std::string("\xc3\xbc")}};
  const double lr = 0.1;
  const std::int64_t step = 3, two = 2;
  const auto whole = [](const auto& number) { return std::as_bytes(std::span(&number, 1)); };
  const std::vector<NamedTensor> model = {{"w", {ElementType::Float32, {4, 4}, bytes}}};
  const std::vector<NamedTensor> optimizer = {
      {"group/0/lr", {ElementType::Float64, {}, whole(lr)}},
      {"state/w/step", {ElementType::Int64, {}, whole(step)}},
      {"state/w/old/size", {ElementType::Int64, {}, whole(two)}},
      {"state/w/old/1", {ElementType::Float32, {4, 4}, bytes}},
  };
  const std::map<std::string, std::string> metadata = {
      {"type", "Adam maximize"}, {"groups", R"([["w"],[]])"}, {"group_values", R"([{"name":"all"}])"}};
  for (const auto& [name, tensors, texts] :
       {std::tuple(kModelFile, &model, std::map<std::string, std::string>()), {kOptimizerFile, &optimizer, metadata}}) {
    const auto digest = write_checkpoint_file(
        writer->hidden(), name, [&](const Sink& sink) { return write_safetensors(sink, *tensors, texts); });
    ASSERT_TRUE(digest);
    manifest.files[name] = *digest;
  }
  ASSERT_TRUE(writer->seal(manifest, [](const std::string&) { return true; }));
  ASSERT_TRUE(writer->publish());
}

constexpr const char* kPythonReadsAll = R"(
import sys, torch
all = torch.load(sys.argv[1] + '/c.pt', weights_only=True)
w, optimizer = all['model']['w'], all['optimizer']
assert list(all) == ['model', 'optimizer', 'sampler', 'values', 'step', 'epoch', 'world_size', 'created'], list(all)
assert all['sampler'] == {'seed': str(2**64 - 1), 'epoch': 1, 'cursor': 2, 'size': 3}
assert all['values']['best'] == float('inf') and all['values']['name'] == '\u00fc' and all['step'] == 2
state = optimizer['state'].pop(0)
old = state.pop('old')
assert old[0] is None and torch.equal(old[1].view(torch.uint8), w.view(torch.uint8)) and state == {'step': 3}, state
lr = torch.tensor(0.1, dtype=torch.float64) if sys.argv[2] == 'old' else 0.1
assert optimizer == {'state': {}, 'param_groups': [{'lr': lr, 'maximize': True, 'name': 'all', 'params': [0]},
                                                   {'maximize': True, 'params': []}]}, optimizer
)";

TEST(Export, MakesWeightsAndEverythingFromCheckpointsAndFiles) {
  TestFolder folder;
  const auto one = random_bytes(64, 1), two = random_bytes(64, 2);
  save_training(folder / "run", 1, one);
  save_training(folder / "run", 2, two);
  const auto exported = [&](const std::string& from, const std::string& to, PtContent content = PtContent::Weights,
                            PtFloats floats = PtFloats::Number) {
    return export_weights({.from = folder / from, .to = folder / to, .content = content, .floats = floats});
  };
  const auto tensor = [&](const std::string& file) {
    const auto weights = read_weights(folder / file);
    EXPECT_TRUE(weights) << weights.error().what();
    return copy_of(weights->tensors.at(0).tensor.bytes);
  };
  const std::string end = python_has_torch() ? ".pt" : ".safetensors";
  auto done = exported("run", "a" + end);
  ASSERT_TRUE(done) << done.error().what();
  EXPECT_EQ(done->tensors, 1u);
  EXPECT_EQ(done->bytes, 64u);
  EXPECT_EQ(tensor("a" + end), two);
  ASSERT_TRUE(exported("run/checkpoint-000001-step-1", "b" + end));
  EXPECT_EQ(tensor("b" + end), one);
  if (python_has_torch()) {
    done = exported("run", "c.pt", PtContent::Everything);
    ASSERT_TRUE(done) << done.error().what();
    EXPECT_EQ(done->tensors, 1u);
    EXPECT_TRUE(run_python("python3", kPythonReadsAll, folder.path() + " new"));
    ASSERT_TRUE(exported("run", "c.pt", PtContent::Everything, PtFloats::Tensor));
    for (const std::string& python : pythons_with_torch())
      EXPECT_TRUE(run_python(python, kPythonReadsAll, folder.path() + " old"));
    expect_error(exported("c.pt", "g.pt"), ErrorCode::InvalidArgument, "'model' is a dict where tensors belong");
  }
  const std::string newest = folder / "run/checkpoint-000002-step-2/model.safetensors";
  ASSERT_TRUE(sys::write_file_atomically(newest, "damaged"));
  ASSERT_TRUE(exported("run", "f.safetensors"));
  EXPECT_EQ(tensor("f.safetensors"), one) << "the newest that is whole";
  expect_error(exported("run/checkpoint-000002-step-2", "g.pt"), ErrorCode::Corrupt, "model.safetensors");
  expect_error(exported("run", "g.txt"), ErrorCode::InvalidArgument, "its name says no format");
  expect_error(exported("nothing", "g.pt"), ErrorCode::Unavailable, "No such file");
  expect_error(exported("run", "g.safetensors", PtContent::Everything), ErrorCode::InvalidArgument, "tensors alone");
  EXPECT_FALSE(fs::exists(folder / "g.pt"));
}

}  // namespace
}  // namespace cohort::formats
