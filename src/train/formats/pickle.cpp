#include "train/formats/pt.h"

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace cohort::formats::unpickling {
namespace {

// Values on the stack while a pickle is read, and the reader's allow-list of functions and classes that a pickle may
// name. Plain data; a Node belongs to the machine that made it. find_global: any thread may call.

enum class Kind : std::uint8_t { Scalar, List, Tuple, Dict, Global, Storage };

// The functions and classes that a pickle may name. Everything else is refused by name.
enum class Function : std::uint8_t {
  OrderedDict,
  Size,
  Device,
  Parameter,
  Tensor1,
  Tensor2,
  Tensor3,
  StorageType,
  UntypedStorage,
  ElementTypeName,
};

struct Global {
  Function function;
  const ElementTypeInfo* type = nullptr;
};

struct Storage {
  std::span<const std::byte> bytes;
  const ElementTypeInfo* type = nullptr;  // nullptr: untyped
};

using Index = std::uint32_t;

/// A value on the stack. Containers refer to other nodes by number, so that cycles are harmless.
struct Node {
  Kind kind = Kind::Scalar;
  bool ordered_dict = false;
  PtValue scalar;               // Kind::Scalar, tensors included
  std::vector<Index> children;  // items; for dicts key, value, key, value, ...
  Global global{};
  Storage storage;
};

/// Looks up `module.name` in the allow-list; nullopt if it is not listed, so that the reader refuses it.
std::optional<Global> find_global(std::string_view module, std::string_view name);

// The stack machine that reads one pickle. It makes only plain values. It may call only the functions listed in
// find_global, and each call is emulated here, not run. For any bytes, it reads only within them, and its memory is
// bounded by PtLimits. For one use by one thread; its input has to outlive it.

/// Any failure is kept in `problem_`; the value is valid only if there is no problem.
class Machine {
 public:
  Machine(std::span<const std::byte> bytes, const std::string& name, const PtLimits& limits,
          const StorageOf& storage_of)
      : bytes_(bytes), name_(name), limits_(limits), storage_of_(storage_of) {}

  Result<PtValue> run();

 private:
  enum class State : std::uint8_t { New, Open, Done };

  // Functions that return bool return false if they have set a problem.
  bool problem(std::string text);
  tl::unexpected<Error> error(std::string text = {});

  // Reading bytes.
  template <class T>
  bool number(T& value) {
    if (bytes_.size() - at_ < sizeof(T)) return problem("it ends too early");
    std::memcpy(&value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return true;
  }
  bool text(std::uint64_t size, std::string& value);
  bool line(std::string& value);

  // Working on the stack.
  bool push(Node node);
  /// Counts the references that containers hold: they cost memory too, and a few bytes can create millions of them.
  bool count_links(std::size_t more);
  bool push_scalar(PtValue value);
  bool push_kind(Kind kind, std::vector<Index> children = {});
  /// Returns the number of values above the last mark; values below the mark cannot be reached, as in Python.
  std::size_t available() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }
  bool pop(Index& index);
  bool top(Index& index);
  bool pop_mark(std::vector<Index>& items);

  // Executing opcodes.
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

  // Storages, tensors and the other calls: below.
  const std::int64_t* integer(Index index) const { return std::get_if<std::int64_t>(&nodes_[index].scalar); }
  bool push_storage();
  bool reduce();
  bool dimensions(Index index, std::vector<std::int64_t>& out);
  bool push_tensor(const std::vector<Index>& parts, std::size_t known, const ElementTypeInfo* type);

  // Converting nodes to values: below.
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

std::optional<Global> find_global(std::string_view module, std::string_view name) {
  struct Row {
    std::string_view module, name;
    Function function;
  };
  constexpr std::array<Row, 9> kRows = {{{"collections", "OrderedDict", Function::OrderedDict},
                                         {"torch", "Size", Function::Size},
                                         {"torch", "device", Function::Device},
                                         {"torch._utils", "_rebuild_parameter", Function::Parameter},
                                         {"torch._utils", "_rebuild_tensor", Function::Tensor1},
                                         {"torch._utils", "_rebuild_tensor_v2", Function::Tensor2},
                                         {"torch._utils", "_rebuild_tensor_v3", Function::Tensor3},
                                         {"torch.storage", "UntypedStorage", Function::UntypedStorage},
                                         {"torch", "UntypedStorage", Function::UntypedStorage}}};
  for (const Row& row : kRows) {
    if (row.module == module && row.name == name) return Global{row.function, nullptr};
  }
  if (module != "torch") return std::nullopt;
  if (const auto* type = find_torch_storage(name)) return Global{Function::StorageType, type};
  if (const auto* type = find_torch_type(name)) return Global{Function::ElementTypeName, type};
  return std::nullopt;
}

// Opcodes of Python's pickle protocol that torch.save uses (protocol 2), and their equivalents in
// protocol 4.
enum Op : std::uint8_t {
  kProto = 0x80,
  kFrame = 0x95,
  kStop = '.',
  kMark = '(',
  kPop = '0',
  kNone = 'N',
  kTrue = 0x88,
  kFalse = 0x89,
  kInt4 = 'J',
  kInt1 = 'K',
  kInt2 = 'M',
  kLong1 = 0x8a,
  kFloat = 'G',
  kUnicode = 'X',
  kShortUnicode = 0x8c,
  kUnicode8 = 0x8d,
  kEmptyTuple = ')',
  kTuple = 't',
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kEmptyList = ']',
  kAppend = 'a',
  kAppends = 'e',
  kEmptyDict = '}',
  kSetItem = 's',
  kSetItems = 'u',
  kPut = 'q',
  kLongPut = 'r',
  kMemoize = 0x94,
  kGet = 'h',
  kLongGet = 'j',
  kGlobal = 'c',
  kStackGlobal = 0x93,
  kPersistentId = 'Q',
  kReduce = 'R',
  kBuild = 'b',
};

Result<PtValue> Machine::run() {
  for (;;) {
    std::uint8_t op = 0;
    if (!number(op)) return error();
    if (op == kStop) break;
    if (!step(op)) return error();
  }
  if (at_ != bytes_.size()) return error(fmt::format("{} bytes follow its end", bytes_.size() - at_));
  if (stack_.size() != 1 || !marks_.empty()) return error("it does not end with one value");
  states_.assign(nodes_.size(), State::New);
  results_.resize(nodes_.size());
  PtValue value;
  if (!convert(stack_.back(), 0, value)) return error();
  return value;
}

bool Machine::problem(std::string text) {
  if (problem_.empty()) problem_ = std::move(text);
  return false;
}

tl::unexpected<Error> Machine::error(std::string text) {
  problem(std::move(text));
  if (cause_) return tl::unexpected(*cause_);
  return fail(ErrorCode::Corrupt,
              "{}: cannot be read as plain tensors -- {} (pickle, byte {}) -- save a state_dict with torch.save", name_,
              problem_, at_);
}

bool Machine::text(std::uint64_t size, std::string& value) {
  if (size > bytes_.size() - at_) return problem("it ends within a text");
  value.assign(reinterpret_cast<const char*>(bytes_.data()) + at_, static_cast<std::size_t>(size));
  at_ += static_cast<std::size_t>(size);
  return true;
}

bool Machine::line(std::string& value) {
  const std::string_view rest(reinterpret_cast<const char*>(bytes_.data()) + at_, bytes_.size() - at_);
  const std::size_t end = rest.substr(0, 1000).find('\n');
  if (end == std::string_view::npos) return problem("a name has no end");
  value = rest.substr(0, end);
  at_ += end + 1;
  return true;
}

bool Machine::push(Node node) {
  if (nodes_.size() >= limits_.values) return problem(fmt::format("it has more than {} values", limits_.values));
  stack_.push_back(static_cast<Index>(nodes_.size()));
  nodes_.push_back(std::move(node));
  return true;
}

bool Machine::count_links(std::size_t more) {
  if (more > limits_.values - links_) return problem(fmt::format("it has more than {} items", limits_.values));
  links_ += more;
  return true;
}

bool Machine::push_scalar(PtValue value) {
  Node node;
  node.scalar = std::move(value);
  return push(std::move(node));
}

bool Machine::push_kind(Kind kind, std::vector<Index> children) {
  if (!count_links(children.size())) return false;
  Node node;
  node.kind = kind;
  node.children = std::move(children);
  return push(std::move(node));
}

bool Machine::pop(Index& index) {
  if (available() == 0) return problem("its stack is empty");
  index = stack_.back();
  stack_.pop_back();
  return true;
}

bool Machine::top(Index& index) {
  if (available() == 0) return problem("its stack is empty");
  index = stack_.back();
  return true;
}

bool Machine::pop_mark(std::vector<Index>& items) {
  if (marks_.empty()) return problem("a mark is missing");
  items.assign(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()), stack_.end());
  stack_.resize(marks_.back());
  marks_.pop_back();
  return true;
}

bool Machine::push_text(std::uint64_t size) {
  std::string value;
  if (!text(size, value)) return false;
  if (!is_utf8(value)) return problem("a text is not UTF-8");
  return push_scalar(std::move(value));
}

bool Machine::push_tuple(std::size_t size) {
  std::vector<Index> items(size);
  for (std::size_t i = size; i-- > 0;) {
    if (!pop(items[i])) return false;
  }
  return push_kind(Kind::Tuple, std::move(items));
}

bool Machine::extend(Kind kind, const std::vector<Index>& items) {
  Index container = 0;
  if (!top(container)) return false;
  Node& node = nodes_[container];
  if (node.kind != kind)
    return problem(kind == Kind::List ? "it appends to what is no list" : "it sets items of what is no dict");
  if (kind == Kind::Dict && items.size() % 2 != 0) return problem("a key has no value");
  if (!count_links(items.size())) return false;
  node.children.insert(node.children.end(), items.begin(), items.end());
  return true;
}

bool Machine::put(std::uint32_t slot) {
  Index index = 0;
  if (!top(index)) return false;
  memo_[slot] = index;
  return true;
}

bool Machine::get(std::uint32_t slot) {
  const auto found = memo_.find(slot);
  if (found == memo_.end()) return problem("it refers to a value that was never made");
  stack_.push_back(found->second);
  if (stack_.size() > limits_.values) return problem(fmt::format("it has more than {} values", limits_.values));
  return true;
}

bool Machine::push_global(std::string_view module, std::string_view name) {
  const auto global = find_global(module, name);
  if (!global) {
    return problem(
        fmt::format("it needs '{}.{}', which is not among the classes of plain tensors and is not run", module, name));
  }
  Node node;
  node.kind = Kind::Global;
  node.global = *global;
  return push(std::move(node));
}

bool Machine::step(std::uint8_t op) {
  switch (op) {
    case kProto: {
      std::uint8_t version = 0;
      return number(version) && (version <= 5 || problem(fmt::format("unknown pickle protocol {}", version)));
    }
    case kFrame: {
      std::uint64_t size = 0;
      return number(size);
    }
    case kMark:
      marks_.push_back(stack_.size());
      return marks_.size() <= limits_.values || problem("it has too many marks");
    case kPop: {
      Index ignored = 0;
      return pop(ignored);
    }
    case kNone: return push_scalar(std::monostate());
    case kTrue: return push_scalar(true);
    case kFalse: return push_scalar(false);
    case kInt1: return push_integer<std::uint8_t>();
    case kInt2: return push_integer<std::uint16_t>();
    case kInt4: return push_integer<std::int32_t>();
    case kLong1: return push_long();
    case kFloat: {
      std::uint64_t bits = 0;
      return number(bits) && push_scalar(std::bit_cast<double>(__builtin_bswap64(bits)));
    }
    case kUnicode: return push_text_of<std::uint32_t>();
    case kShortUnicode: return push_text_of<std::uint8_t>();
    case kUnicode8: return push_text_of<std::uint64_t>();
    case kEmptyTuple: return push_kind(Kind::Tuple);
    case kTuple1: return push_tuple(1);
    case kTuple2: return push_tuple(2);
    case kTuple3: return push_tuple(3);
    case kTuple: {
      std::vector<Index> items;
      return pop_mark(items) && push_kind(Kind::Tuple, std::move(items));
    }
    case kEmptyList: return push_kind(Kind::List);
    case kEmptyDict: return push_kind(Kind::Dict);
    case kAppend: {
      Index item = 0;
      return pop(item) && extend(Kind::List, {item});
    }
    case kSetItem: {
      Index value = 0, key = 0;
      return pop(value) && pop(key) && extend(Kind::Dict, {key, value});
    }
    case kAppends:
    case kSetItems: {
      std::vector<Index> items;
      return pop_mark(items) && extend(op == kAppends ? Kind::List : Kind::Dict, items);
    }
    case kPut: return memo_operation<std::uint8_t>(&Machine::put);
    case kLongPut: return memo_operation<std::uint32_t>(&Machine::put);
    case kMemoize: return put(static_cast<std::uint32_t>(memo_.size()));
    case kGet: return memo_operation<std::uint8_t>(&Machine::get);
    case kLongGet: return memo_operation<std::uint32_t>(&Machine::get);
    case kGlobal: {
      std::string module, name;
      return line(module) && line(name) && push_global(module, name);
    }
    case kStackGlobal: {
      Index name = 0, module = 0;
      if (!pop(name) || !pop(module)) return false;
      const auto* name_text = std::get_if<std::string>(&nodes_[name].scalar);
      const auto* module_text = std::get_if<std::string>(&nodes_[module].scalar);
      if (name_text == nullptr || module_text == nullptr) return problem("a global has no name");
      return push_global(std::string(*module_text), std::string(*name_text));
    }
    case kPersistentId: return push_storage();
    case kReduce: return reduce();
    case kBuild: {
      Index state = 0, object = 0;
      if (!pop(state) || !top(object)) return false;
      // A state_dict has version numbers in an attribute (_metadata), which the tensors do not need.
      return nodes_[object].ordered_dict || problem("it sets attributes of what is no OrderedDict");
    }
    default: return problem(fmt::format("unknown pickle opcode 0x{:02x}", op));
  }
}

bool Machine::push_long() {
  std::uint8_t size = 0;
  if (!number(size)) return false;
  if (size > 8) return problem("an integer does not fit into 64 bits");
  if (bytes_.size() - at_ < size) return problem("it ends within a number");
  std::uint64_t value = 0;
  std::memcpy(&value, bytes_.data() + at_, size);
  at_ += size;
  if (size > 0 && size < 8 && (value >> (8 * size - 1) & 1) != 0) value |= ~std::uint64_t{0} << (8 * size);
  return push_scalar(static_cast<std::int64_t>(value));
}

// The calls that a pickle of tensors makes: storages, tensors, and the few functions of the allow-list.

bool Machine::push_storage() {
  Index id = 0;
  if (!pop(id)) return false;
  const std::vector<Index>& parts = nodes_[id].children;
  if (nodes_[id].kind != Kind::Tuple || parts.size() != 5) return problem("a storage's id is not a tuple of five");
  const auto* tag = std::get_if<std::string>(&nodes_[parts[0]].scalar);
  const Node& type = nodes_[parts[1]];
  const auto* key = std::get_if<std::string>(&nodes_[parts[2]].scalar);
  const std::int64_t* const count = integer(parts[4]);
  if (tag == nullptr || *tag != "storage" || key == nullptr || count == nullptr || type.kind != Kind::Global ||
      (type.global.function != Function::StorageType && type.global.function != Function::UntypedStorage)) {
    return problem("a storage's id is not what torch writes");
  }
  auto bytes = storage_of_(*key);
  if (!bytes) {
    cause_ = bytes.error();
    return false;
  }
  Node node;
  node.kind = Kind::Storage;
  node.storage = {*bytes, type.global.type};
  const std::size_t element = node.storage.type == nullptr ? 1 : node.storage.type->bytes;
  if (*count < 0 || bytes->size() % element != 0 || static_cast<std::uint64_t>(*count) != bytes->size() / element) {
    return problem(fmt::format("storage '{}' has {} bytes, but is said to have {} elements of {}", *key, bytes->size(),
                               *count, element));
  }
  return push(std::move(node));
}

bool Machine::reduce() {
  Index arguments = 0, function = 0;
  if (!pop(arguments) || !pop(function)) return false;
  if (nodes_[function].kind != Kind::Global || nodes_[arguments].kind != Kind::Tuple) {
    return problem("it calls what is no function");
  }
  const std::vector<Index> parts = nodes_[arguments].children;
  switch (nodes_[function].global.function) {
    case Function::OrderedDict: {
      if (!parts.empty()) return problem("an OrderedDict is made from something");
      Node node;
      node.kind = Kind::Dict;
      node.ordered_dict = true;
      return push(std::move(node));
    }
    case Function::Size: {
      if (parts.size() != 1 || nodes_[parts[0]].kind != Kind::Tuple) return problem("a torch.Size has no tuple");
      return push_kind(Kind::Tuple, std::vector<Index>(nodes_[parts[0]].children));
    }
    case Function::Device: {
      if (parts.empty() || parts.size() > 2 || !std::holds_alternative<std::string>(nodes_[parts[0]].scalar)) {
        return problem("a torch.device has no name");
      }
      return push_scalar(std::string(std::get<std::string>(nodes_[parts[0]].scalar)));
    }
    case Function::Parameter:
      if (parts.size() != 3 || !std::holds_alternative<PtTensor>(nodes_[parts[0]].scalar))
        return problem("a parameter has no tensor");
      stack_.push_back(parts[0]);
      return true;
    case Function::Tensor1: return push_tensor(parts, 4, nullptr);
    case Function::Tensor2: return push_tensor(parts, 6, nullptr);
    case Function::Tensor3: {
      if (parts.size() < 7 || nodes_[parts[6]].kind != Kind::Global ||
          nodes_[parts[6]].global.function != Function::ElementTypeName) {
        return problem("a tensor has no element type");
      }
      return push_tensor(parts, 7, nodes_[parts[6]].global.type);
    }
    case Function::StorageType:
    case Function::UntypedStorage:
    case Function::ElementTypeName: return problem("it calls a type");
  }
  return problem("it calls an unknown function");
}

bool Machine::dimensions(Index index, std::vector<std::int64_t>& out) {
  const Node& node = nodes_[index];
  if (node.kind != Kind::Tuple || node.children.size() > 64)
    return problem("a tensor's shape is not a tuple of numbers");
  for (const Index child : node.children) {
    const std::int64_t* const value = integer(child);
    if (value == nullptr || *value < 0) return problem("a tensor's shape or strides are not numbers from 0 on");
    out.push_back(*value);
  }
  return true;
}

bool Machine::push_tensor(const std::vector<Index>& parts, std::size_t known, const ElementTypeInfo* type) {
  // The known arguments may be followed by a dict of rare properties (conjugate, negative), which has to be empty.
  if (parts.size() < known || parts.size() > known + 1) return problem("a tensor has the wrong number of arguments");
  if (parts.size() == known + 1) {
    const Node& extra = nodes_[parts[known]];
    const bool none = extra.kind == Kind::Scalar && std::holds_alternative<std::monostate>(extra.scalar);
    if (!none && (extra.kind != Kind::Dict || !extra.children.empty()))
      return problem("a tensor is conjugate, negative or otherwise unusual");
  }
  if (nodes_[parts[0]].kind != Kind::Storage) return problem("a tensor has no storage");
  const Storage& storage = nodes_[parts[0]].storage;
  if (type == nullptr) type = storage.type;
  if (type == nullptr || (storage.type != nullptr && storage.type != type))
    return problem("a tensor's element type is not known");
  const std::int64_t* const offset = integer(parts[1]);
  PtTensor tensor;
  tensor.type = type->type;
  tensor.storage = storage.bytes;
  if (offset == nullptr || *offset < 0) return problem("a tensor has no offset");
  tensor.offset = *offset;
  if (!dimensions(parts[2], tensor.shape) || !dimensions(parts[3], tensor.strides)) return false;
  if (tensor.shape.size() != tensor.strides.size()) return problem("a tensor has not as many strides as dimensions");
  const auto elements = element_count(tensor.shape);
  if (!elements || !byte_count(tensor.type, tensor.shape)) return problem("a tensor is too large");
  if (*elements > 0) {
    std::int64_t last = tensor.offset;
    for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
      std::int64_t reach = 0;
      if (__builtin_mul_overflow(tensor.shape[i] - 1, tensor.strides[i], &reach) ||
          __builtin_add_overflow(last, reach, &last)) {
        return problem("a tensor is too large");
      }
    }
    if (static_cast<std::uint64_t>(last) >= storage.bytes.size() / type->bytes)
      return problem("a tensor reaches beyond its storage");
  }
  return push_scalar(std::move(tensor));
}

}  // namespace

