#include "train/formats/shards.h"

#include "base/json.h"
#include "base/parse.h"
#include "base/result.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>

namespace cohort::formats {
namespace {

constexpr std::string_view kShardPrefix = "shard/";
constexpr std::uint64_t kHeadGuess = 8;

/// Returns, for each dimension of the box, the distance of consecutive elements.
std::vector<std::int64_t> strides_of(const Shard& shard) {
  std::vector<std::int64_t> strides(shard.extent.size(), 1);
  for (std::size_t i = strides.size(); i-- > 1;) strides[i - 1] = strides[i] * shard.extent[i];
  return strides;
}

bool is_whole_box(const Shard& shard) { return shard.begin == 0 && shard.count == element_count(shard.extent); }

bool boxes_meet(const Shard& a, const Shard& b) {
  for (std::size_t i = 0; i < a.start.size(); ++i) {
    if (a.start[i] >= b.start[i] + b.extent[i] || b.start[i] >= a.start[i] + a.extent[i]) return false;
  }
  return true;
}

auto order_of(const TensorPart* part) { return std::tie(part->shard.start, part->shard.extent, part->shard.begin); }
bool same_box(const TensorPart* a, const TensorPart* b) {
  return a->shard.start == b->shard.start && a->shard.extent == b->shard.extent;
}

}  // namespace

Shard whole_shard(std::vector<std::int64_t> sizes) {
  Shard shard;
  shard.start.assign(sizes.size(), 0);
  shard.count = element_count(sizes).value_or(-1);
  shard.extent = sizes;
  shard.sizes = std::move(sizes);
  return shard;
}

std::vector<std::int64_t> shape_of(const Shard& shard) {
  return is_whole_box(shard) ? shard.extent : std::vector<std::int64_t>{shard.count};
}

std::optional<std::string> problem_of(const Shard& shard) {
  const auto& [sizes, start, extent, begin, count] = shard;
  if (start.size() != sizes.size() || extent.size() != sizes.size())
    return fmt::format("its box has not the {} dimensions of the whole", sizes.size());
  if (!element_count(sizes) || !element_count(extent)) return "its sizes are negative, or too large";
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (start[i] < 0 || start[i] > sizes[i] - extent[i])
      return fmt::format("its box at {} of {} is not within {}", shape_text(start), shape_text(extent),
                         shape_text(sizes));
  }
  if (begin < 0 || count < 0 || begin > *element_count(extent) - count)
    return fmt::format("its range of {} elements from {} on is not within its box of {}", count, begin,
                       shape_text(extent));
  return std::nullopt;
}

std::vector<Run> common_runs(const Shard& from, const Shard& to) {
  std::vector<Run> runs;
  const std::size_t dimensions = from.sizes.size();
  std::vector<std::int64_t> start(dimensions), extent(dimensions);
  for (std::size_t i = 0; i < dimensions; ++i) {
    start[i] = std::max(from.start[i], to.start[i]);
    extent[i] = std::min(from.start[i] + from.extent[i], to.start[i] + to.extent[i]) - start[i];
    if (extent[i] <= 0) return runs;
  }
  // Elements are contiguous over the trailing dimensions that both boxes cover in full, and over the dimension before.
  std::size_t outer = dimensions;
  while (outer > 0 && extent[outer - 1] == from.extent[outer - 1] && extent[outer - 1] == to.extent[outer - 1]) --outer;
  outer = outer == 0 ? 0 : outer - 1;
  const auto dimension = static_cast<std::ptrdiff_t>(outer);
  const std::int64_t line =
      std::accumulate(extent.begin() + dimension, extent.end(), std::int64_t{1}, std::multiplies<>());
  const auto from_strides = strides_of(from), to_strides = strides_of(to);
  std::int64_t a = -from.begin, b = -to.begin;  // offsets of the line's beginning in both ranges
  for (std::size_t i = 0; i < dimensions; ++i) {
    a += (start[i] - from.start[i]) * from_strides[i];
    b += (start[i] - to.start[i]) * to_strides[i];
  }
  std::vector<std::int64_t> position(outer, 0);
  while (true) {
    const std::int64_t first = std::max({std::int64_t{0}, -a, -b});
    const std::int64_t end = std::min({line, from.count - a, to.count - b});
    if (first < end) {
      const Run run{a + first, b + first, end - first};
      const bool goes_on = !runs.empty() && runs.back().from + runs.back().count == run.from &&
                           runs.back().to + runs.back().count == run.to;
      if (goes_on)
        runs.back().count += run.count;
      else
        runs.push_back(run);
    }
    std::size_t i = outer;
    for (; i-- > 0;) {
      a += from_strides[i];
      b += to_strides[i];
      if (++position[i] < extent[i]) break;
      a -= from_strides[i] * extent[i];
      b -= to_strides[i] * extent[i];
      position[i] = 0;
    }
    if (i == static_cast<std::size_t>(-1)) return runs;
  }
}

