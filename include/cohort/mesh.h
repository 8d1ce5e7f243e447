// The ranks of a communicator as a grid with named axes, and this rank's group along each axis, so that data, pipeline
// and tensor parallelism each have their own communicator. Handles; one thread at a time.
//
//   cohort::Mesh mesh(comm, {{"dp", 2}, {"pp", 2}, {"tp", 2}});                     // 8 ranks
//   cohort::nn::DistributedDataParallel model(net, mesh.along("dp"));
#pragma once

#include <cohort/communicator.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace cohort {

struct MeshAxis {
  std::string name;
  int size = 1;  ///< number of ranks along the axis, at least 1
};

class Mesh {
 public:
  /// Collective. The first axis varies slowest. Ranks along the last axis are neighbours, so put the axis that
  /// communicates most (tensor parallelism) last, where its ranks share a host. Throws Mismatch on all ranks if they
  /// give different axes, and InvalidArgument on all if the product of the sizes is not comm.size(), a size is below 1,
  /// or a name is empty or repeated. `comm` stays usable then.
  Mesh(Communicator comm, std::vector<MeshAxis> axes);

  /// This rank's group along an axis: the ranks that differ from this rank in that coordinate only, numbered by that
  /// coordinate. The group is a world of its own, which progresses independently. Throws InvalidArgument for a name
  /// that is no axis.
  Communicator& along(std::string_view axis);
  /// This rank's coordinate on the axis, which is its rank in `along(axis)`.
  int coordinate(std::string_view axis) const;
  int size(std::string_view axis) const;
  const std::vector<MeshAxis>& axes() const noexcept { return axes_; }
  /// The communicator of all ranks that was given to the constructor.
  Communicator& comm() noexcept { return comm_; }

 private:
  std::size_t index_of(std::string_view axis) const;

  Communicator comm_;
  std::vector<MeshAxis> axes_;
  std::vector<Communicator> along_;  // by axis
};

}  // namespace cohort
