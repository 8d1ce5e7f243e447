#include "train/formats/pt.h"

#include "base/files.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <map>
#include <tuple>

namespace cohort::formats {
namespace {

constexpr std::string_view kRoot = "archive";

tl::unexpected<Error> corrupt_pt(const std::string& name, std::string_view what) {
  return fail(ErrorCode::Corrupt, "{}: not a .pt file that can be read -- {}", name, what);
}

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

bool PtTensor::is_contiguous() const noexcept {
  std::int64_t expected = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    if (shape[i] == 0) return true;
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

std::span<const std::byte> PtTensor::bytes() const noexcept {
  const auto size = static_cast<std::size_t>(byte_count(type, shape).value_or(0));
  if (size == 0) return {};
  return storage.subspan(static_cast<std::size_t>(offset) * info(type).bytes, size);
}

std::vector<std::byte> PtTensor::gather() const {
  if (is_contiguous()) {
    const auto view = bytes();
    return {view.begin(), view.end()};
  }
  const std::size_t element = info(type).bytes;
  std::vector<std::byte> out(static_cast<std::size_t>(byte_count(type, shape).value_or(0)));
  std::vector<std::int64_t> position(shape.size(), 0);
  std::int64_t from = offset;
  for (std::size_t to = 0; to < out.size(); to += element) {
    std::memcpy(out.data() + to, storage.data() + static_cast<std::size_t>(from) * element, element);
    for (std::size_t i = shape.size(); i-- > 0;) {
      from += strides[i];
      if (++position[i] < shape[i]) break;
      from -= strides[i] * shape[i];
      position[i] = 0;
    }
  }
  return out;
}

const PtValue* PtDict::find(std::string_view key) const noexcept {
  for (const auto& [name, value] : items) {
    const auto* text = std::get_if<std::string>(&name);
    if (text != nullptr && *text == key) return &value;
  }
  return nullptr;
}

void PtDict::add(PtValue key, PtValue value) { items.emplace_back(std::move(key), std::move(value)); }

PtValue pt_dict(PtDict dict) { return std::make_shared<const PtDict>(std::move(dict)); }

PtValue pt_tensor(const TensorView& tensor) {
  PtTensor value{tensor.type, tensor.shape, std::vector<std::int64_t>(tensor.shape.size(), 1), 0, tensor.bytes};
  for (std::size_t i = tensor.shape.size(); i-- > 1;) {
    value.strides[i - 1] = value.strides[i] * std::max<std::int64_t>(tensor.shape[i], 1);
  }
  return value;
}

Result<PtValue> parse_pt(std::span<const std::byte> bytes, const std::string& name, const PtLimits& limits) {
  if (!text_of(bytes).starts_with("PK")) {
    return corrupt_pt(name, text_of(bytes).starts_with("\x80\x02")
                                ? "it is in the format from before torch 1.6: load it in Python and torch.save it again"
                                : "it does not begin as a zip archive");
  }
  const auto archive = ZipReader::parse(bytes, name);
  if (!archive) return tl::unexpected(archive.error());
  std::string root;
  for (const ZipEntry& entry : archive->entries()) {
    const std::size_t slash = entry.name.find('/');
    if (slash == std::string::npos || slash == 0)
      return corrupt_pt(name, fmt::format("entry '{}' is in no folder", entry.name));
    if (root.empty()) root = entry.name.substr(0, slash + 1);
    if (!entry.name.starts_with(root)) return corrupt_pt(name, "its entries are not in one folder");
  }
  const auto* const program = archive->find(root + "data.pkl");
  if (program == nullptr) return corrupt_pt(name, "it has no data.pkl");
  if (archive->find(root + "constants.pkl") != nullptr) {
    return corrupt_pt(
        name,
        "it is a TorchScript archive (torch.jit.save, or torch::save in C++), which holds a program: load it in "
        "torch and save its state_dict()");
  }
  if (const auto* order = archive->find(root + "byteorder")) {
    const auto content = archive->read(*order);
    if (!content) return tl::unexpected(content.error());
    if (text_of(*content) != "little")
      return corrupt_pt(name, "its numbers are not little-endian: save it on another machine");
  }
  // Unused entries are checked, too: no damage should pass unnoticed.
  std::map<std::string, std::span<const std::byte>, std::less<>> contents;
  for (const ZipEntry& entry : archive->entries()) {
    auto content = archive->read(entry);
    if (!content) return tl::unexpected(content.error());
    contents.emplace(entry.name, *content);
  }
  if (program->size > limits.pickle_bytes)
    return corrupt_pt(name, fmt::format("its data.pkl has {} bytes", program->size));
  return unpickle(contents.at(program->name), name, limits,
                  [&](const std::string& key) -> Result<std::span<const std::byte>> {
                    const auto found = contents.find(root + "data/" + key);
                    if (found == contents.end()) return corrupt_pt(name, fmt::format("storage '{}' is missing", key));
                    return found->second;
                  });
}

Result<void> write_pt(const Sink& sink, const PtValue& value, const PtWriteOptions& options) {
  const auto pickled = pickle(value, options.floats);
  if (!pickled) return tl::unexpected(pickled.error());
  ZipWriter zip(sink, options.zip64);
  const auto add = [&](std::string_view entry, std::span<const std::byte> bytes) {
    return zip.add(fmt::format("{}/{}", kRoot, entry), bytes);
  };
  if (auto done = add("data.pkl", as_bytes(pickled->bytes)); !done) return done;
  if (auto done = add("byteorder", as_bytes("little")); !done) return done;
  for (std::size_t i = 0; i < pickled->storages.size(); ++i) {
    Result<std::span<const std::byte>> bytes = pickled->storages[i];
    if (options.load) bytes = options.load(*bytes);
    if (!bytes) return tl::unexpected(bytes.error());
    if (auto done = add(fmt::format("data/{}", i), *bytes); !done) return done;
  }
  if (auto done = add("version", as_bytes("3\n")); !done) return done;
  return zip.finish();
}

Result<void> write_pt(const std::string& path, const PtValue& value, const PtWriteOptions& options) {
  auto file = sys::AtomicFile::create(path);
  if (!file) return tl::unexpected(file.error());
  auto written =
      write_pt([&](std::span<const std::byte> bytes) { return file->writer().write(bytes); }, value, options);
  if (!written) return written;
  return file->commit();
}

namespace {

constexpr int kDeepest = 100;

class Pickler {
 public:
  explicit Pickler(PtFloats floats) : floats_(floats) {}

  Result<Pickled> run(const PtValue& value) {
    out_.bytes = "\x80\x02";
    if (auto done = write(value, 0); !done) return tl::unexpected(done.error());
    out_.bytes += '.';
    return std::move(out_);
  }

 private:
  template <class T>
  void number(T value) {
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    out_.bytes.append(bytes, sizeof value);
  }
  void integer(std::int64_t value) {
    if (value >= 0 && value <= 0xff) {
      out_.bytes += 'K';
      number(static_cast<std::uint8_t>(value));
    } else if (value >= std::numeric_limits<std::int32_t>::min() && value <= std::numeric_limits<std::int32_t>::max()) {
      out_.bytes += 'J';
      number(static_cast<std::int32_t>(value));
    } else {
      out_.bytes += "\x8a\x08";
      number(value);
    }
  }
  Result<void> text(const std::string& value) {
    if (!is_utf8(value) || value.size() > std::numeric_limits<std::uint32_t>::max()) {
      return fail(ErrorCode::InvalidArgument, "cannot write a .pt -- the text '{}' is not UTF-8 -- encode it",
                  value.substr(0, 100));
    }
    out_.bytes += 'X';
    number(static_cast<std::uint32_t>(value.size()));
    out_.bytes += value;
    return {};
  }
  void numbers(const std::vector<std::int64_t>& values) {
    out_.bytes += '(';
    for (const std::int64_t value : values) integer(value);
    out_.bytes += 't';
  }
  std::size_t storage(ElementType type, std::span<const std::byte> bytes) {
    out_.storages.push_back(bytes);
    if (bytes.empty()) return out_.storages.size() - 1;  // an empty storage has no address to identify it
    const auto [found, fresh] = storages_.try_emplace({type, bytes.data(), bytes.size()}, out_.storages.size() - 1);
    if (!fresh) out_.storages.pop_back();
    return found->second;
  }
  Result<void> tensor(const PtTensor& value) {
    const ElementTypeInfo& type = info(value.type);
    const bool untyped = type.torch_storage.empty();
    out_.bytes += untyped ? "ctorch._utils\n_rebuild_tensor_v3\n((" : "ctorch._utils\n_rebuild_tensor_v2\n((";
    if (auto done = text("storage"); !done) return done;
    if (untyped)
      out_.bytes += "ctorch.storage\nUntypedStorage\n";
    else
      out_.bytes += fmt::format("ctorch\n{}\n", type.torch_storage);
    if (auto done = text(std::to_string(storage(value.type, value.storage))); !done) return done;
    if (auto done = text("cpu"); !done) return done;
    integer(static_cast<std::int64_t>(value.storage.size() / (untyped ? 1 : type.bytes)));
    out_.bytes += "tQ";
    integer(value.offset);
    numbers(value.shape);
    numbers(value.strides);
    out_.bytes +=
        "\x89"
        "ccollections\nOrderedDict\n)R";  // requires_grad, backward hooks
    if (untyped) out_.bytes += fmt::format("ctorch\n{}\n", type.torch);
    out_.bytes += "tR";
    return {};
  }
  Result<void> items(const std::vector<PtValue>& values, std::string_view begin, std::string_view end, int depth) {
    out_.bytes += begin;
    for (const PtValue& value : values) {
      if (auto done = write(value, depth + 1); !done) return done;
    }
    out_.bytes += end;
    return {};
  }

  Result<void> write(const PtValue& value, int depth) {
    if (depth > kDeepest)
      return fail(ErrorCode::InvalidArgument, "cannot write a .pt -- its values are nested deeper than {}", kDeepest);
    if (const auto* flag = std::get_if<bool>(&value)) {
      out_.bytes += *flag ? '\x88' : '\x89';
    } else if (const auto* whole = std::get_if<std::int64_t>(&value)) {
      integer(*whole);
    } else if (const auto* real = std::get_if<double>(&value)) {
      if (floats_ == PtFloats::Tensor) {
        out_.numbers.push_back(std::make_unique<double>(*real));
        return tensor({ElementType::Float64, {}, {}, 0, std::as_bytes(std::span(out_.numbers.back().get(), 1))});
      }
      out_.bytes += 'G';
      number(__builtin_bswap64(std::bit_cast<std::uint64_t>(*real)));
    } else if (const auto* words = std::get_if<std::string>(&value)) {
      return text(*words);
    } else if (const auto* array = std::get_if<PtTensor>(&value)) {
      return tensor(*array);
    } else if (const auto* list = std::get_if<std::shared_ptr<const PtList>>(&value)) {
      return items((*list)->items, "](", "e", depth);
    } else if (const auto* tuple = std::get_if<std::shared_ptr<const PtTuple>>(&value)) {
      return items((*tuple)->items, "(", "t", depth);
    } else if (const auto* dict = std::get_if<std::shared_ptr<const PtDict>>(&value)) {
      out_.bytes += "}(";
      for (const auto& [key, item] : (*dict)->items) {
        if (!std::holds_alternative<std::string>(key) && !std::holds_alternative<std::int64_t>(key)) {
          return fail(ErrorCode::InvalidArgument, "cannot write a .pt -- a dict's key is neither text nor an integer");
        }
        if (auto done = write(key, depth + 1); !done) return done;
        if (auto done = write(item, depth + 1); !done) return done;
      }
      out_.bytes += 'u';
    } else {
      out_.bytes += 'N';
    }
    return {};
  }

  PtFloats floats_;
  Pickled out_;
  std::map<std::tuple<ElementType, const std::byte*, std::size_t>, std::size_t> storages_;
};

}  // namespace

Result<Pickled> pickle(const PtValue& value, PtFloats floats) { return Pickler(floats).run(value); }

}  // namespace cohort::formats