std::optional<std::string> add_part(PartedTensors& tensors, const std::string& name, ElementType type,
                                    TensorPart part) {
  const auto wrong = [&](std::string_view what) {
    return fmt::format("the shard of tensor '{}' of {}: {}", name, part.holder, what);
  };
  if (!name.starts_with(kModelPrefix) && !name.starts_with(kOptimizerPrefix))
    return wrong("its name begins neither with 'model/' nor with 'optimizer/'");
  if (auto problem = problem_of(part.shard)) return wrong(*problem);
  auto& tensor = tensors[name];
  if (tensor.parts.empty()) tensor.type = type;
  if (type != tensor.type || (!tensor.parts.empty() && part.shard.sizes != tensor.sizes())) {
    return wrong(fmt::format("it is of a tensor {} {}, and {} has a shard of one {} {}", info(type).torch,
                             shape_text(part.shard.sizes), tensor.parts.front().holder, info(tensor.type).torch,
                             shape_text(tensor.sizes())));
  }
  tensor.parts.push_back(std::move(part));
  return std::nullopt;
}

std::optional<std::string> coverage_problem(const std::string& name, const PartedTensor& tensor) {
  std::vector<const TensorPart*> parts;
  std::int64_t elements = 0;
  for (const TensorPart& part : tensor.parts) {
    if (part.shard.count > 0) parts.push_back(&part);
  }
  std::sort(parts.begin(), parts.end(), [](const auto* a, const auto* b) { return order_of(a) < order_of(b); });
  const auto doubled = [&](const TensorPart* a, const TensorPart* b) {
    return fmt::format("elements of tensor '{}' are there twice: in {} and in {}", name, a->holder, b->holder);
  };
  for (const TensorPart* part : parts) elements += part->shard.count;
  // Checked first, so that the elements present bound the work below, and not the sizes that a file claims.
  if (const std::int64_t all = element_count(tensor.sizes()).value_or(0); elements < all)
    return fmt::format("of the {} elements of tensor '{}' {} only {} are there", all, name, shape_text(tensor.sizes()),
                       elements);
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const Shard& before = parts[i - 1]->shard;
    if (same_box(parts[i - 1], parts[i]) && before.begin + before.count > parts[i]->shard.begin)
      return doubled(parts[i - 1], parts[i]);
  }
  // There are few boxes; they overlap only if a tensor was divided in two different ways.
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i > 0 && same_box(parts[i - 1], parts[i])) continue;
    for (std::size_t j = i + 1; j < parts.size(); ++j) {
      if (same_box(parts[j - 1], parts[j]) || !boxes_meet(parts[i]->shard, parts[j]->shard)) continue;
      for (std::size_t one = i; one < parts.size() && same_box(parts[i], parts[one]); ++one) {
        for (std::size_t other = j; other < parts.size() && same_box(parts[j], parts[other]); ++other) {
          if (!common_runs(parts[one]->shard, parts[other]->shard).empty()) return doubled(parts[one], parts[other]);
        }
      }
    }
  }
  return std::nullopt;
}

void add_copies(const PartedTensor& tensor, const Shard& wanted, const std::string& file, std::byte* to,
                std::vector<Copy>& copies) {
  const std::uint64_t element = info(tensor.type).bytes;
  for (const TensorPart& part : tensor.parts) {
    if (part.holder != file) continue;
    for (const Run& run : common_runs(part.shard, wanted)) {
      copies.push_back({part.offset + static_cast<std::uint64_t>(run.from) * element,
                        static_cast<std::uint64_t>(run.count) * element,
                        to == nullptr ? nullptr : to + static_cast<std::uint64_t>(run.to) * element});
    }
  }
}

std::string shard_name(std::size_t index, const std::string& tensor) {
  return fmt::format("{}{}/{}", kShardPrefix, index, tensor);
}

std::string shard_text(const Shard& shard) {
  return fmt::format(R"({{"sizes":[{}],"start":[{}],"extent":[{}],"begin":{},"count":{}}})",
                     fmt::join(shard.sizes, ","), fmt::join(shard.start, ","), fmt::join(shard.extent, ","),
                     shard.begin, shard.count);
}

