#include "comm/local/operation.h"

#include <fmt/format.h>

namespace cohort::comm::local {

std::string_view name_of(Kind kind) noexcept {
  switch (kind) {
    case Kind::None: return "none";
    case Kind::AllReduce: return "all_reduce";
    case Kind::ReduceScatter: return "reduce_scatter";
    case Kind::AllGather: return "all_gather";
    case Kind::Broadcast: return "broadcast";
    case Kind::Barrier: return "barrier";
    case Kind::Joined: return "join";
  }
  return "unknown";
}

std::string to_string(const Descriptor& d) {
  const std::string_view name = name_of(d.kind);
  const std::string_view type = cohort::to_string(d.dtype);
  switch (d.kind) {
    case Kind::AllReduce:
      return fmt::format("{}({}[{}], {}{})", name, type, d.count, cohort::to_string(d.op),
                         d.weighted ? ", weighted" : "");
    case Kind::ReduceScatter: return fmt::format("{}({}[{}], {})", name, type, d.count, cohort::to_string(d.op));
    case Kind::AllGather: return fmt::format("{}({}[{}])", name, type, d.count);
    case Kind::Broadcast: return fmt::format("{}({}[{}], root {})", name, type, d.count, d.root);
    default: return fmt::format("{}()", name);
  }
}

bool agree(const Descriptor& a, const Descriptor& b) noexcept {
  if (a.kind != b.kind) return false;
  if (a.kind == Kind::Barrier || a.kind == Kind::Joined) return true;
  return a.dtype == b.dtype && a.op == b.op && a.weighted == b.weighted && a.root == b.root && a.count == b.count;
}

}  // namespace cohort::comm::local
