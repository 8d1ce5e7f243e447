#include "checkpoint/bundle.h"

#include <fmt/format.h>

namespace cohort::checkpoint {

std::string part_file(int rank) { return fmt::format("rank-{:05}.safetensors", rank); }

std::string random_name(int rank, const std::string& generator) {
  return generator == "cpu" ? fmt::format("rank/{}", rank) : fmt::format("rank/{}/{}", rank, generator);
}

std::string to_string(CheckpointPlace place) {
  switch (place) {
    case CheckpointPlace::Rank0: return "rank0";
    case CheckpointPlace::Shared: return "shared";
    case CheckpointPlace::Local: return "local";
  }
  return {};
}

}  // namespace cohort::checkpoint
