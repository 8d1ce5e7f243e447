#include "horovod/named/request.h"

#include "base/log.h"
#include "comm/api/work_state.h"
#include "horovod/named/rounds.h"
#include "telemetry/status_page.h"
#include "telemetry/timeline.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace cohort::named {
namespace {

bool reduces(Kind kind) noexcept { return kind == Kind::AllReduce || kind == Kind::ReduceScatter; }

template <class... Args>
tl::unexpected<Error> refuse(const Request& request, fmt::format_string<Args...> format, Args&&... args) {
  return fail(ErrorCode::InvalidArgument, "{} '{}': {}", name_of(request.kind), request.name,
              fmt::format(format, std::forward<Args>(args)...));
}

/// Returns the product of the dimensions, or -1 if one is negative or the product overflows.
std::int64_t product(std::span<const std::int64_t> shape) noexcept {
  std::int64_t result = 1;
  for (const std::int64_t dimension : shape) {
    if (dimension < 0 || __builtin_mul_overflow(result, dimension, &result)) return -1;
  }
  return result;
}

/// Returns what is wrong with the buffer, or an empty text. The communicator would refuse it later, on only this rank.
std::string fault_of(const ConstBuffer& buffer) {
  const std::size_t size = size_of(buffer.dtype);
  const std::size_t alignment = is_complex(buffer.dtype) ? size / 2 : size;
  if (buffer.device.type != DeviceType::CPU && buffer.device.type != DeviceType::CUDA) {
    return "is on a device that is not supported";
  }
  if (buffer.count > std::numeric_limits<std::int64_t>::max() / 16) return "has more elements than any memory";
  if (buffer.count > 0 && buffer.data == nullptr) return "is a null pointer";
  if (reinterpret_cast<std::uintptr_t>(buffer.data) % alignment != 0) {
    return fmt::format("is not aligned to {} bytes, as {} has to be", alignment, cohort::to_string(buffer.dtype));
  }
  return "";
}

bool on_one_device(const Device& a, const Device& b) noexcept {
  return a.type == b.type && (a.type == DeviceType::CPU || a.index == b.index);
}

bool overlap_in_part(const ConstBuffer& a, const ConstBuffer& b) noexcept {
  if (a.data == b.data || a.count == 0 || b.count == 0) return false;
  const auto at = reinterpret_cast<std::uintptr_t>(a.data);
  const auto other = reinterpret_cast<std::uintptr_t>(b.data);
  return at < other + b.bytes() && other < at + a.bytes();
}

Result<void> check_buffers(const Request& request, const Signature& signature) {
  if (request.kind == Kind::Barrier || request.kind == Kind::Join || request.kind == Kind::Group) return {};
  const std::int64_t count = product(request.shape);
  if (count < 0 || request.shape.size() > kMostDimensions) return refuse(request, "the shape has no meaning");
  if (static_cast<std::uint8_t>(signature.dtype) >= kDTypeCount) return refuse(request, "the dtype is none");
  const bool in_output = request.kind == Kind::Broadcast;
  const bool has_input = !in_output || request.input.data != nullptr;
  const bool has_output = in_output || request.kind == Kind::AllReduce;
  if (has_input) {
    if (request.input.count != count || request.input.dtype != signature.dtype) {
      return refuse(request, "the input is {}[{}], the shape {}[{}]", cohort::to_string(request.input.dtype),
                    request.input.count, cohort::to_string(signature.dtype), fmt::join(request.shape, ", "));
    }
    if (const auto fault = fault_of(request.input); !fault.empty()) return refuse(request, "the input {}", fault);
  }
  if (has_output) {
    if (request.output.count != count || request.output.dtype != signature.dtype) {
      return refuse(request, "the output is {}[{}], the shape {}[{}]", cohort::to_string(request.output.dtype),
                    request.output.count, cohort::to_string(signature.dtype), fmt::join(request.shape, ", "));
    }
    if (const auto fault = fault_of(request.output); !fault.empty()) return refuse(request, "the output {}", fault);
    if (has_input && !on_one_device(request.input.device, request.output.device)) {
      return refuse(request, "input and output are on different devices");
    }
    if (has_input && overlap_in_part(request.input, request.output)) {
      return refuse(request, "input and output overlap in part");
    }
  }
  return {};
}

}  // namespace

