#include "train/formats/safetensors.h"

#include "base/files.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_set>

namespace cohort::formats {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kLongestHeader = 100'000'000;  // the limit of the reference implementation
constexpr std::size_t kHeaderAlignment = 64;           // alignment of the first tensor
constexpr std::size_t kMostDimensions = 64;

struct Entry {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::uint64_t> offsets;
  bool has_dtype = false, has_shape = false, has_offsets = false;
};

/// Parses the header by events, so that a hostile 100 MB text never becomes a tree in memory.
class HeaderHandler : public nlohmann::json_sax<Json> {
 public:
  std::vector<Entry> entries;
  std::map<std::string, std::string> metadata;
  std::string problem;

  bool null() override { return refuse("null"); }
  bool boolean(bool) override { return refuse("true or false"); }
  bool number_float(number_float_t, const string_t& text) override {
    return refuse(fmt::format("the number {}", text));
  }
  bool binary(binary_t&) override { return refuse("binary data"); }
  bool number_integer(number_integer_t value) override { return refuse(fmt::format("the number {}", value)); }
  bool number_unsigned(number_unsigned_t value) override {
    if (depth_ != 3) return refuse(fmt::format("the number {}", value));
    Entry& entry = entries.back();
    if (field_ == "shape") {
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        return complain("a dimension is too large");
      if (entry.shape.size() >= kMostDimensions) return complain("it has too many dimensions");
      entry.shape.push_back(static_cast<std::int64_t>(value));
    } else {
      if (entry.offsets.size() == 2) return complain("it has more than two data_offsets");
      entry.offsets.push_back(value);
    }
    return true;
  }
  bool string(string_t& value) override {
    if (depth_ != 2) return refuse("a text");
    if (in_metadata_) {
      metadata[field_] = std::move(value);
      return true;
    }
    if (field_ != "dtype") return refuse("a text");
    entries.back().dtype = std::move(value);
    return true;
  }
  bool start_object(std::size_t) override {
    if (depth_ == 2 || depth_ == 3) return refuse("an object");
    ++depth_;
    return true;
  }
  bool key(string_t& value) override {
    if (depth_ == 1) {
      if (!names_.insert(value).second) {
        problem = fmt::format("the name '{}' stands there twice", value);
        return false;
      }
      in_metadata_ = value == "__metadata__";
      name_ = value;
      if (!in_metadata_) {
        Entry entry;
        entry.name = std::move(value);
        entries.push_back(std::move(entry));
      }
      return true;
    }
    field_ = std::move(value);
    if (in_metadata_) {
      if (metadata.contains(field_)) return complain(fmt::format("the key '{}' stands there twice", field_));
      return true;
    }
    Entry& entry = entries.back();
    bool* const seen = field_ == "dtype"          ? &entry.has_dtype
                       : field_ == "shape"        ? &entry.has_shape
                       : field_ == "data_offsets" ? &entry.has_offsets
                                                  : nullptr;
    if (seen == nullptr) return complain(fmt::format("unknown key '{}'", field_));
    if (*seen) return complain(fmt::format("the key '{}' stands there twice", field_));
    *seen = true;
    return true;
  }
  bool end_object() override {
    if (depth_ == 2 && !in_metadata_) {
      const Entry& entry = entries.back();
      if (!entry.has_dtype || !entry.has_shape || entry.offsets.size() != 2) {
        return complain("dtype, shape or data_offsets is missing");
      }
    }
    --depth_;
    return true;
  }
  bool start_array(std::size_t) override {
    if (depth_ != 2 || in_metadata_ || (field_ != "shape" && field_ != "data_offsets")) return refuse("a list");
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const Json::exception&) override {
    problem = fmt::format("the header is not JSON (at byte {})", position);
    return false;
  }

 private:
  bool complain(std::string_view what) {
    problem = fmt::format("entry '{}': {}", name_, what);
    return false;
  }
  bool refuse(std::string_view what) {
    if (depth_ == 0) {
      problem = fmt::format("the header is {} where an object belongs", what);
      return false;
    }
    return complain(depth_ == 1 ? fmt::format("{} where an object belongs", what)
                                : fmt::format("'{}' must not be or contain {}", field_, what));
  }

