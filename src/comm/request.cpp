#include "comm/request.h"

namespace cohort::comm {

std::string_view name_of(Kind kind) noexcept {
  switch (kind) {
    case Kind::None: return "none";
    case Kind::AllReduce: return "all_reduce";
    case Kind::Reduce: return "reduce";
    case Kind::ReduceScatter: return "reduce_scatter";
    case Kind::ReduceScatterV: return "reduce_scatter_v";
    case Kind::Broadcast: return "broadcast";
    case Kind::AllGather: return "all_gather";
    case Kind::AllGatherV: return "all_gather_v";
    case Kind::Gather: return "gather";
    case Kind::GatherV: return "gather_v";
    case Kind::Scatter: return "scatter";
    case Kind::ScatterV: return "scatter_v";
    case Kind::AllToAll: return "all_to_all";
    case Kind::AllToAllV: return "all_to_all_v";
    case Kind::Barrier: return "barrier";
    case Kind::Split: return "split";
    case Kind::Joined: return "join";
    case Kind::Send: return "send";
    case Kind::Recv: return "recv";
  }
  return "unknown";
}

}  // namespace cohort::comm
