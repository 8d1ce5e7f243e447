// A run as its files show it: live.json, the record, the ranks' logs. Only reads, so nothing that watches a run can
// harm it. One thread.
#pragma once

#include "track/record_follower.h"
#include "watch/source.h"

#include <sys/types.h>

#include <cstdint>
#include <ctime>
#include <filesystem>
#include <optional>
#include <string>

namespace cohort::watch {

/// The folder of a run: as given, or the newest in ./runs. Throws Unavailable where there is none.
std::filesystem::path find_run(const std::filesystem::path& given);

class RunFiles final : public Source {
 public:
  explicit RunFiles(std::filesystem::path folder);

  bool poll() override;
  const View& view() const override { return view_; }
  LogTail log(int rank, launch::Stream stream, std::size_t lines) override;
  double now() const override { return launch::seconds_now(); }
  std::string trouble() const override;

 private:
  struct Version {
    dev_t device = 0;
    ino_t file = 0;
    std::int64_t size = -1;
    std::int64_t changed_ns = 0;
    bool operator==(const Version&) const = default;
  };
  bool read_live();
  bool read_record();

  std::filesystem::path folder_;
  View view_;
  bool known_ = false;
  Version live_;
  std::optional<track::RecordFollower> record_;
  ProgressReader progress_;
};

}  // namespace cohort::watch
