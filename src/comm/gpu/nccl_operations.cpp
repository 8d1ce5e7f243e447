#include "comm/gpu/nccl_plane.h"

#include <optional>
#include <vector>

namespace cohort::comm::cuda {
namespace {

constexpr int kScalarOfHost = 1;  // ncclScalarHostImmediate

/// NCCL's type for an element, and how many such values make one element (two for complex numbers).
struct Element {
  NcclType type;
  std::size_t count;
};

std::optional<Element> element_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::Float32: return Element{NcclType::Float32, 1};
    case DType::Float64: return Element{NcclType::Float64, 1};
    case DType::Float16: return Element{NcclType::Float16, 1};
    case DType::BFloat16: return Element{NcclType::BFloat16, 1};
    case DType::Int8: return Element{NcclType::Int8, 1};
    case DType::Int32: return Element{NcclType::Int32, 1};
    case DType::Int64: return Element{NcclType::Int64, 1};
    case DType::UInt8: return Element{NcclType::UInt8, 1};
    case DType::UInt32: return Element{NcclType::UInt32, 1};
    case DType::UInt64: return Element{NcclType::UInt64, 1};
    case DType::Complex64: return Element{NcclType::Float32, 2};
    case DType::Complex128: return Element{NcclType::Float64, 2};
    case DType::Int16:
    case DType::UInt16:
    case DType::Bool: break;
  }
  return std::nullopt;
}

NcclOp op_of(ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::Average: return NcclOp::Average;
    case ReduceOp::Min: return NcclOp::Min;
    case ReduceOp::Max: return NcclOp::Max;
    case ReduceOp::Product: return NcclOp::Product;
    default: return NcclOp::Sum;
  }
}

/// Launches one request: passes buffers by offset in bytes, and keeps the first result that is not success.
class Launch {
 public:
  Launch(const NcclWorld& world, const Request& request)
      : world_(world),
        call_(world.nccl.call),
        request_(request),
        in_(static_cast<const std::byte*>(world.shares && world.shares->share == 0 ? request.output : request.input)),
        out_(static_cast<std::byte*>(request.output)) {}

  NcclResult run() {
    switch (request_.kind) {
      case Kind::AllReduce:
      case Kind::Reduce:
      case Kind::ReduceScatter:
      case Kind::ReduceScatterV: reduce(); break;
      case Kind::Broadcast: broadcast(out_, out_, request_.output_bytes(), request_.root); break;
      case Kind::AllGather:
        note(call_.ncclAllGather(in_, out_, request_.input_bytes(), NcclType::UInt8, world_.comm, world_.stream));
        break;
      case Kind::AllGatherV:
        for_parts([&](int rank, std::size_t at, std::size_t bytes) {
          broadcast(rank == world_.rank ? in_ : out_ + at, out_ + at, bytes, rank);
        });
        break;
      case Kind::Gather:
      case Kind::GatherV: gather(); break;
      case Kind::Scatter:
      case Kind::ScatterV: scatter(); break;
      default: exchange(); break;
    }
    return result_;
  }

 private:
  void note(NcclResult result) noexcept {
    if (result_ == NcclResult::Success) result_ = result;
  }
  /// Visits each rank's part, by offset and length in bytes.
  template <class Visit>
  void for_parts(const Visit& visit) {
    std::size_t at = 0;
    const bool gathers = request_.kind == Kind::Gather || request_.kind == Kind::AllGather;
    for (int rank = 0; rank < world_.size; ++rank) {
      const std::size_t bytes = request_.counts
                                    ? static_cast<std::size_t>(request_.counts->input[static_cast<std::size_t>(rank)]) *
                                          size_of(request_.dtype)
                                    : (gathers ? request_.input_bytes() : request_.output_bytes());
      if (bytes > 0) visit(rank, at, bytes);
      at += bytes;
    }
  }
  void send(const std::byte* from, std::size_t bytes, int peer) {
    if (bytes > 0) note(call_.ncclSend(from, bytes, NcclType::UInt8, peer, world_.comm, world_.stream));
  }
  void receive(std::byte* to, std::size_t bytes, int peer) {
    if (bytes > 0) note(call_.ncclRecv(to, bytes, NcclType::UInt8, peer, world_.comm, world_.stream));
  }
  void broadcast(const std::byte* from, std::byte* to, std::size_t bytes, int root) {
    note(call_.ncclBroadcast(from, to, bytes, NcclType::UInt8, root, world_.comm, world_.stream));
  }