  int depth_ = 0;
  bool in_metadata_ = false;
  std::string name_, field_;
  std::unordered_set<std::string> names_;
};

tl::unexpected<Error> corrupt_safetensors(const std::string& name, std::string_view what) {
  return fail(ErrorCode::Corrupt, "{}: not a sound safetensors file -- {} -- write or get the file again", name, what);
}

}  // namespace

const TensorView* Safetensors::find(std::string_view name) const noexcept {
  const auto entry = std::find_if(tensors.begin(), tensors.end(), [&](const NamedTensor& t) { return t.name == name; });
  return entry == tensors.end() ? nullptr : &entry->tensor;
}

Result<std::uint64_t> safetensors_head_bytes(std::span<const std::byte> first, std::uint64_t file_bytes,
                                             const std::string& name) {
  std::uint64_t header_size = 0;
  if (file_bytes < sizeof header_size || first.size() < sizeof header_size)
    return corrupt_safetensors(name, fmt::format("it has only {} bytes", file_bytes));
  std::memcpy(&header_size, first.data(), sizeof header_size);
  if (header_size > kLongestHeader) {
    return corrupt_safetensors(
        name, fmt::format("its header claims {} bytes where at most {} are allowed", header_size, kLongestHeader));
  }
  if (header_size > file_bytes - sizeof header_size) {
    return corrupt_safetensors(name, fmt::format("it ends within its header of {} bytes", header_size));
  }
  return sizeof header_size + header_size;
}

Result<SafetensorsHeader> parse_safetensors_header(std::span<const std::byte> head, std::uint64_t file_bytes,
                                                   const std::string& name) {
  const auto head_bytes = safetensors_head_bytes(head, file_bytes, name);
  if (!head_bytes) return tl::unexpected(head_bytes.error());
  if (*head_bytes > head.size()) return corrupt_safetensors(name, "its header is not all there");
  const std::string_view header =
      std::string_view(reinterpret_cast<const char*>(head.data()), static_cast<std::size_t>(*head_bytes))
          .substr(sizeof(std::uint64_t));
  if (!header.starts_with('{')) return corrupt_safetensors(name, "its header does not begin with '{'");
  HeaderHandler handler;
  if (!Json::sax_parse(header.begin(), header.end(), &handler)) return corrupt_safetensors(name, handler.problem);

  std::sort(handler.entries.begin(), handler.entries.end(), [](const Entry& a, const Entry& b) {
    return a.offsets != b.offsets ? a.offsets < b.offsets : a.name < b.name;
  });
  const std::uint64_t data_bytes = file_bytes - *head_bytes;
  SafetensorsHeader file;
  file.metadata = std::move(handler.metadata);
  std::uint64_t at = 0;
  for (Entry& entry : handler.entries) {
    const std::uint64_t begin = entry.offsets[0], end = entry.offsets[1];
    const ElementTypeInfo* const type = find_safetensors_type(entry.dtype);
    if (type == nullptr)
      return corrupt_safetensors(name, fmt::format("entry '{}': unknown dtype '{}'", entry.name, entry.dtype));
    if (begin > end || end > data_bytes) {
      return corrupt_safetensors(name, fmt::format("entry '{}': data_offsets [{}, {}] where there are {} bytes of data",
                                                   entry.name, begin, end, data_bytes));
    }
    if (begin != at) {
      return corrupt_safetensors(name,
                                 fmt::format("entry '{}' begins at {} where {} was expected: {}", entry.name, begin, at,
                                             begin < at ? "tensors overlap" : "bytes belong to no tensor"));
    }
    const auto expected = byte_count(type->type, entry.shape);
    if (!expected || *expected != end - begin) {
      return corrupt_safetensors(name, fmt::format("entry '{}': {} {} does not have {} bytes", entry.name, entry.dtype,
                                                   shape_text(entry.shape), end - begin));
    }
    at = end;
    file.entries.push_back(
        {std::move(entry.name), type->type, std::move(entry.shape), *head_bytes + begin, end - begin});
  }
  if (at != data_bytes)
    return corrupt_safetensors(name, fmt::format("{} bytes follow its last tensor", data_bytes - at));
  return file;
}

