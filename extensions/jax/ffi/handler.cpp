// cohort/_jax_ffi.so: the foreign function by which programs that XLA has compiled request operations by name. It links
// neither JAX nor Cohort: `_core` gives it a table of functions (extensions/horovod/bindings/named_calls.h), and XLA
// another. It returns at once, or within kPatience, and completes a future when the operations are done. Thus no thread
// of XLA waits for other ranks, and programs may run in any order on each rank. No Python.
#include "horovod/bindings/named_calls.h"
#include "xla_ffi.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::python {
namespace {

using xla::Code;

/// Time to wait: small operations of ranks that are in step are done in it, without a switch of threads.
constexpr std::int64_t kPatience = 100'000;  // ns

const NamedCalls* calls = nullptr;

xla::Error* error_of(const xla::Api& api, Code code, const std::string& text) {
  xla::ErrorCreate made{{sizeof(xla::ErrorCreate), nullptr}, text.c_str(), code};
  return api.error_create(&made);
}

/// Indexed by the numbers of cohort::ErrorCode.
Code code_of(int code) {
  constexpr Code kCodes[] = {Code::InvalidArgument, Code::Unavailable,        Code::DeadlineExceeded,
                             Code::Unavailable,     Code::FailedPrecondition, Code::Aborted};
  return code >= 0 && code < static_cast<int>(std::size(kCodes)) ? kCodes[code] : Code::Internal;
}

bool dtype_of(xla::Type type, DType& dtype) {
  switch (type) {
    case xla::Type::Pred: dtype = DType::Bool; return true;
    case xla::Type::S8: dtype = DType::Int8; return true;
    case xla::Type::S16: dtype = DType::Int16; return true;
    case xla::Type::S32: dtype = DType::Int32; return true;
    case xla::Type::S64: dtype = DType::Int64; return true;
    case xla::Type::U8: dtype = DType::UInt8; return true;
    case xla::Type::U16: dtype = DType::UInt16; return true;
    case xla::Type::U32: dtype = DType::UInt32; return true;
    case xla::Type::U64: dtype = DType::UInt64; return true;
    case xla::Type::F16: dtype = DType::Float16; return true;
    case xla::Type::F32: dtype = DType::Float32; return true;
    case xla::Type::F64: dtype = DType::Float64; return true;
    case xla::Type::C64: dtype = DType::Complex64; return true;
    case xla::Type::BF16: dtype = DType::BFloat16; return true;
    case xla::Type::C128: dtype = DType::Complex128; return true;
  }
  return false;
}

/// The attributes that cohort/jax/_ffi.py has put into the program.
struct Asked {
  std::int64_t kind = 0, engine = 0, op = 0, root = 0;
  double prescale = 1, postscale = 1;
  std::string_view names;              // "3:abc5:hello": lengths in bytes before each
  const std::int64_t* rows = nullptr;  // rows of each rank, for each operand, if the kind has rows
  std::size_t row_count = 0;
};

template <class T>
bool take(const xla::Attributes& given, std::int64_t at, xla::Type type, T& value) {
  if (given.kinds[at] != xla::kScalar) return false;
  const auto& scalar = *static_cast<const xla::Scalar*>(given.values[at]);
  if (scalar.dtype != type) return false;
  value = *static_cast<const T*>(scalar.value);
  return true;
}

/// Returns false for attributes that are not ours.
bool read(const xla::Attributes& given, Asked& asked) {
  int found = 0;
  for (std::int64_t i = 0; i < given.size; ++i) {
    const std::string_view name(given.names[i]->data, given.names[i]->size);
    bool good = false;
    if (name == "engine") {
      good = take(given, i, xla::Type::S64, asked.engine);
    } else if (name == "op") {
      good = take(given, i, xla::Type::S64, asked.op);
    } else if (name == "root") {
      good = take(given, i, xla::Type::S64, asked.root);
    } else if (name == "prescale") {
      good = take(given, i, xla::Type::F64, asked.prescale);
    } else if (name == "postscale") {
      good = take(given, i, xla::Type::F64, asked.postscale);
    } else if (name == "kind") {
      good = take(given, i, xla::Type::S64, asked.kind);
    } else if (name == "names") {
      good = given.kinds[i] == xla::kText;
      const auto& text = *static_cast<const xla::Text*>(given.values[i]);
      if (good) asked.names = {text.data, text.size};
    } else if (name == "rows") {
      good = given.kinds[i] == xla::kArray;
      const auto& array = *static_cast<const xla::Array*>(given.values[i]);
      if (good && array.size > 0) {
        good = array.dtype == xla::Type::S64;
        asked.rows = static_cast<const std::int64_t*>(array.data);
        asked.row_count = array.size;
      }
    }
    found += good ? 1 : 0;
  }
  return found == 8;
}

/// Removes the first name from `names` and returns it; empty if there is none.
std::string_view next_name(std::string_view& names) {
  std::size_t bytes = 0;
  const auto [end, problem] = std::from_chars(names.data(), names.data() + names.size(), bytes);
  const auto digits = static_cast<std::size_t>(end - names.data());
  if (problem != std::errc() || digits >= names.size() || bytes > names.size() - digits - 1) return {};
  const std::string_view name = names.substr(digits + 1, bytes);
  names.remove_prefix(digits + 1 + bytes);
  return name;
}

/// The memory that XLA provides for one result, and its shape.
struct Place {
  void* data = nullptr;
  std::vector<std::int64_t> shape;
};

/// One call under way. Whichever comes second, `done` or the caller that makes the future, ends it. XLA keeps memory of
/// operands, results and attributes until the future is completed, but not the frame itself.
struct Running {
  const xla::Api* api = nullptr;
  Asked asked;
  std::vector<NamedCall> group;
  std::vector<Place> places;
  std::vector<std::unique_ptr<std::byte[]>> unfit;  // results whose shapes are not the program's
  std::string problem;
  Code code = Code::Internal;
  xla::Future* future = nullptr;
  std::atomic<bool> first{true};