std::string_view name_of(Kind kind) noexcept {
  switch (kind) {
    case Kind::AllReduce: return "all_reduce";
    case Kind::AllGather: return "all_gather";
    case Kind::Broadcast: return "broadcast";
    case Kind::ReduceScatter: return "reduce_scatter";
    case Kind::AllToAll: return "all_to_all";
    case Kind::Barrier: return "barrier";
    case Kind::Join: return "join";
    case Kind::Group: return "form_group";
  }
  return "?";
}

std::int64_t Signature::count() const noexcept { return product(shape); }

std::string to_string(const Signature& s) {
  if (s.kind == Kind::Barrier || s.kind == Kind::Join) return std::string(name_of(s.kind));
  if (s.kind == Kind::Group) return fmt::format("form_group([{}])", fmt::join(s.splits, ", "));
  std::string text = fmt::format("{}({}[{}]", name_of(s.kind), cohort::to_string(s.dtype), fmt::join(s.shape, ", "));
  if (reduces(s.kind)) text += fmt::format(", {}", cohort::to_string(s.op));
  if (s.kind == Kind::Broadcast) text += fmt::format(", from rank {}", s.root);
  if (s.prescale != 1) text += fmt::format(", prescale {}", s.prescale);
  if (s.postscale != 1) text += fmt::format(", postscale {}", s.postscale);
  if (s.wire_format != WireFormat::None) text += fmt::format(", as {}", cohort::to_string(s.wire_format));
  if (s.needs_all_ranks) text += ", of all ranks";
  return text + ")";
}

Device device_of(const Request& request) noexcept {
  switch (request.kind) {
    case Kind::Barrier:
    case Kind::Join:
    case Kind::Group: return {};
    case Kind::Broadcast: return request.output.device;
    default: return request.input.device;
  }
}

Result<Signature> signature_of(const Request& request, int size) {
  if (request.name.empty() || request.name.size() > kLongestName) {
    return fail(ErrorCode::InvalidArgument, "{}: a name of {} bytes (from 1 to {})", name_of(request.kind),
                request.name.size(), kLongestName);
  }
  Signature own;
  own.kind = request.kind;
  if (request.kind == Kind::Join) return refuse(request, "call Engine::join");
  if (request.kind == Kind::Barrier) return own;
  if (request.kind == Kind::Group) {
    for (const std::int64_t rank : request.splits) {
      if (rank < 0 || rank >= size) return refuse(request, "rank {} is not among {} ranks", rank, size);
    }
    own.splits = request.splits;
    return own;
  }
  own.dtype = request.kind == Kind::Broadcast ? request.output.dtype : request.input.dtype;
  own.shape = request.shape;
  own.device = device_of(request).type;
  if (auto checked = check_buffers(request, own); !checked) return tl::unexpected(checked.error());
  if (reduces(request.kind)) {
    own.op = request.op;
    own.prescale = request.prescale;
    own.postscale = request.postscale;
    if (!supports(own.dtype, own.op)) {
      return refuse(request, "{} of {} does not exist", cohort::to_string(own.op), cohort::to_string(own.dtype));
    }
    if (!std::isfinite(own.prescale) || !std::isfinite(own.postscale)) return refuse(request, "a scale is not finite");
    const bool of_bits = own.dtype == DType::Bool || !supports(DType::Float32, own.op);
    if ((own.prescale != 1 || own.postscale != 1) && of_bits) {
      return refuse(request, "scales go with numbers, not with {} of {}", cohort::to_string(own.op),
                    cohort::to_string(own.dtype));
    }
  }
  if (request.wire_format != WireFormat::None) {
    const bool sums = request.op == ReduceOp::Sum || request.op == ReduceOp::Average;
    if (!reduces(request.kind) || own.dtype != DType::Float32 || !sums) {
      return refuse(request, "sums and averages of float32 alone travel as {}", cohort::to_string(request.wire_format));
    }
    own.wire_format = request.wire_format;
  }
  if (request.kind == Kind::Broadcast) {
    if (request.root < 0 || request.root >= size)
      return refuse(request, "the root is {} among {} ranks", request.root, size);
    own.root = request.root;
  }
  own.needs_all_ranks = request.needs_all_ranks && (request.kind == Kind::AllGather || request.kind == Kind::Broadcast);
  const bool by_rows =
      request.kind == Kind::AllGather || request.kind == Kind::ReduceScatter || request.kind == Kind::AllToAll;
  if (by_rows && own.shape.empty()) return refuse(request, "a scalar has no dimension 0");
  if (by_rows && product(std::span(own.shape).subspan(1)) < 0) return refuse(request, "the shape has no meaning");
  if (request.kind == Kind::AllToAll) {
    own.splits = request.splits;
    if (own.splits.empty()) {
      if (own.shape[0] % size != 0) {
        return refuse(request, "{} rows do not divide by {} ranks -- give splits", own.shape[0], size);
      }
      own.splits.assign(static_cast<std::size_t>(size), own.shape[0] / size);
    }
    std::int64_t rows = 0;
    for (const std::int64_t split : own.splits) {
      if (split < 0 || __builtin_add_overflow(rows, split, &rows)) return refuse(request, "a split of {}", split);
    }
    if (own.splits.size() != static_cast<std::size_t>(size) || rows != own.shape[0]) {
      return refuse(request, "{} splits for {} ranks, of {} rows where there are {}", own.splits.size(), size, rows,
                    own.shape[0]);
    }
  }
  return own;
}

