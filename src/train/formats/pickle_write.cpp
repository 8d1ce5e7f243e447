#include "train/formats/pt.h"

#include <bit>
#include <cstring>
#include <limits>
#include <map>
#include <tuple>

namespace cohort::formats {
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
    if (bytes.empty()) return out_.storages.size() - 1;  // has no address of its own to be told apart by
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
