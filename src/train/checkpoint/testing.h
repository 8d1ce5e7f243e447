// For tests of this component: bundles whose bytes all follow from step and rank, so that a mixture is detected.
#pragma once

#include "base/result.h"
#include "train/checkpoint/checkpoint.h"
#include "train/formats/safetensors.h"
#include "train/formats/tensor.h"
#include "train/formats/testing.h"

#include <cohort/communicator.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

namespace cohort::checkpoint {

struct Content {
  std::int64_t step = 0;
  std::size_t own_bytes = 0;  ///< size of each rank's own tensor; 0: ranks have none
  std::size_t model_bytes = 50;
};

inline unsigned seed_of(std::int64_t step, int rank) { return static_cast<unsigned>(step * 1000 + rank + 1); }

struct Brought {
  Brought(const Communicator& comm, const Content& content)
      : model(formats::random_bytes(content.model_bytes, static_cast<unsigned>(content.step))),
        own(formats::random_bytes(content.own_bytes, seed_of(content.step, comm ? comm.rank() : 0))),
        random("random state of step " + std::to_string(content.step)) {
    bundle.manifest.step = content.step;
    bundle.manifest.program = "test";
    bundle.files = {{kModelFile, {{"w", view(model)}}, {{"format", "pt"}}}};
    if (!own.empty()) bundle.state = {{"own", view(own)}};
    bundle.random = {{"cpu", view(formats::as_bytes(random))}};
  }
  static formats::TensorView view(std::span<const std::byte> bytes) {
    return {formats::ElementType::UInt8, {static_cast<std::int64_t>(bytes.size())}, bytes};
  }

  std::vector<std::byte> model, own;
  std::string random;
  Bundle bundle;
};

inline ::testing::AssertionResult holds(const sys::FileBytes& file, const std::string& name, unsigned seed) {
  const auto parsed = formats::parse_safetensors(file.bytes(), name);
  if (!parsed) return ::testing::AssertionFailure() << parsed.error().what();
  const auto* const tensor = parsed->find(name);
  if (tensor == nullptr) return ::testing::AssertionFailure() << "no tensor " << name;
  const auto found = formats::copy_of(tensor->bytes);
  if (found != formats::random_bytes(found.size(), seed)) return ::testing::AssertionFailure() << "other bytes";
  return ::testing::AssertionSuccess();
}
inline ::testing::AssertionResult is_model(const sys::FileBytes& file, std::int64_t step) {
  return holds(file, "w", static_cast<unsigned>(step));
}
inline ::testing::AssertionResult is_part(const sys::FileBytes& file, int rank, std::int64_t step) {
  return holds(file, "state/own", seed_of(step, rank));
}

inline std::vector<std::string> names_of(const std::string& folder) { return value_or_throw(sys::list_folder(folder)); }

/// Returns the contents of the files directly in a folder.
inline std::map<std::string, std::string> contents(const std::string& folder) {
  std::map<std::string, std::string> all;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream in(entry.path(), std::ios::binary);
    all[entry.path().filename().string()] = {std::istreambuf_iterator<char>(in), {}};
  }
  return all;
}

inline ErrorCode code_of(const std::function<void()>& work, const std::string& part) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what() << "\ndoes not say: " << part;
    return error.code();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ErrorCode::Internal;
}

}  // namespace cohort::checkpoint
