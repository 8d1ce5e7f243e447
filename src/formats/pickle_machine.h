// The stack machine that reads one pickle. It makes plain values and nothing else: what it may call is the list in
// pickle_values.h, and each call is done here, not run. Whatever the bytes say, it reads only within them, and its
// memory is bounded by PtLimits. For one use by one thread; what it was made from has to outlive it.
#pragma once

#include "formats/pickle.h"
#include "formats/pickle_values.h"

#include <cstring>
#include <optional>
#include <unordered_map>

namespace cohort::formats::unpickling {

/// Any failure is kept in `problem_`; the value is good only if there is none.
class Machine {
 public:
  Machine(std::span<const std::byte> bytes, const std::string& name, const PtLimits& limits,
          const StorageOf& storage_of)
      : bytes_(bytes), name_(name), limits_(limits), storage_of_(storage_of) {}

  Result<PtValue> run();

 private:
  enum class State : std::uint8_t { New, Open, Done };

  // Each bool says whether all is well; if not, there is a problem.
  bool problem(std::string text);
  tl::unexpected<Error> error(std::string text = {});

  // The bytes.
  template <class T>
  bool number(T& value) {
    if (bytes_.size() - at_ < sizeof(T)) return problem("it ends too early");
    std::memcpy(&value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return true;
  }
  bool text(std::uint64_t size, std::string& value);
  bool line(std::string& value);

  // The stack.
  bool push(Node node);
  /// References from containers, which cost memory, too, and can be made by the million with few bytes.
  bool count_links(std::size_t more);
  bool push_scalar(PtValue value);
  bool push_kind(Kind kind, std::vector<Index> children = {});
  /// Values above the last mark stay out of reach, as in Python.
  std::size_t available() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }
  bool pop(Index& index);
  bool top(Index& index);
  bool pop_mark(std::vector<Index>& items);

  // The opcodes.
  bool step(std::uint8_t op);
  template <class T>
  bool push_integer() {
    T value{};
    return number(value) && push_scalar(static_cast<std::int64_t>(value));
  }
  template <class T>
  bool push_text_of() {
    T size{};
    return number(size) && push_text(size);
  }
  template <class T>
  bool memo_operation(bool (Machine::*operation)(std::uint32_t)) {
    T slot{};
    return number(slot) && (this->*operation)(slot);
  }
  bool push_long();
  bool push_text(std::uint64_t size);
  bool push_tuple(std::size_t size);
  bool extend(Kind kind, const std::vector<Index>& items);
  bool put(std::uint32_t slot);
  bool get(std::uint32_t slot);
  bool push_global(std::string_view module, std::string_view name);

  // Storages, tensors and the other calls: pickle_tensors.cpp.
  const std::int64_t* integer(Index index) const { return std::get_if<std::int64_t>(&nodes_[index].scalar); }
  bool push_storage();
  bool reduce();
  bool dimensions(Index index, std::vector<std::int64_t>& out);
  bool push_tensor(const std::vector<Index>& parts, std::size_t known, const ElementTypeInfo* type);

  // From nodes to values: pickle_read.cpp.
  bool convert(Index index, int depth, PtValue& out);
  bool make_dict(std::vector<PtValue> items, PtValue& out);

  std::span<const std::byte> bytes_;
  const std::string& name_;
  const PtLimits& limits_;
  const StorageOf& storage_of_;
  std::size_t at_ = 0;
  std::string problem_;
  std::optional<Error> cause_;
  std::vector<Node> nodes_;
  std::vector<Index> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint32_t, Index> memo_;
  std::size_t links_ = 0;
  std::vector<State> states_;
  std::vector<PtValue> results_;
};

}  // namespace cohort::formats::unpickling
