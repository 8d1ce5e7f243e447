#include "export/tensorboard.h"

#include "base/files.h"
#include "base/result.h"
#include "telemetry/record.h"

#include <fmt/format.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

namespace cohort::track {
namespace {

constexpr std::string_view kWritingEvents = "writing TensorBoard's events";
constexpr std::string_view kSuffix = ".cohort";

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78U : 0U);
    table[byte] = crc;
  }
  return table;
}

constexpr auto kTable = make_table();

static_assert(std::endian::native == std::endian::little, "event files are little-endian, as is this code");

template <class T>
void append_raw(std::string& out, T value) {
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  out.append(bytes, sizeof bytes);
}

std::uint32_t masked_crc(std::string_view bytes) noexcept {
  const std::uint32_t crc = crc32c(bytes);
  return std::rotr(crc, 15) + 0xa282ead8U;
}

/// Appends the fields of one protobuf message.
class ProtoWriter {
 public:
  explicit ProtoWriter(std::string& out) noexcept : out_(out) {}
  ProtoWriter& number(std::uint32_t field, std::uint64_t value) {
    varint(std::uint64_t{field} << 3);
    varint(value);
    return *this;
  }
  ProtoWriter& fixed32(std::uint32_t field, std::uint32_t value) {
    varint(std::uint64_t{field} << 3 | 5);
    append_raw(out_, value);
    return *this;
  }
  ProtoWriter& fixed64(std::uint32_t field, std::uint64_t value) {
    varint(std::uint64_t{field} << 3 | 1);
    append_raw(out_, value);
    return *this;
  }
  ProtoWriter& bytes(std::uint32_t field, std::string_view value) {
    varint(std::uint64_t{field} << 3 | 2);
    varint(value.size());
    out_ += value;
    return *this;
  }

 private:
  void varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) out_ += static_cast<char>(value | 0x80);
    out_ += static_cast<char>(value);
  }
  std::string& out_;
};

// Fields of Event, Summary.Value and SessionLog.
constexpr std::uint32_t kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7;
constexpr std::uint32_t kSummaryValue = 1, kTag = 1, kSimpleValue = 2;
constexpr std::uint32_t kSessionStatus = 1, kSessionStart = 1;

std::string event_of(double wall_time, std::int64_t step) {
  std::string event;
  ProtoWriter(event)
      .fixed64(kWallTime, std::bit_cast<std::uint64_t>(wall_time))
      .number(kStep, static_cast<std::uint64_t>(step));
  return event;
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) noexcept {
  std::uint32_t crc = 0xffffffffU;
  for (const char c : bytes) crc = (crc >> 8) ^ kTable[(crc ^ static_cast<unsigned char>(c)) & 0xff];
  return ~crc;
}

void ScalarEvent::begin(double wall_time, std::int64_t step) {
  event_ = event_of(wall_time, step);
  summary_.clear();
}

void ScalarEvent::add(std::string_view tag, float value) {
  value_.clear();
  ProtoWriter(value_).bytes(kTag, tag).fixed32(kSimpleValue, std::bit_cast<std::uint32_t>(value));
  ProtoWriter(summary_).bytes(kSummaryValue, value_);
}

const std::string& ScalarEvent::payload() {
  ProtoWriter(event_).bytes(kSummary, summary_);
  return event_;
}

EventFile::EventFile(const std::filesystem::path& folder) {
  static std::atomic<int> made_before{0};
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) raise_io({-1, folder, kWritingEvents}, error.value());
  const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  char host[256] = {};
  if (::gethostname(host, sizeof host - 1) != 0) std::strcpy(host, "host");
  file_ = folder / fmt::format("events.out.tfevents.{:010}.{}.{}.{:06}{}", static_cast<std::int64_t>(now), host,
                               ::getpid(), made_before++, kSuffix);
  fd_.reset(::open(file_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644));
  if (!fd_) raise_io({-1, file_, kWritingEvents}, errno);
  std::string version = event_of(now, 0);
  ProtoWriter(version).bytes(kFileVersion, "brain.Event:2");
  add(version);
}

bool EventFile::made(std::string_view name) noexcept {
  return name.starts_with("events.out.tfevents.") && name.ends_with(kSuffix);
}

void EventFile::add(std::string_view payload) {
  std::string length;
  append_raw(length, static_cast<std::uint64_t>(payload.size()));
  buffer_ += length;
  append_raw(buffer_, masked_crc(length));
  buffer_ += payload;
  append_raw(buffer_, masked_crc(payload));
  if (buffer_.size() >= kAppendBuffer) flush();
}

void EventFile::add_restart(double wall_time, std::int64_t step) {
  std::string session, event = event_of(wall_time, step);
  ProtoWriter(session).number(kSessionStatus, kSessionStart);
  ProtoWriter(event).bytes(kSessionLog, session);
  add(event);
}

void EventFile::flush() {
  append_all({fd_.get(), file_, kWritingEvents}, buffer_);
  buffer_.clear();
}

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