  std::string_view name(std::size_t i) const { return {group[i].name, group[i].name_bytes}; }

  /// Fills in the call from `frame`. Returns the problem with the frame; empty if there is none.
  std::string fill(const xla::CallFrame& frame);
  void* place(std::size_t i, const std::int64_t* shape, std::size_t dimensions);
  void check(const NamedReply& reply);
  void complete();
};

std::string Running::fill(const xla::CallFrame& frame) {
  if (!read(frame.attributes, asked))
    return "the program was compiled for another version of Cohort -- compile it anew";
  const auto count = static_cast<std::size_t>(frame.operands.size);
  if (frame.results.size != frame.operands.size) return "there are not as many results as operands";
  group.resize(count);
  places.resize(count);
  unfit.resize(count);
  std::string_view names = asked.names;
  for (std::size_t i = 0; i < count; ++i) {
    if (frame.operands.kinds[i] != xla::kBuffer || frame.results.kinds[i] != xla::kBuffer)
      return "an operand is no buffer";
    const auto& operand = *static_cast<const xla::Buffer*>(frame.operands.values[i]);
    const auto& result = *static_cast<const xla::Buffer*>(frame.results.values[i]);
    places[i] = {result.data, {result.dims, result.dims + result.rank}};
    NamedCall& call = group[i];
    const std::string_view name = next_name(names);
    call.name = name.data();
    call.name_bytes = name.size();
    call.kind = static_cast<NamedKind>(asked.kind);
    if (!dtype_of(operand.dtype, call.dtype)) {
      return std::string(name) + ": elements of XLA's type " + std::to_string(static_cast<int>(operand.dtype)) +
             " cannot travel -- convert them to one that NumPy has";
    }
    call.op = static_cast<ReduceOp>(asked.op);
    call.root = static_cast<std::int32_t>(asked.root);
    call.prescale = asked.prescale;
    call.postscale = asked.postscale;
    call.needs_all_ranks = call.kind == NamedKind::AllGather || call.kind == NamedKind::Broadcast;
    call.shape = operand.dims;
    call.dimensions = static_cast<std::size_t>(operand.rank);
    call.input = operand.data;
    call.output = result.data;
  }
  return {};
}

void* Running::place(std::size_t i, const std::int64_t* shape, std::size_t dimensions) {
  const Place& wanted = places[i];
  const bool fits = std::equal(shape, shape + dimensions, wanted.shape.begin(), wanted.shape.end());
  auto bytes = static_cast<std::int64_t>(size_of(group[i].dtype));
  for (std::size_t d = 0; d < dimensions; ++d) bytes *= shape[d];
  // An empty result gets no memory from XLA, but needs an address.
  if (fits && bytes > 0) return wanted.data;
  unfit[i].reset(new (std::nothrow) std::byte[static_cast<std::size_t>(bytes) + 1]);
  if (!fits && problem.empty()) problem = std::string(name(i)) + ": the result has another shape than the program";
  return unfit[i].get();
}

void Running::check(const NamedReply& reply) {
  if (reply.failure != nullptr) {
    problem = reply.failure;
    code = code_of(reply.code);
    return;
  }
  const NamedKind kind = group.front().kind;
  if (kind != NamedKind::AllGather && kind != NamedKind::AllToAll) return;
  const std::size_t ranks = asked.row_count / group.size();
  for (std::size_t i = 0; i < group.size(); ++i) {
    const NamedMade& made = reply.made[i];
    const std::int64_t* const wanted = asked.rows + i * ranks;
    if (made.received_count == ranks && std::equal(wanted, wanted + ranks, made.received_splits)) continue;
    const auto list = [](const std::int64_t* rows, std::size_t count) {
      std::string text;
      for (std::size_t r = 0; r < count; ++r) text += (r > 0 ? ", " : "") + std::to_string(rows[r]);
      return "[" + text + "]";
    };
    problem = std::string(name(i)) + ": the ranks brought " + list(made.received_splits, made.received_count) +
              " rows, and this program was compiled for " + list(wanted, ranks) +
              " -- results have one shape under jit -- bring equal rows on all ranks, or call it outside of jit";
    code = Code::FailedPrecondition;
    return;
  }
}

void Running::complete() {
  if (problem.empty()) {
    xla::FutureSetAvailable made{{sizeof(xla::FutureSetAvailable), nullptr}, future};
    static_cast<void>(api->future_set_available(&made));
  } else {
    xla::FutureSetError made{{sizeof(xla::FutureSetError), nullptr}, future, error_of(*api, code, problem)};
    static_cast<void>(api->future_set_error(&made));
  }
}

xla::Error* execute(xla::CallFrame& frame) {
  const xla::Api& api = *frame.api;
  auto running = std::make_unique<Running>();
  running->api = &api;
  const std::string problem = running->fill(frame);
  if (!problem.empty()) return error_of(api, Code::InvalidArgument, "cohort: " + problem);
  if (running->group.empty()) return nullptr;

  NamedGroup group;
  group.engine = static_cast<std::uint64_t>(running->asked.engine);
  group.calls = running->group.data();
  group.count = running->group.size();
  group.patience_ns = kPatience;
  group.context = running.get();
  group.allocate = [](void* context, std::size_t i, const std::int64_t* shape, std::size_t dimensions) {
    return static_cast<Running*>(context)->place(i, shape, dimensions);
  };
  group.done = [](void* context, const NamedReply& reply) {
    auto* const one = static_cast<Running*>(context);
    one->check(reply);
    if (one->first.exchange(false)) return;  // the caller has not made the future yet
    one->complete();
    delete one;
  };
  calls->submit(group);
  if (running->first.load()) {
    xla::FutureCreate made{{sizeof(xla::FutureCreate), nullptr}, nullptr};
    // Without a future, all it can do is wait until the operation is done.
    if (xla::Error* const failed = api.future_create(&made)) {
      while (running->first.load()) std::this_thread::yield();
      return failed;
    }
    running->future = frame.future = made.future;
    if (running->first.exchange(false)) {
      static_cast<void>(running.release());
      return nullptr;
    }
    running->complete();  // it was done meanwhile
    return nullptr;
  }
  return running->problem.empty() ? nullptr : error_of(api, running->code, running->problem);
}

/// Answers XLA's query, when the handler is registered, for the version of the interface. For a version unknown here,
/// the answer makes XLA refuse the handler.
void answer(const xla::Api& api, xla::Metadata& metadata) {
  const xla::Version& theirs = api.version;
  const bool known =
      theirs.major == xla::kMajor && theirs.minor >= xla::kLeastMinor && api.head.size >= sizeof(xla::Api);
  metadata.version.major = xla::kMajor;
  metadata.version.minor = known ? std::min(theirs.minor, xla::kMostMinor) : xla::kMostMinor;
  metadata.traits = 0;
}

xla::Metadata* metadata_of(const xla::CallFrame& frame) {
  for (xla::Extension* one = frame.head.extensions; one != nullptr; one = one->next) {
    if (one->type == xla::kMetadata) return reinterpret_cast<xla::MetadataExtension*>(one)->metadata;
  }
  return nullptr;
}

}  // namespace
}  // namespace cohort::python

extern "C" {

/// Uses the table of `_core.named_calls()`. Returns null, or the reason why it cannot be used.
__attribute__((visibility("default"))) const char* cohort_jax_use(const void* table) {
  using namespace cohort::python;
  const auto* const given = static_cast<const NamedCalls*>(table);
  if (const char* const problem = given->problem()) return problem;
  calls = given;
  return nullptr;
}

/// The handler for XLA's stage "execute".
__attribute__((visibility("default"))) cohort::xla::Error* cohort_jax_call(cohort::xla::CallFrame* frame) {
  using namespace cohort::python;
  if (cohort::xla::Metadata* const metadata = metadata_of(*frame)) {
    answer(*frame->api, *metadata);
    return nullptr;
  }
  try {
    return execute(*frame);
  } catch (const std::exception& error) {
    return error_of(*frame->api, Code::Internal, error.what());
  }
}

}  // extern "C"
