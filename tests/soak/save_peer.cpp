// A rank that saves without end, and the judge of what it has left. tools/soak/kill-saves runs it.
//
//   save_peer save NAME RANK RANKS FOLDER PLACE MODE FAULT AT
//       meets the others at unix://NAME, loads what is there, and saves the next steps, MODE "blocking" or
//       "background"; FAULT of disk_fault.h comes at the ATth call that changes the disk after the first save. Says
//       "ack STEP" once a save has succeeded, "failed STEP" once it has thrown after a fault of the disk, and "calls N"
//       with what one save took.
//   save_peer check RANKS FOLDER PLACE
//       loads as so many ranks, and says "step STEP" (0: none); ends with 1 if anything is torn
//
// FOLDER is per host where PLACE is "local" or "copies", which has every file on both: even ranks have FOLDER/0, odd
// ones FOLDER/1. "copies-0" and "copies-1" load from one of them alone.
#include "disk_fault.h"
#include "train/checkpoint/background.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/exchange.h"
#include "train/formats/safetensors.h"
#include "train/formats/tensor.h"

#include <cohort/cohort.h>

#include <fmt/format.h>

#include <cstdio>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

namespace ck = cohort::checkpoint;
namespace ft = cohort::formats;
using cohort::Communicator;

constexpr std::size_t kModelBytes = 300'000, kOwnBytes = 150'000;

/// All bytes follow from the step and whose they are.
std::vector<std::byte> bytes_of(std::int64_t step, int whose, std::size_t size) {
  std::mt19937_64 random(static_cast<std::uint64_t>(step) * 1000 + static_cast<std::uint64_t>(whose + 1));
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i + 8 <= size; i += 8) {
    const std::uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, 8);
  }
  return bytes;
}

ft::TensorView view(const std::vector<std::byte>& bytes) {
  return {ft::ElementType::UInt8, {static_cast<std::int64_t>(bytes.size())}, bytes};
}

/// In every other step the model is in shards, of each rank's own number of bytes.
cohort::Shard part_of_model(int rank, int ranks) {
  const auto size = static_cast<std::int64_t>(kModelBytes);
  cohort::Shard part = ft::whole_shard({size});
  part.begin = size * rank / ranks;
  part.count = size * (rank + 1) / ranks - part.begin;
  return part;
}

struct Content {
  Content(std::int64_t step, int rank, int ranks)
      : model(bytes_of(step, -1, kModelBytes)), own(bytes_of(step, rank, kOwnBytes)) {
    bundle.manifest.step = step;
    bundle.manifest.program = "save_peer";
    bundle.state = {{"own", view(own)}};
    if (step % 2 == 0) {
      bundle.files = {{ck::kModelFile, {{"w", view(model)}}, {}}};
      return;
    }
    const cohort::Shard part = part_of_model(rank, ranks);
    bundle.shards = {
        {{"model/w", part},
         ft::ElementType::UInt8,
         std::span(model).subspan(static_cast<std::size_t>(part.begin), static_cast<std::size_t>(part.count))}};
  }
  std::vector<std::byte> model, own;
  ck::Bundle bundle;
};

void require(bool sound, const std::string& what) {
  if (!sound) throw std::runtime_error("TORN: " + what);
}

void require_bytes(const cohort::sys::FileBytes& file, const std::string& name,
                   const std::vector<std::byte>& expected) {
  const auto parsed = cohort::value_or_throw(ft::parse_safetensors(file.bytes(), name));
  const auto* const tensor = parsed.find(name);
  require(tensor != nullptr && std::equal(tensor->bytes.begin(), tensor->bytes.end(), expected.begin(), expected.end()),
          name + " is of another step or rank");
}

ck::FolderOptions options_of(const std::string& folder, const std::string& place, int rank) {
  const std::string host = place.starts_with("copies-") ? place.substr(7) : std::to_string(rank % 2);
  if (place == "local") return {folder + "/" + host, 2, cohort::CheckpointPlace::Local, 1};
  if (place.starts_with("copies")) return {folder + "/" + host, 2, cohort::CheckpointPlace::Local, 2};
  return {folder, 2, place == "shared" ? cohort::CheckpointPlace::Shared : cohort::CheckpointPlace::Rank0};
}