Result<Safetensors> parse_safetensors(std::span<const std::byte> bytes, const std::string& name) {
  auto header = parse_safetensors_header(bytes, bytes.size(), name);
  if (!header) return tl::unexpected(header.error());
  Safetensors file;
  file.metadata = std::move(header->metadata);
  for (SafetensorsEntry& entry : header->entries) {
    const auto view = bytes.subspan(static_cast<std::size_t>(entry.offset), static_cast<std::size_t>(entry.bytes));
    file.tensors.push_back({std::move(entry.name), {entry.type, std::move(entry.shape), view}});
  }
  return file;
}

Result<SafetensorsLayout> lay_out_safetensors(std::span<const NamedTensor> tensors,
                                              const std::map<std::string, std::string>& metadata) {
  SafetensorsLayout layout;
  std::unordered_set<std::string_view> names;
  for (const NamedTensor& entry : tensors) {
    if (!is_utf8(entry.name) || entry.name == "__metadata__" || !names.insert(entry.name).second) {
      return fail(ErrorCode::InvalidArgument, "cannot write safetensors -- the tensor name '{}' {} -- rename it",
                  entry.name, names.contains(entry.name) ? "stands there twice" : "is not allowed");
    }
    if (!byte_count(entry.tensor.type, entry.tensor.shape)) {
      return fail(ErrorCode::InvalidArgument, "cannot write safetensors -- tensor '{}' has the shape {}", entry.name,
                  shape_text(entry.tensor.shape));
    }
    layout.order.push_back(layout.order.size());
  }
  std::sort(layout.order.begin(), layout.order.end(), [&](std::size_t a, std::size_t b) {
    const std::size_t x = info(tensors[a].tensor.type).bytes, y = info(tensors[b].tensor.type).bytes;
    return x != y ? x > y : tensors[a].name < tensors[b].name;
  });

  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  for (const auto& [key, value] : metadata) {
    if (!is_utf8(key) || !is_utf8(value)) {
      return fail(ErrorCode::InvalidArgument, "cannot write safetensors -- metadata '{}' is not UTF-8 -- encode it",
                  key);
    }
    header["__metadata__"][key] = value;
  }
  std::string text = header.dump();
  text.pop_back();
  std::uint64_t at = 0;
  for (const std::size_t index : layout.order) {
    const auto& [name, tensor] = tensors[index];
    const std::uint64_t end = at + *byte_count(tensor.type, tensor.shape);
    // Built as text, since inserting into nlohmann's ordered_json takes time linear in its size.
    text +=
        fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", text.size() == 1 ? "" : ",",
                    Json(name).dump(), info(tensor.type).safetensors, fmt::join(tensor.shape, ","), at, end);
    at = end;
  }
  text += '}';
  text.resize((sizeof(std::uint64_t) + text.size() + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment -
                  sizeof(std::uint64_t),
              ' ');
  if (text.size() > kLongestHeader) {
    return fail(ErrorCode::InvalidArgument,
                "cannot write safetensors -- names and metadata make a header of {} bytes where at most {} are allowed",
                text.size(), kLongestHeader);
  }
  const std::uint64_t header_size = text.size();
  layout.head.assign(reinterpret_cast<const char*>(&header_size), sizeof header_size);
  layout.head += text;
  return layout;
}

Result<void> write_safetensors(const Sink& sink, std::span<const NamedTensor> tensors,
                               const std::map<std::string, std::string>& metadata) {
  const auto layout = lay_out_safetensors(tensors, metadata);
  if (!layout) return tl::unexpected(layout.error());
  for (const NamedTensor& entry : tensors) {
    if (byte_count(entry.tensor.type, entry.tensor.shape) != entry.tensor.bytes.size()) {
      return fail(ErrorCode::InvalidArgument, "cannot write safetensors -- tensor '{}' {} has {} bytes", entry.name,
                  shape_text(entry.tensor.shape), entry.tensor.bytes.size());
    }
  }
  if (auto put = sink(as_bytes(layout->head)); !put) return put;
  for (const std::size_t index : layout->order) {
    if (auto put = sink(tensors[index].tensor.bytes); !put) return put;
  }
  return {};
}

Result<void> write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                               const std::map<std::string, std::string>& metadata) {
  auto file = sys::AtomicFile::create(path);
  if (!file) return tl::unexpected(file.error());
  auto written = write_safetensors([&](std::span<const std::byte> bytes) { return file->writer().write(bytes); },
                                   tensors, metadata);
  if (!written) return written;
  return file->commit();
}

}  // namespace cohort::formats
