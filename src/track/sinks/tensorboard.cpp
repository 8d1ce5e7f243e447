#include "track/sinks/tensorboard.h"

#include "base/result.h"
#include "sys/files.h"

#include <algorithm>
#include <string>
#include <vector>

namespace cohort::track {
namespace {

namespace fs = std::filesystem;

/// A folder as this sink makes for a rank.
bool is_rank(const std::string& name) {
  return name.starts_with("rank") && name.size() > 4 &&
         std::all_of(name.begin() + 4, name.end(), [](char c) { return c >= '0' && c <= '9'; });
}

void make_room(const fs::path& folder, std::vector<fs::path>& ours) {
  for (const std::string& name : value_or_throw(sys::list_folder(folder.string()))) {
    if (EventFile::made(name)) {
      ours.push_back(folder / name);
    } else if (name.find("tfevents") != std::string::npos) {
      raise(ErrorCode::InvalidArgument,
            "exporting to TensorBoard failed -- {} -- there is {}, which is not this command's, and both would be one "
            "run -- give another folder",
            folder.string(), name);
    } else if (is_rank(name) && fs::is_directory(folder / name)) {
      make_room(folder / name, ours);
    }
  }
}

}  // namespace

TensorBoardSink::TensorBoardSink(fs::path folder) : folder_(std::move(folder)) {
  std::vector<fs::path> ours;
  if (fs::exists(folder_)) make_room(folder_, ours);
  for (const fs::path& file : ours) value_or_throw(sys::remove_tree(file.string()));
  (void)file(std::nullopt);
  flush();
}

EventFile& TensorBoardSink::file(std::optional<int> rank) {
  const auto found = files_.find(rank);
  if (found != files_.end()) return found->second;
  return files_.emplace(rank, rank ? folder_ / ("rank" + std::to_string(*rank)) : folder_).first->second;
}

void TensorBoardSink::take(const SinkLine& line) {
  if (line.superseded) return;
  std::optional<MetricPoint> first;
  points_.read(line.line, [&](const MetricPoint& point) {
    if (!first) event_.begin(point.time, point.step);
    first = point;
    event_.add(point.name, static_cast<float>(point.value));
  });
  if (first) file(first->rank).add(event_.payload());
}

Sink::Replay TensorBoardSink::go_back(std::int64_t step, double time) {
  flush();
  std::vector<std::optional<int>> ranks;
  for (const auto& [rank, file] : files_) ranks.push_back(rank);
  files_.clear();
  for (const auto& rank : ranks) file(rank).add_restart(time, step + 1);
  return Replay::No;
}

void TensorBoardSink::flush() {
  for (auto& [rank, file] : files_) file.flush();
}

void TensorBoardSink::finish(RunState /*state*/) { flush(); }

}  // namespace cohort::track