/// Loads the newest and compares every byte of it, all parts on all ranks, and the model in parts, too; its step.
std::int64_t load_and_compare(Communicator& comm, const ck::FolderOptions& options) {
  const ck::Found found = ck::load_newest(comm, options, {});
  for (const std::string& reason : found.passed_over) {
    // Between the renames of two hosts a checkpoint is on one of them only: not acknowledged, and found missing, not
    // torn.
    require(options.place == cohort::CheckpointPlace::Local && options.copies == 1 &&
                reason.find(": missing") != std::string::npos,
            reason);
  }
  if (!found.stored) return 0;
  const auto& manifest = found.stored->manifest;
  const auto model = bytes_of(manifest.step, -1, kModelBytes);
  require_bytes(found.files.at(ck::kModelFile), "w", model);
  if (found.tensors) {
    const cohort::Shard part = part_of_model(ck::rank_of(comm), ck::size_of(comm));
    std::vector<std::byte> bytes(static_cast<std::size_t>(part.count));
    ck::read_shards(comm, *found.tensors, {{{"model/w", part}, bytes}});
    require(std::equal(bytes.begin(), bytes.end(), model.begin() + part.begin), "a part is of another step");
  }
  std::set<int> all;
  for (int rank = 0; rank < manifest.world_size; ++rank) all.insert(rank);
  const auto parts = ck::load_parts(comm, options, *found.stored, all);
  require(parts.size() == all.size(), "parts are missing");
  for (const auto& [rank, part] : parts) require_bytes(part, "state/own", bytes_of(manifest.step, rank, kOwnBytes));
  return manifest.step;
}

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

int save_without_end(const std::vector<std::string>& arguments) {
  using cohort::testing::DiskFault;
  const int rank = std::stoi(arguments.at(2)), ranks = std::stoi(arguments.at(3));
  const ck::FolderOptions options = options_of(arguments.at(4), arguments.at(5), rank);
  const bool background = arguments.at(6) == "background";
  const DiskFault fault = cohort::testing::disk_fault_of(arguments.at(7));
  const std::int64_t at = std::stoll(arguments.at(8));

  cohort::InitOptions meeting;
  meeting.init_method = "unix://" + arguments.at(1);
  meeting.rank = rank;
  meeting.world_size = ranks;
  meeting.timeout = std::chrono::seconds(20);
  Communicator comm = cohort::init(meeting);
  std::int64_t step = load_and_compare(comm, options);
  say("formed");
  ck::BackgroundSaver saver(options);
  const auto save = [&] {
    const Content content(++step, rank, ranks);
    try {
      if (!background) {
        ck::save(comm, options, content.bundle);
      } else {
        saver.settle(comm);
        if (saver.needs_communicator(comm)) saver.adopt(comm.split({}));
        const auto pending = saver.start(comm, content.bundle);
        for (int i = 0; i < 20; ++i) ck::highest(comm, i);  // a step of training meanwhile
        pending->wait();
      }
      say(fmt::format("ack {}", step));
    } catch (const cohort::Error& error) {
      if (error.code() != cohort::ErrorCode::Io) throw;
      say(fmt::format("failed {}", step));
    }
  };
  const auto rounds = [&](int count) {
    for (int i = 0; i < count; ++i) save();
  };
  rounds(1);
  cohort::testing::arm_disk_fault(fault, at);
  rounds(1);
  say(fmt::format("calls {}", cohort::testing::disk_calls()));
  if (fault == DiskFault::None && at > 0) rounds(static_cast<int>(at));
  if (fault != DiskFault::None) rounds(2);
  cohort::testing::mend_disk();
  rounds(1);  // whatever came, it goes on
  return 0;
}

int check(const std::vector<std::string>& arguments) {
  const int ranks = std::stoi(arguments.at(1));
  std::int64_t step = 0;
  cohort::run_on_threads(ranks, [&](Communicator comm) {
    const std::int64_t loaded = load_and_compare(comm, options_of(arguments.at(2), arguments.at(3), comm.rank()));
    if (comm.rank() == 0) step = loaded;
  });
  say(fmt::format("step {}", step));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    if (!arguments.empty() && arguments[0] == "save") return save_without_end(arguments);
    if (!arguments.empty() && arguments[0] == "check") return check(arguments);
    std::fprintf(stderr, "usage: save_peer save|check ...: see its source\n");
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "save_peer: %s\n", error.what());
    return std::string(error.what()).starts_with("TORN") ? 1 : 3;
  }
}