namespace {

/// A shard's text has exactly one form, so a text is valid only if writing the parsed shard gives the same text.
std::optional<Shard> parse_shard(const std::string& text) {
  const auto json = parse_json_or_discard(text);
  Shard shard;
  const auto numbers = [&](const char* key, std::vector<std::int64_t>& to) {
    const auto list = json.find(key);
    if (list == json.end() || !list->is_array()) return;
    for (const auto& item : *list) to.push_back(item.is_number_integer() ? item.template get<std::int64_t>() : -1);
  };
  const auto number = [&](const char* key, std::int64_t& to) {
    const auto item = json.find(key);
    if (item != json.end() && item->is_number_integer()) to = item->template get<std::int64_t>();
  };
  if (!json.is_object()) return std::nullopt;
  numbers("sizes", shard.sizes);
  numbers("start", shard.start);
  numbers("extent", shard.extent);
  number("begin", shard.begin);
  number("count", shard.count);
  if (shard_text(shard) != text) return std::nullopt;
  return shard;
}

/// "shard/3/model/fc.weight" -> "model/fc.weight"; empty if the name has another form.
std::string tensor_of(std::string_view name) {
  name.remove_prefix(kShardPrefix.size());
  const std::size_t slash = name.find('/');
  if (slash == std::string_view::npos || !parse_integer<std::size_t>(name.substr(0, slash))) return {};
  return std::string(name.substr(slash + 1));
}

bool holds_tensors(const Manifest& manifest, std::string_view file) {
  if (file == kModelFile || file == kOptimizerFile) return true;
  return manifest.version >= kManifestVersion && file.starts_with(kPartPrefix);
}

/// Adds the tensors of one file; returns the problem with these tensors, if any.
std::optional<std::string> add_file(PartedTensors& tensors, const std::string& file, const SafetensorsHeader& header) {
  const bool is_part = file.starts_with(kPartPrefix);
  std::size_t shards = 0;
  for (const SafetensorsEntry& entry : header.entries) {
    if (!is_part) {
      const std::string_view prefix = file == kModelFile ? kModelPrefix : kOptimizerPrefix;
      if (auto problem = add_part(tensors, std::string(prefix) + entry.name, entry.type,
                                  {file, whole_shard(entry.shape), entry.offset}))
        return problem;
      continue;
    }
    if (!entry.name.starts_with(kShardPrefix)) continue;
    ++shards;
    const std::string name = tensor_of(entry.name);
    const auto text = header.metadata.find(entry.name);
    const auto shard = text == header.metadata.end() ? std::nullopt : parse_shard(text->second);
    if (name.empty() || !shard)
      return fmt::format("'{}' in {}: what of its tensor it is, is not said as it should be", entry.name, file);
    if (auto problem = add_part(tensors, name, entry.type, {file, *shard, entry.offset})) return problem;
    if (entry.shape != shape_of(*shard)) {
      return fmt::format("the shard of tensor '{}' of {}: it has the shape {} where {} is said", name, file,
                         shape_text(entry.shape), shape_text(shape_of(*shard)));
    }
  }
  for (const auto& [key, text] : header.metadata) {
    if (is_part && key.starts_with(kShardPrefix) && shards-- == 0)
      return fmt::format("'{}' in {}: there is no such shard", key, file);
  }
  return std::nullopt;
}

}  // namespace

bool has_shards(const Manifest& manifest) { return manifest.version >= kManifestVersion; }

std::vector<std::string> tensor_files(const Manifest& manifest) {
  std::vector<std::string> files;
  for (const auto& [file, digest] : manifest.files) {
    if (holds_tensors(manifest, file)) files.push_back(file);
  }
  return files;
}

Result<CheckpointTensors> tensors_of(const StoredCheckpoint& checkpoint,
                                     const std::map<std::string, std::string>& heads) {
  CheckpointTensors all;
  const auto corrupt = [&](std::string_view what) {
    return fail(ErrorCode::Corrupt, "{}: not a sound checkpoint -- {}", checkpoint.folder, what);
  };
  for (const auto& [file, head] : heads) {
    auto header = parse_safetensors_header(as_bytes(head), checkpoint.manifest.files.at(file).bytes,
                                           fmt::format("{}/{}", checkpoint.folder, file));
    if (!header) return tl::unexpected(header.error());
    if (const auto problem = add_file(all.tensors, file, *header)) return corrupt(*problem);
    all.files.emplace(file, std::move(*header));
  }
  for (const auto& [name, tensor] : all.tensors) {
    if (const auto problem = coverage_problem(name, tensor)) return corrupt(*problem);
  }
  return all;
}

Result<CheckedFile> CheckedFile::open(const StoredCheckpoint& checkpoint, const std::string& name) {
  const std::string path = fmt::format("{}/{}", checkpoint.folder, name);
  const auto digest = checkpoint.manifest.files.find(name);
  if (digest == checkpoint.manifest.files.end())
    return fail(ErrorCode::Unavailable, "{}: the checkpoint was saved without it", path);
  auto reader = sys::FileReader::open(path);
  if (!reader) return tl::unexpected(reader.error());
  return CheckedFile(std::move(*reader), path, digest->second);
}