namespace {

/// Scope in which a program's thread waits. The engine does not linger; the agent's status page names the operation.
class Waiting {
 public:
  Waiting(Wakeup& engine, const std::string& name) : engine_(engine) {
    engine_.urge();
    status::StatusPage::own().begin_wait(name);
  }
  ~Waiting() {
    status::StatusPage::own().end_wait();
    engine_.relax();
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  Wakeup& engine_;
  const comm::times::Exposed exposed_;
};

}  // namespace

State::State(std::shared_ptr<Wakeup> engine, std::string name)
    : process_(::getpid()),
      asked_at_(status::timeline::on() ? std::chrono::steady_clock::now() : decltype(agreed_at){}),
      engine_(std::move(engine)),
      name_(std::move(name)) {}

State::~State() {
  const std::optional<Error>& error = outcome();
  if (!error || error->code() == ErrorCode::Aborted || reported || !at_home()) return;
  log::warn("named", "an operation failed and nobody waited for it: {}", error->what());
}

bool State::at_home() const noexcept { return process_ == ::getpid(); }

void State::wait() {
  if (done()) return;
  const Waiting waiting(*engine_, name_);
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return done(); });
}

bool State::wait_for(std::chrono::nanoseconds limit) {
  if (done()) return true;
  const Waiting waiting(*engine_, name_);
  // A longer wait would overflow the clock.
  constexpr std::chrono::nanoseconds kLongest = std::chrono::hours(24 * 365);
  std::unique_lock lock(mutex_);
  return ended_.wait_for(lock, std::min(limit, kLongest), [&] { return done(); });
}

void State::on_done(std::function<void()> callback) {
  if (done()) return callback();
  engine_->urge();  // until `end`
  if (!add_callback(mutex_, std::move(callback))) engine_->relax();
}

void State::tell_timeline() const noexcept {
  using status::timeline::Event;
  if (!status::timeline::on()) return;
  Event event;
  event.kind = status::TimelineKind::Named;
  event.name = name_;
  event.begun = asked_at_;
  event.ended = ended_at;
  event.waited = (agreed_at == decltype(agreed_at){} ? ended_at : agreed_at) - asked_at_;
  status::timeline::add(event);
}

void State::end(std::optional<Error> error) {
  std::vector<std::function<void()>> callbacks;
  {
    const std::lock_guard lock(mutex_);
    if (done()) return;
    set_outcome(std::move(error));
    ended_at = std::chrono::steady_clock::now();
    set_done();
    status::StatusPage::own().count_named();
    tell_timeline();
    callbacks = take_callbacks();
    ended_.notify_all();
  }
  for (const auto& callback : callbacks) {
    engine_->relax();
    callback();
  }
}

}  // namespace cohort::named
