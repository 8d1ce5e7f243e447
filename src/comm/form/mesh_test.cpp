// Meshes over ranks that are threads: which groups there are, and what is refused on all ranks.
#include <cohort/error.h>
#include <cohort/mesh.h>

#include <gtest/gtest.h>

#include "comm/testing/worlds.h"

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace cohort {
namespace {

std::vector<int> members(Communicator& comm, int world_rank) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(comm.size()));
  const std::int32_t own = world_rank;
  comm.all_gather(std::span(&own, 1), std::span(all)).wait();
  return {all.begin(), all.end()};
}

TEST(Mesh, GroupsAreThoseThatDifferInOneCoordinate) {
  using Axes = std::vector<MeshAxis>;
  for (const Axes& axes :
       {Axes{}, Axes{{"a", 1}, {"b", 1}, {"c", 1}}, Axes{{"dp", 2}, {"tp", 2}}, Axes{{"dp", 2}, {"pp", 2}, {"tp", 2}},
        Axes{{"dp", 3}, {"tp", 2}}, Axes{{"dp", 1}, {"pp", 4}, {"tp", 1}}}) {
    int ranks = 1;
    for (const MeshAxis& axis : axes) ranks *= axis.size;
    run_on_threads(ranks, [&](Communicator comm) {
      Mesh mesh(comm, axes);
      EXPECT_EQ(mesh.axes().size(), axes.size());
      EXPECT_EQ(mesh.comm().size(), ranks);
      int stride = ranks;
      for (const MeshAxis& axis : axes) {
        stride /= axis.size;
        const int coordinate = comm.rank() / stride % axis.size;
        std::vector<int> expected;
        for (int i = 0; i < axis.size; ++i) expected.push_back(comm.rank() + (i - coordinate) * stride);
        EXPECT_EQ(mesh.coordinate(axis.name), coordinate);
        EXPECT_EQ(mesh.size(axis.name), axis.size);
        EXPECT_EQ(mesh.along(axis.name).rank(), coordinate);
        EXPECT_EQ(members(mesh.along(axis.name), comm.rank()), expected) << axis.name;
      }
    });
  }
}

std::string refusal(ErrorCode code, const std::function<void()>& call) { return comm::testing::what_of(call, code); }

TEST(Mesh, WhatIsNoMeshIsRefusedOnAllRanks) {
  run_on_threads(4, [](Communicator comm) {
    const auto refused = [&](std::vector<MeshAxis> axes, const std::string& why) {
      const std::string said = refusal(ErrorCode::InvalidArgument, [&] { Mesh(comm, std::move(axes)); });
      EXPECT_NE(said.find(why), std::string::npos) << said;
    };
    refused({{"dp", 2}, {"tp", 3}}, "Mesh {'dp' 2, 'tp' 3} of 4 ranks: the sizes' product has to be 4");
    refused({}, "product has to be 4");
    refused({{"dp", 2}, {"dp", 2}}, "two axes have the name 'dp'");
    refused({{"", 4}}, "an axis needs a name");
    refused({{"dp", -2}, {"tp", -2}}, "axis 'dp' has -2 ranks");
    refused({{"dp", 1 << 16}, {"tp", 1 << 16}, {"pp", 4}}, "product has to be 4");
    // If ranks give different axes, all get the same error.
    const std::string said = refusal(ErrorCode::Mismatch, [&] {
      Mesh(comm, comm.rank() == 2 ? std::vector<MeshAxis>{{"tp", 4}} : std::vector<MeshAxis>{{"dp", 2}, {"tp", 2}});
    });
    EXPECT_NE(said.find("rank 0 gives the axes {'dp' 2, 'tp' 2} and rank 2 gives {'tp' 4}"), std::string::npos) << said;
    // The world goes on.
    Mesh mesh(comm, {{"dp", 2}, {"tp", 2}});
    EXPECT_NE(refusal(ErrorCode::InvalidArgument, [&] { (void)mesh.along("pp"); }).find("has no axis 'pp'"),
              std::string::npos);
  });
  (void)refusal(ErrorCode::InvalidArgument, [] { Mesh(Communicator(), {{"dp", 1}}); });
}

}  // namespace
}  // namespace cohort
