#include <cohort/mesh.h>

#include "base/result.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>

namespace cohort {
namespace {

// Describes the axes. Names are quoted, since they may contain any characters.
std::string mesh_text(const std::vector<MeshAxis>& axes) {
  std::string text;
  for (const MeshAxis& axis : axes) text += fmt::format("{}'{}' {}", text.empty() ? "" : ", ", axis.name, axis.size);
  return "{" + text + "}";
}

// Throws if the axes form no mesh; all ranks throw the same.
void check_axes(const std::vector<MeshAxis>& axes, int ranks) {
  const auto refuse = [&](const std::string& why) {
    raise(ErrorCode::InvalidArgument, "Mesh {} of {} ranks: {}", mesh_text(axes), ranks, why);
  };
  std::int64_t product = 1;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    if (axes[i].name.empty()) refuse("an axis needs a name");
    const auto twice = [&](const MeshAxis& other) { return other.name == axes[i].name; };
    if (std::any_of(axes.begin(), axes.begin() + static_cast<std::ptrdiff_t>(i), twice)) {
      refuse(fmt::format("two axes have the name '{}'", axes[i].name));
    }
    if (axes[i].size < 1)
      refuse(fmt::format("axis '{}' has {} ranks -- at least 1 is needed", axes[i].name, axes[i].size));
    product = std::min<std::int64_t>(product * axes[i].size, std::int64_t{1} << 31);
  }
  if (product != ranks) refuse(fmt::format("the sizes' product has to be {}", ranks));
}

// If any ranks' axes differ, all ranks throw and name the same difference.
void require_same_axes(Communicator& comm, const std::string& own) {
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(comm.size()));
  const std::int64_t length = static_cast<std::int64_t>(own.size());
  comm.all_gather(std::span(&length, 1), std::span(lengths)).wait();
  std::int64_t total = 0;
  for (const std::int64_t one : lengths) total += one;
  std::vector<std::uint8_t> text(own.begin(), own.end());
  std::vector<std::uint8_t> all(static_cast<std::size_t>(total));
  comm.all_gather_v(std::span(std::as_const(text)), std::span(all), lengths).wait();
  std::string first;
  auto at = all.begin();
  for (std::size_t rank = 0; rank < lengths.size(); ++rank) {
    const std::string its(at, at + lengths[rank]);
    at += lengths[rank];
    if (rank == 0) first = its;
    if (its != first) {
      raise(ErrorCode::Mismatch, "Mesh: rank 0 gives the axes {} and rank {} gives {}", first, rank, its);
    }
  }
}

}  // namespace

Mesh::Mesh(Communicator comm, std::vector<MeshAxis> axes) : comm_(std::move(comm)), axes_(std::move(axes)) {
  if (!comm_) raise(ErrorCode::InvalidArgument, "Mesh: the communicator is empty");
  require_same_axes(comm_, mesh_text(axes_));
  check_axes(axes_, comm_.size());
  int stride = comm_.size();
  for (const MeshAxis& axis : axes_) {
    const int outer = comm_.rank() / stride * stride;  // the rank with equal slower coordinates, else 0
    stride /= axis.size;
    const int coordinate = comm_.rank() / stride % axis.size;
    along_.push_back(comm_.split({.color = outer + comm_.rank() % stride, .key = coordinate}));
  }
}

std::size_t Mesh::index_of(std::string_view axis) const {
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    if (axes_[i].name == axis) return i;
  }
  raise(ErrorCode::InvalidArgument, "Mesh {} has no axis '{}'", mesh_text(axes_), axis);
}

Communicator& Mesh::along(std::string_view axis) { return along_[index_of(axis)]; }
int Mesh::coordinate(std::string_view axis) const { return along_[index_of(axis)].rank(); }
int Mesh::size(std::string_view axis) const { return axes_[index_of(axis)].size; }

}  // namespace cohort