  void reduce() {
    const Element element = element_of(request_.dtype).value_or(Element{NcclType::UInt8, 1});
    const NcclOp op = world_.shares ? world_.shares->of(element.type) : op_of(request_.op);
    const auto count =
        static_cast<std::size_t>(request_.kind == Kind::ReduceScatter ? request_.output_count : request_.input_count) *
        element.count;
    if (request_.kind == Kind::AllReduce) {
      note(call_.ncclAllReduce(in_, out_, count, element.type, op, world_.comm, world_.stream));
    } else if (request_.kind == Kind::ReduceScatter) {
      note(call_.ncclReduceScatter(in_, out_, count, element.type, op, world_.comm, world_.stream));
    } else if (request_.kind == Kind::Reduce) {
      note(call_.ncclReduce(in_, out_, count, element.type, op, request_.root, world_.comm, world_.stream));
    } else {
      for_parts([&](int rank, std::size_t at, std::size_t bytes) {
        const std::size_t part = bytes / size_of(request_.dtype) * element.count;
        note(call_.ncclReduce(in_ + at, rank == world_.rank ? out_ : nullptr, part, element.type, op, rank, world_.comm,
                              world_.stream));
      });
    }
  }

  void gather() {
    if (world_.rank != request_.root) return send(in_, request_.input_bytes(), request_.root);
    for_parts([&](int rank, std::size_t at, std::size_t bytes) {
      if (rank == world_.rank && in_ == out_ + at) return;
      if (rank == world_.rank) send(in_, bytes, rank);
      receive(out_ + at, bytes, rank);
    });
  }
  void scatter() {
    if (world_.rank != request_.root) return receive(out_, request_.output_bytes(), request_.root);
    for_parts([&](int rank, std::size_t at, std::size_t bytes) {
      if (rank == world_.rank && in_ + at == out_) return;
      send(in_ + at, bytes, rank);
      if (rank == world_.rank) receive(out_, bytes, rank);
    });
  }
  void exchange() {
    std::size_t in_at = 0;
    std::size_t out_at = 0;
    const std::size_t part = request_.input_bytes() / static_cast<std::size_t>(world_.size);
    for (int peer = 0; peer < world_.size; ++peer) {
      const auto index = static_cast<std::size_t>(peer);
      const auto bytes_of = [&](const std::vector<std::int64_t>& counts) {
        return static_cast<std::size_t>(counts[index]) * size_of(request_.dtype);
      };
      const std::size_t to = request_.counts ? bytes_of(request_.counts->input) : part;
      const std::size_t from = request_.counts ? bytes_of(request_.counts->output) : part;
      send(in_ + in_at, to, peer);
      receive(out_ + out_at, from, peer);
      in_at += to;
      out_at += from;
    }
  }

  const NcclWorld& world_;
  const NcclFunctions& call_;
  const Request& request_;
  const std::byte* const in_;
  std::byte* const out_;
  NcclResult result_ = NcclResult::Success;
};

}  // namespace

ShareSums::ShareSums(const Nccl& nccl, NcclComm comm, double share) noexcept
    : nccl_(nccl), comm_(comm), ops_{.share = share} {
  const auto make = [this](NcclOp& op, void* factor, NcclType type) {
    return nccl_.call.ncclRedOpCreatePreMulSum(&op, factor, type, kScalarOfHost, comm_);
  };
  auto single = static_cast<float>(share);
  result_ = make(ops_.single, &single, NcclType::Float32);
  if (result_ == NcclResult::Success) result_ = make(ops_.twice, &share, NcclType::Float64);
}

ShareSums::~ShareSums() {
  for (const NcclOp op : {ops_.single, ops_.twice}) {
    if (op != NcclOp::Sum) nccl_.call.ncclRedOpDestroy(op, comm_);
  }
}

bool has_sum(const Request& request) noexcept {
  if (!is_reduction(request.kind) || !element_of(request.dtype) || request.wire_format != WireFormat::None ||
      request.prescale != 1 || request.postscale != 1 || (request.weighted && request.kind != Kind::AllReduce)) {
    return false;
  }
  switch (request.op) {
    case ReduceOp::Sum: return true;
    case ReduceOp::Product: return !is_complex(request.dtype);
    case ReduceOp::Average: return is_scalable(request.dtype);
    case ReduceOp::Min:
    case ReduceOp::Max: return !is_scalable(request.dtype);
    default: return false;
  }
}

bool has_shares(DType dtype) noexcept {
  const std::optional<Element> element = element_of(dtype);
  return element && (element->type == NcclType::Float32 || element->type == NcclType::Float64);
}

bool has_move(Kind kind) noexcept { return kind >= Kind::Broadcast && kind <= Kind::AllToAllV; }

NcclResult launch(const NcclWorld& world, const Request& request) { return Launch(world, request).run(); }

NcclResult launch(const NcclWorld& world, const ExactStep& step) {
  const NcclFunctions& call = world.nccl.call;
  NcclResult result = NcclResult::Success;
  const auto note = [&](NcclResult next) {
    if (result == NcclResult::Success) result = next;
  };
  for (const ExactStep::Gather& one : step.gathers)
    note(call.ncclAllGather(one.from, one.to, one.bytes, NcclType::UInt8, world.comm, world.stream));
  for (const ExactStep::Message& one : step.sends)
    note(call.ncclSend(one.memory, one.bytes, NcclType::UInt8, one.peer, world.comm, world.stream));
  for (const ExactStep::Message& one : step.receives)
    note(call.ncclRecv(one.memory, one.bytes, NcclType::UInt8, one.peer, world.comm, world.stream));
  return result;
}

}  // namespace cohort::comm::cuda
