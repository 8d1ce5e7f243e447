#include "formats/pickle_machine.h"

#include <bit>
#include <cstring>

namespace cohort::formats::unpickling {

namespace {

// Opcodes of Python's pickle protocol that torch.save uses (protocol 2), and those that stand for the same in
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

}  // namespace

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
      // A state_dict carries version numbers as an attribute (_metadata), which nobody needs for the tensors.
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

}  // namespace cohort::formats::unpickling
