#include "train/formats/shards.h"

#include "train/formats/testing.h"
#include "train/formats/weights.h"

#include <rapidcheck.h>

#include <algorithm>
#include <numeric>

namespace cohort::formats {
namespace {

std::vector<std::int64_t> random_sizes() {
  auto sizes = *rc::gen::container<std::vector<std::int64_t>>(rc::gen::inRange<std::int64_t>(1, 6));
  if (sizes.size() > 4) sizes.resize(4);
  return sizes;
}

/// Cuts a box along dimensions into up to eight, and each into ranges, which together cover the tensor exactly once.
std::vector<Shard> random_cut(const std::vector<std::int64_t>& sizes) {
  std::vector<Shard> boxes = {whole_shard(sizes)}, all;
  for (int i = *rc::gen::inRange(0, 8); i > 0 && !sizes.empty(); --i) {
    const auto which = *rc::gen::inRange<std::size_t>(0, boxes.size()),
               along = *rc::gen::inRange<std::size_t>(0, sizes.size());
    Shard& box = boxes[which];
    const auto at = *rc::gen::inRange<std::int64_t>(0, box.extent[along] + 1);
    if (at == 0 || at == box.extent[along]) continue;
    Shard rest = box;
    box.extent[along] = at;
    rest.start[along] += at;
    rest.extent[along] -= at;
    boxes.push_back(rest);
  }
  for (Shard& box : boxes) {
    const std::int64_t count = *element_count(box.extent);
    for (std::int64_t begin = 0; begin < count;) {
      Shard range = box;
      range.begin = begin;
      range.count = *rc::gen::inRange<std::int64_t>(1, count - begin + 1);
      begin += range.count;
      all.push_back(range);
    }
  }
  return all;
}

/// Numbers of the shard's elements, counted in the whole tensor.
std::vector<std::int64_t> elements_of(const Shard& shard) {
  std::vector<std::int64_t> numbers;
  const std::int64_t all = *element_count(shard.sizes);
  for (std::int64_t number = 0; number < all; ++number) {
    std::int64_t rest = number;
    bool inside = true;
    for (std::size_t i = shard.sizes.size(); i-- > 0;) {
      const std::int64_t at = rest % shard.sizes[i];
      rest /= shard.sizes[i];
      inside = inside && at >= shard.start[i] && at < shard.start[i] + shard.extent[i];
    }
    if (inside) numbers.push_back(number);
  }
  return {numbers.begin() + shard.begin, numbers.begin() + shard.begin + shard.count};
}

TEST(Shards, ComeTogetherFromAnyCutIntoAnyOther) {
  EXPECT_TRUE(rc::check([] {
    const auto sizes = random_sizes();
    const auto saved = random_cut(sizes), wanted = random_cut(sizes);
    PartedTensor tensor;
    for (const Shard& shard : saved) tensor.parts.push_back({"x", shard, 0});
    RC_ASSERT(!coverage_problem("x", tensor));
    for (const Shard& to : wanted) {
      std::vector<std::int64_t> found(static_cast<std::size_t>(to.count), -1);
      for (const Shard& from : saved) {
        const auto numbers = elements_of(from);
        std::int64_t before = -1;
        for (const auto& run : common_runs(from, to)) {
          RC_ASSERT(run.to > before);
          before = run.to;
          std::copy_n(numbers.begin() + run.from, run.count, found.begin() + run.to);
        }
      }
      RC_ASSERT(found == elements_of(to));
    }
    // A part that is missing or doubled is detected.
    const auto which = *rc::gen::inRange<std::size_t>(0, saved.size());
    PartedTensor doubled = tensor;
    doubled.parts.push_back({"y", wanted[*rc::gen::inRange<std::size_t>(0, wanted.size())], 0});
    RC_ASSERT(coverage_problem("x", doubled).value_or("").find("twice") != std::string::npos);
    if (saved.size() > 1) {
      tensor.parts.erase(tensor.parts.begin() + static_cast<std::ptrdiff_t>(which));
      RC_ASSERT(coverage_problem("x", tensor).value_or("").find("are there") != std::string::npos);
    }
  }));
}

TEST(Shards, SayWhatIsWrongWithThem) {
  const auto said = [](Shard shard) { return problem_of(shard).value_or(""); };
  EXPECT_EQ(said(whole_shard({3, 4})), "");
  EXPECT_EQ(said(whole_shard({})), "");
  EXPECT_NE(said({{3, 4}, {0}, {3}, 0, 3}).find("2 dimensions"), std::string::npos);
  EXPECT_NE(said({{3, -4}, {0, 0}, {3, 4}, 0, 3}).find("negative"), std::string::npos);
  EXPECT_NE(said({{3, 4}, {0, 1}, {3, 4}, 0, 3}).find("not within [3, 4]"), std::string::npos);
  EXPECT_NE(said({{3, 4}, {-1, 0}, {3, 4}, 0, 3}).find("not within"), std::string::npos);
  EXPECT_NE(said({{3, 4}, {0, 0}, {3, 4}, 11, 2}).find("range of 2 elements from 11"), std::string::npos);
  EXPECT_NE(said({{3, 4}, {0, 0}, {3, 4}, 0, std::numeric_limits<std::int64_t>::max()}).find("range"),
            std::string::npos);

  PartedTensors tensors;
  EXPECT_FALSE(add_part(tensors, "model/w", ElementType::Float32, {"a", whole_shard({2})}));
  const auto other = add_part(tensors, "model/w", ElementType::Float64, {"b", whole_shard({2})});
  EXPECT_NE(other.value_or("").find("tensor 'model/w' of b: it is of a tensor float64 [2], and a has"),
            std::string::npos);
  EXPECT_TRUE(add_part(tensors, "w", ElementType::Float32, {"a", whole_shard({2})}));
}

/// A checkpoint of version 3 with one part, of a tensor of 6 floats that has these metadata.
Result<CheckpointTensors> read_with(const std::map<std::string, std::string>& metadata,
                                    const std::vector<std::int64_t>& shape = {2, 3}) {
  const std::vector<std::byte> bytes(24);
  StoredCheckpoint stored{"folder", {}};
  stored.manifest.version = kManifestVersion;
  const std::vector<NamedTensor> tensors = {{"shard/0/model/w", {ElementType::Float32, shape, bytes}}};
  std::string head = value_or_throw(lay_out_safetensors(tensors, metadata)).head;
  stored.manifest.files["rank-00000.safetensors"].bytes = head.size() + bytes.size();
  return tensors_of(stored, {{"rank-00000.safetensors", head}});
}

TEST(Shards, AreReadAsStrictlyAsTheyAreWritten) {
  const std::string key = "shard/0/model/w";
  const auto said = [&](const std::map<std::string, std::string>& metadata,
                        const std::vector<std::int64_t>& shape = {2, 3}) -> std::string {
    const auto read = read_with(metadata, shape);
    if (read) return "sound";
    EXPECT_EQ(read.error().code(), ErrorCode::Corrupt);
    return read.error().what();
  };
  const Shard whole = whole_shard({2, 3});
  EXPECT_EQ(said({{key, shard_text(whole)}}), "sound");
  const Shard rows{{4, 3}, {0, 0}, {2, 3}, 0, 6}, range{{4, 3}, {0, 0}, {4, 3}, 6, 6};
  const std::vector<std::tuple<std::map<std::string, std::string>, std::vector<std::int64_t>, std::string>> kCases = {
      {{}, {2, 3}, "is not said"},
      {{{key, "{}"}}, {2, 3}, "is not said"},
      {{{key, shard_text(whole) + " "}}, {2, 3}, "is not said"},
      {{{key, "[1]"}}, {2, 3}, "is not said"},
      {{{key, shard_text(whole)}, {"shard/1/model/v", shard_text(whole)}}, {2, 3}, "there is no such shard"},
      {{{key, shard_text(rows)}}, {2, 3}, "of the 12 elements of tensor 'model/w' [4, 3] only 6 are there"},
      {{{key, shard_text(range)}}, {6}, "only 6 are there"},
      {{{key, shard_text(range)}}, {2, 3}, "it has the shape [2, 3] where [6] is said"},
      {{{key, shard_text({{2, 3}, {1, 0}, {2, 3}, 0, 6})}}, {2, 3}, "is not within"},
  };
  for (const auto& [metadata, shape, part] : kCases) {
    const std::string message = said(metadata, shape);
    EXPECT_NE(message.find(part), std::string::npos) << message;
    EXPECT_NE(message.find("model/"), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace cohort::formats