// Converts the value left on the stack at the end of a pickle to PtValues.

bool Machine::convert(Index index, int depth, PtValue& out) {
  const Node& node = nodes_[index];
  switch (node.kind) {
    case Kind::Scalar: out = node.scalar; return true;
    case Kind::Global:
      if (node.global.function != Function::ElementTypeName) return problem("a class stands where a value belongs");
      out = fmt::format("torch.{}", node.global.type->torch);
      return true;
    case Kind::Storage: return problem("a storage stands where a tensor belongs");
    case Kind::List:
    case Kind::Tuple:
    case Kind::Dict: break;
  }
  if (depth >= limits_.depth) return problem(fmt::format("it is nested deeper than {}", limits_.depth));
  if (states_[index] == State::Open) return problem("a value contains itself");
  if (states_[index] == State::Done) {
    out = results_[index];
    return true;
  }
  states_[index] = State::Open;
  std::vector<PtValue> items(node.children.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (!convert(node.children[i], depth + 1, items[i])) return false;
  }
  if (node.kind == Kind::List) {
    out = std::make_shared<const PtList>(PtList{std::move(items)});
  } else if (node.kind == Kind::Tuple) {
    out = std::make_shared<const PtTuple>(PtTuple{std::move(items)});
  } else if (!make_dict(std::move(items), out)) {
    return false;
  }
  results_[index] = out;
  states_[index] = State::Done;
  return true;
}

bool Machine::make_dict(std::vector<PtValue> items, PtValue& out) {
  PtDict dict;
  std::unordered_set<std::string> keys;
  for (std::size_t i = 0; i < items.size(); i += 2) {
    std::string key;
    if (const auto* name = std::get_if<std::string>(&items[i]))
      key = "s" + *name;
    else if (const auto* value = std::get_if<std::int64_t>(&items[i]))
      key = fmt::format("i{}", *value);
    else if (const auto* flag = std::get_if<bool>(&items[i]))
      key = fmt::format("i{}", static_cast<int>(*flag));
    else
      return problem("a dict's key is neither text nor an integer");
    if (!keys.insert(key).second) return problem(fmt::format("the key '{}' stands in a dict twice", key.substr(1)));
    dict.items.emplace_back(std::move(items[i]), std::move(items[i + 1]));
  }
  out = std::make_shared<const PtDict>(std::move(dict));
  return true;
}

}  // namespace cohort::formats::unpickling

namespace cohort::formats {

Result<PtValue> unpickle(std::span<const std::byte> bytes, const std::string& name, const PtLimits& limits,
                         const StorageOf& storage_of) {
  return unpickling::Machine(bytes, name, limits, storage_of).run();
}

}  // namespace cohort::formats
