// Execution of operations that all ranks have requested. All ranks run them in the same order and with the same fusion;
// a rank that has joined contributes neutral elements and throws results away.

#include "train/named/execution.h"

#include "train/named/engine_core.h"

#include <fmt/format.h>

#include <algorithm>
#include <complex>
#include <cstdint>
#include <limits>
#include <new>
#include <numeric>
#include <type_traits>
#include <utility>

namespace cohort::named {
namespace {

/// Calls `body` with a value of the buffer's integer type.
template <class Body>
void as_integers(const Buffer& data, const Body& body) {
  switch (data.dtype) {
    case DType::Int8: return body(std::int8_t{});
    case DType::Int16: return body(std::int16_t{});
    case DType::Int32: return body(std::int32_t{});
    case DType::Int64: return body(std::int64_t{});
    case DType::UInt8: return body(std::uint8_t{});
    case DType::UInt16: return body(std::uint16_t{});
    case DType::UInt32: return body(std::uint32_t{});
    case DType::UInt64: return body(std::uint64_t{});
    default: return;
  }
}

/// Rounds toward zero, and clamps to the range of T: converting a value outside the range is undefined in C++.
template <class T>
T to_integer(double value) noexcept {
  // As a double, the highest value may be rounded up by one, which is out of range and clamped as well.
  if (value >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  if (value <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  return static_cast<T>(value);
}

}  // namespace

bool by_hand(const Signature& common, bool skips_ranks) noexcept {
  if (is_scalable(common.dtype)) return false;
  return common.prescale != 1 || common.postscale != 1 || (common.op == ReduceOp::Average && skips_ranks);
}

void divide(Buffer data, std::int64_t divisor) {
  as_integers(data, [&](auto kind) {
    using T = decltype(kind);
    using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
    T* const values = static_cast<T*>(data.data);
    for (std::int64_t i = 0; i < data.count; ++i) {
      values[i] = static_cast<T>(static_cast<Wide>(values[i]) / static_cast<Wide>(divisor));
    }
  });
}

void scale(Buffer data, double factor, std::int64_t divisor) {
  if (factor == 1) {
    if (divisor != 1) divide(data, divisor);
    return;
  }
  as_integers(data, [&](auto kind) {
    using T = decltype(kind);
    T* const values = static_cast<T*>(data.data);
    const auto parts = static_cast<double>(divisor);
    // Divides rather than multiplying by a reciprocal, so that a sum that is divisible gives the exact quotient.
    for (std::int64_t i = 0; i < data.count; ++i) {
      values[i] = to_integer<T>(static_cast<double>(values[i]) * factor / parts);
    }
  });
}

namespace {

template <class T>
void fill(Buffer to, T value) {
  std::fill_n(static_cast<T*>(to.data), to.count, value);
}

/// Bit patterns of 16-bit floats.
struct HalfBits {
  std::uint16_t one, infinity;  // the highest bit is the sign
};

void fill_half(Buffer to, ReduceOp op, bool flipped, const HalfBits& bits) {
  constexpr unsigned kSign = 0x8000;
  const unsigned sign = flipped ? kSign : 0;
  switch (op) {
    case ReduceOp::Product: return fill(to, bits.one);
    case ReduceOp::Min: return fill(to, static_cast<std::uint16_t>(bits.infinity ^ sign));
    case ReduceOp::Max: return fill(to, static_cast<std::uint16_t>(bits.infinity ^ kSign ^ sign));
    default: return fill(to, static_cast<std::uint16_t>(kSign ^ sign));
  }
}

template <class T>
void fill_float(Buffer to, ReduceOp op, bool flipped) {
  const T sign = flipped ? T{-1} : T{1};
  switch (op) {
    case ReduceOp::Product: return fill(to, T{1});
    case ReduceOp::Min: return fill(to, sign * std::numeric_limits<T>::infinity());
    case ReduceOp::Max: return fill(to, -sign * std::numeric_limits<T>::infinity());
    default: return fill(to, -sign * T{0});
  }
}

template <class T>
void fill_complex(Buffer to, ReduceOp op, bool flipped) {
  // The product with (1, 0) is (a - 0 b, 0 a + b): exact for finite numbers but for the sign of zeros.
  const T zero = flipped ? T{0} : -T{0};
  fill(to, op == ReduceOp::Product ? std::complex<T>(1, 0) : std::complex<T>(zero, zero));
}

template <class T>
void fill_integer(Buffer to, ReduceOp op) {
  switch (op) {
    case ReduceOp::Product: return fill(to, T{1});
    case ReduceOp::Min: return fill(to, std::numeric_limits<T>::max());
    case ReduceOp::Max: return fill(to, std::numeric_limits<T>::min());
    case ReduceOp::BitAnd: return fill(to, static_cast<T>(~T{0}));
    default: return fill(to, T{0});
  }
}

void fill_bool(Buffer to, ReduceOp op) {
  const bool conjunction = op == ReduceOp::Product || op == ReduceOp::Min || op == ReduceOp::BitAnd;
  fill(to, static_cast<std::uint8_t>(conjunction ? 1 : 0));
}

}  // namespace

void fill_neutral(Buffer to, ReduceOp op, double prescale) {
  const bool flipped = prescale < 0;
  if (to.count == 0) return;
  switch (to.dtype) {
    case DType::Float32: return fill_float<float>(to, op, flipped);
    case DType::Float64: return fill_float<double>(to, op, flipped);
    case DType::Float16: return fill_half(to, op, flipped, {0x3C00, 0x7C00});
    case DType::BFloat16: return fill_half(to, op, flipped, {0x3F80, 0x7F80});
    case DType::Int8: return fill_integer<std::int8_t>(to, op);
    case DType::Int16: return fill_integer<std::int16_t>(to, op);
    case DType::Int32: return fill_integer<std::int32_t>(to, op);
    case DType::Int64: return fill_integer<std::int64_t>(to, op);
    case DType::UInt8: return fill_integer<std::uint8_t>(to, op);
    case DType::UInt16: return fill_integer<std::uint16_t>(to, op);
    case DType::UInt32: return fill_integer<std::uint32_t>(to, op);
    case DType::UInt64: return fill_integer<std::uint64_t>(to, op);
    case DType::Bool: return fill_bool(to, op);
    case DType::Complex64: return fill_complex<float>(to, op, flipped);
    case DType::Complex128: return fill_complex<double>(to, op, flipped);
  }
}

namespace {

std::size_t bytes_of(const Signature& signature) noexcept {
  return static_cast<std::size_t>(signature.count()) * size_of(signature.dtype);
}

std::int64_t sum_of(std::span<const std::int64_t> counts) noexcept {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

std::vector<std::int64_t> times(std::span<const std::int64_t> rows, std::int64_t elements) {
  std::vector<std::int64_t> counts(rows.begin(), rows.end());
  for (std::int64_t& count : counts) count *= elements;
  return counts;
}

bool any(const std::vector<bool>& ranks) { return std::find(ranks.begin(), ranks.end(), true) != ranks.end(); }

template <class Options>
Options reduction_of(const Signature& common, bool manual) {
  Options options;
  options.op = manual && common.op == ReduceOp::Average ? ReduceOp::Sum : common.op;
  options.prescale = manual ? 1 : common.prescale;
  options.postscale = manual ? 1 : common.postscale;
  return options;
}

}  // namespace

void EngineCore::execute(std::vector<Ready> ready) {
  std::vector<Ready> wanted;
  const auto now = Clock::now();
  for (Ready& one : ready) {
    if (one.own) one.own->state->agreed_at = now;
    if (auto refused = refused_by_joined(*one.agreed, one.lacking)) {
      if (one.own) finish(std::span(&one.own, 1), refused);
      continue;
    }
    wanted.push_back(std::move(one));
  }
  // If averages skip ranks, the skipped ranks may differ between operations, so each such operation runs alone.
  std::vector<Ready> together;
  std::vector<Ready> alone;
  for (Ready& one : wanted) {
    const bool skips = options_.joined_average == JoinedAverage::ActiveRanks && any(one.lacking);
    (skips ? alone : together).push_back(std::move(one));
  }
  std::vector<AgreedPtr> operations;
  operations.reserve(together.size());
  for (const Ready& one : together) operations.push_back(one.agreed);
  std::vector<Ready> batch;
  for (const Batch& indices : plan_fusion(operations, options_.fusion_threshold)) {
    batch.clear();
    for (const std::size_t index : indices) batch.push_back(std::move(together[index]));
    run_batch(batch);
  }
  for (const Ready& one : alone) run_batch(std::span(&one, 1));
}

void EngineCore::run_batch(std::span<const Ready> batch) {
  std::optional<Error> failed;
  try {
    if (batch.front().agreed->common.device == DeviceType::CPU) {
      carry_out(batch);
    } else {
      run_on_gpu(batch);
    }
  } catch (const Error& error) {
    // These errors occur on all ranks alike. Any other error ends the engine, since the other ranks wait for this one.
    const bool bad_list =
        error.code() == ErrorCode::InvalidArgument && batch.front().agreed->common.kind == Kind::Group;
    if (error.code() != ErrorCode::Mismatch && !bad_list) throw;
    failed = error;
  }
  scratch_.clear();
  if (batch.front().agreed->common.kind != Kind::Barrier) batches_.fetch_add(1, std::memory_order_relaxed);
  std::vector<PendingPtr> done;
  done.reserve(batch.size());
  for (const Ready& one : batch) done.push_back(one.own);
  finish(done, failed);
}

void EngineCore::carry_out(std::span<const Ready> batch) {
  switch (batch.front().agreed->common.kind) {
    case Kind::AllReduce: return run_reductions(batch);
    case Kind::Broadcast: return run_broadcasts(batch);
    case Kind::AllGather: return run_all_gather(batch.front());
    case Kind::ReduceScatter: return run_reduce_scatter(batch.front());
    case Kind::AllToAll: return run_all_to_all(batch.front());
    case Kind::Group: return run_group(batch.front());
    case Kind::Barrier:
    case Kind::Join: return;  // nothing to do: all ranks have arrived
  }
}

/// Returns host memory, until the end of the batch, for ranks that have no memory for a result.
std::byte* EngineCore::scratch(std::size_t bytes) {
  return scratch_.emplace_back(std::max<std::size_t>(bytes, 1)).data();
}

/// Returns the buffer for this rank's result.
Buffer EngineCore::place(const Ready& one, std::vector<std::int64_t> shape) {
  Signature result;
  result.dtype = one.agreed->common.dtype;
  result.shape = std::move(shape);
  const std::int64_t count = result.count();
  if (count < 0) raise(ErrorCode::Unavailable, "'{}': the result has too many elements", one.agreed->name);
  const std::size_t bytes = bytes_of(result);
  if (!one.own) return {scratch(bytes), count, result.dtype};
  Outcome& outcome = one.own->state->result;
  outcome.dtype = result.dtype;
  const Device device = one.own->request.input.device;
  try {
    if (one.own->request.allocate) {
      outcome.data = one.own->request.allocate(result.shape);
      if (outcome.data == nullptr && count > 0) throw std::bad_alloc();
      if (device.type != DeviceType::CPU) follow_caller(*one.own);
    } else if (device.type != DeviceType::CPU) {
      const auto memory = std::make_shared<Memory>(comm_.allocate(bytes, device));
      outcome.data = memory->data();
      outcome.owner = memory;
    } else {
      // Aligned to cache lines, as array libraries prefer.
      constexpr std::align_val_t kAlignment{64};
      outcome.data = ::operator new(std::max<std::size_t>(bytes, 1), kAlignment);
      outcome.owner = std::shared_ptr<void>(outcome.data, [](void* data) { ::operator delete(data, kAlignment); });
    }
  } catch (const std::exception& error) {
    // The other ranks are about to carry the operation out, and cannot continue without this rank.
    raise(ErrorCode::Unavailable, "{} '{}' failed -- rank {} -- no memory for a result of {} bytes: {}",
          name_of(one.agreed->common.kind), one.agreed->name, rank_, bytes, error.what());
  } catch (...) {
    raise(ErrorCode::Unavailable, "{} '{}' failed -- rank {} -- no memory for a result of {} bytes",
          name_of(one.agreed->common.kind), one.agreed->name, rank_, bytes);
  }
  outcome.shape = std::move(result.shape);
  return {outcome.data, count, result.dtype, device};
}

void EngineCore::run_reductions(std::span<const Ready> batch) {
  const Signature& common = batch.front().agreed->common;
  const std::vector<bool>& lacking = batch.front().lacking;
  const bool average = common.op == ReduceOp::Average;
  const bool skips = average && options_.joined_average == JoinedAverage::ActiveRanks && any(lacking);
  const bool manual = by_hand(common, skips);
  auto options = reduction_of<AllReduceOptions>(common, manual);
  options.wire_format = common.wire_format;
  options.timeout = operation_timeout();
  if (skips && !manual) options.weight = lacking[static_cast<std::size_t>(rank_)] ? 0.0 : 1.0;
  std::vector<Buffer> buffers;
  buffers.reserve(batch.size());
  for (const Ready& one : batch) {
    const Signature& wanted = one.agreed->common;
    if (one.own) {
      buffers.push_back(one.own->request.output);
    } else {
      buffers.emplace_back(scratch(bytes_of(wanted)), wanted.count(), wanted.dtype);
      fill_neutral(buffers.back(), options.op, wanted.prescale);
    }
  }
  const bool alone = batch.size() == 1;
  if (alone && batch.front().own && !manual) {
    comm_.all_reduce(batch.front().own->request.input, buffers.front(), options).wait();
  } else if (alone && !manual) {
    comm_.all_reduce(buffers.front(), options).wait();
  } else {
    for (std::size_t i = 0; i < batch.size(); ++i) {
      if (batch[i].own) copy_over(batch[i].own->request.input, buffers[i]);
      if (batch[i].own && manual) scale(buffers[i], common.prescale);
    }
    comm_.all_reduce(buffers, options).wait();
  }
  if (!manual) return;
  const std::int64_t ranks = skips ? std::count(lacking.begin(), lacking.end(), false) : size_;
  for (const Buffer& one : buffers) scale(one, common.postscale, average ? ranks : 1);
}

void EngineCore::run_broadcasts(std::span<const Ready> batch) {
  const Signature& common = batch.front().agreed->common;
  BroadcastOptions options;
  options.root = common.root;
  options.timeout = operation_timeout();
  std::vector<Buffer> buffers;
  buffers.reserve(batch.size());
  for (const Ready& one : batch) {
    const Signature& wanted = one.agreed->common;
    if (!one.own) {
      buffers.emplace_back(scratch(bytes_of(wanted)), wanted.count(), wanted.dtype);
      continue;
    }
    buffers.push_back(one.own->request.output);
    if (rank_ == common.root) copy_over(one.own->request.input, buffers.back());
  }
  comm_.broadcast(buffers, options).wait();
}

void EngineCore::run_all_gather(const Ready& one) {
  const Agreed& agreed = *one.agreed;
  const std::int64_t elements = agreed.row_elements();
  std::vector<std::int64_t> rows = agreed.rows;
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    if (one.lacking[rank]) rows[rank] = 0;
  }
  std::vector<std::int64_t> shape = agreed.common.shape;
  shape[0] = sum_of(rows);
  const Buffer output = place(one, std::move(shape));
  if (one.own) one.own->state->result.received_splits = rows;
  if (output.count == 0) return;  // empty on all ranks
  const ConstBuffer input = one.own ? one.own->request.input : ConstBuffer(nullptr, 0, output.dtype);
  AllGatherOptions options;
  options.timeout = operation_timeout();
  comm_.all_gather_v(input, output, times(rows, elements), options).wait();
}

// No rank lacks reduce_scatter or all_to_all.
void EngineCore::run_reduce_scatter(const Ready& one) {
  const Signature& common = one.agreed->common;
  const std::vector<std::int64_t> rows = scattered_rows(common.shape[0], size_);
  std::vector<std::int64_t> shape = common.shape;
  shape[0] = rows[static_cast<std::size_t>(rank_)];
  const Buffer output = place(one, std::move(shape));
  if (common.count() == 0) return;
  const bool manual = by_hand(common, false);
  auto options = reduction_of<ReduceScatterOptions>(common, manual);
  options.wire_format = common.wire_format;
  options.timeout = operation_timeout();
  ConstBuffer input = one.own->request.input;
  if (manual && common.prescale != 1) {
    const Buffer scaled{scratch(bytes_of(common)), input.count, input.dtype};
    copy_over(input, scaled);
    scale(scaled, common.prescale);
    input = scaled;
  }
  comm_.reduce_scatter_v(input, output, times(rows, one.agreed->row_elements()), options).wait();
  if (manual) scale(output, common.postscale, common.op == ReduceOp::Average ? size_ : 1);
}

void EngineCore::run_all_to_all(const Ready& one) {
  const Agreed& agreed = *one.agreed;
  const auto own = static_cast<std::size_t>(rank_);
  std::vector<std::int64_t> received;
  for (const auto& splits : agreed.splits) received.push_back(splits[own]);
  std::vector<std::int64_t> shape = agreed.common.shape;
  shape[0] = sum_of(received);
  const Buffer output = place(one, std::move(shape));
  const std::int64_t elements = agreed.row_elements();
  AllToAllOptions options;
  options.timeout = operation_timeout();
  comm_
      .all_to_all_v(one.own->request.input, times(agreed.splits[own], elements), output, times(received, elements),
                    options)
      .wait();
  one.own->state->result.received_splits = std::move(received);
}

void EngineCore::run_group(const Ready& one) {
  std::vector<int> ranks;
  for (const std::int64_t rank : one.agreed->common.splits) ranks.push_back(static_cast<int>(rank));
  GroupOptions options;
  options.timeout = operation_timeout();
  one.own->state->result.group = comm_.group(ranks, options);
}

}  // namespace cohort::named