Result<void> CheckedFile::load(std::uint64_t block) {
  if (block_ == block) return {};
  block_.reset();
  const std::uint64_t begin = block * kBlockBytes;
  window_.resize(static_cast<std::size_t>(std::min<std::uint64_t>(kBlockBytes, digest_.bytes - begin)));
  if (auto done = reader_.seek(begin); !done) return done;
  if (auto done = reader_.read(window_); !done) return done;
  // Manifests of version 1 have no CRC-32.
  const auto written = std::string_view(digest_.crc32).substr(std::min(digest_.crc32.size(), block * 8), 8);
  const auto crc = ::crc32_z(0, reinterpret_cast<const unsigned char*>(window_.data()), window_.size());
  if (!digest_.crc32.empty() && written != fmt::format("{:08x}", crc)) {
    return fail(ErrorCode::Corrupt, "{}: damaged in bytes {} to {} -- its CRC-32 is another than was written", path_,
                begin, begin + window_.size() - 1);
  }
  block_ = block;
  return {};
}

Result<void> CheckedFile::each(std::uint64_t offset, std::uint64_t bytes, const Visit& visit) {
  if (offset > digest_.bytes || bytes > digest_.bytes - offset)
    return fail(ErrorCode::Corrupt, "{}: it ends before byte {}", path_, offset + bytes);
  while (bytes > 0) {
    if (auto done = load(offset / kBlockBytes); !done) return done;
    const auto rest = std::span(std::as_const(window_)).subspan(static_cast<std::size_t>(offset % kBlockBytes));
    const auto piece = rest.first(static_cast<std::size_t>(std::min<std::uint64_t>(rest.size(), bytes)));
    if (auto done = visit(piece); !done) return done;
    offset += piece.size();
    bytes -= piece.size();
  }
  return {};
}

Result<void> CheckedFile::read(std::uint64_t offset, std::span<std::byte> bytes) {
  std::byte* to = bytes.data();
  return each(offset, bytes.size(), [&](std::span<const std::byte> piece) -> Result<void> {
    std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
    return {};
  });
}

Result<std::string> CheckedFile::head() {
  std::string head(static_cast<std::size_t>(std::min(digest_.bytes, kHeadGuess)), '\0');
  const auto fill = [&] { return read(0, std::as_writable_bytes(std::span(head.data(), head.size()))); };
  if (auto done = fill(); !done) return tl::unexpected(done.error());
  const auto bytes = safetensors_head_bytes(as_bytes(head), digest_.bytes, path_);
  if (!bytes) return tl::unexpected(bytes.error());
  head.resize(static_cast<std::size_t>(*bytes));
  if (auto done = fill(); !done) return tl::unexpected(done.error());
  return head;
}

Result<TensorReader> TensorReader::open(const StoredCheckpoint& checkpoint, bool with_optimizer) {
  std::map<std::string, std::string> heads;
  for (const std::string& name : tensor_files(checkpoint.manifest)) {
    if (name == kOptimizerFile && !with_optimizer) continue;
    if (auto sound = check_checkpoint_file(checkpoint, name); !sound) return tl::unexpected(sound.error());
    auto file = CheckedFile::open(checkpoint, name);
    if (!file) return tl::unexpected(file.error());
    auto head = file->head();
    if (!head) return tl::unexpected(head.error());
    heads.emplace(name, std::move(*head));
  }
  auto tensors = tensors_of(checkpoint, heads);
  if (!tensors) return tl::unexpected(tensors.error());
  return TensorReader(checkpoint, std::move(*tensors));
}

Result<void> TensorReader::read(const std::string& name, std::span<std::byte> to) {
  const PartedTensor& tensor = tensors_.tensors.at(name);
  for (const TensorPart& part : tensor.parts) {
    auto file = open_.find(part.holder);
    if (file == open_.end()) {
      auto opened = CheckedFile::open(checkpoint_, part.holder);
      if (!opened) return tl::unexpected(opened.error());
      file = open_.emplace(part.holder, std::move(*opened)).first;
    }
    std::vector<Copy> copies;
    add_copies(tensor, whole_shard(tensor.sizes()), part.holder, to.data(), copies);
    for (const Copy& copy : copies) {
      if (auto done = file->second.read(copy.offset, {copy.to, static_cast<std::size_t>(copy.bytes)}); !done)
        return done;
    }
  }
  return {};
}

}  // namespace cohort::formats
