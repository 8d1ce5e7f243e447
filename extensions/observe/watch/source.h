// Sources of the data to show: the files of a run, or the page of another machine. One thread. RunFiles reads a run's
// files: live.json, the record, the ranks' logs. It only reads, so that watching cannot harm a run. RemotePage reads
// the page of another machine, for `cohort watch HOST:PORT`.
#pragma once

#include "launch/messages.h"
#include "net/address.h"
#include "net/http.h"
#include "net/secret.h"
#include "observe/watch/view.h"
#include "telemetry/record.h"

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace cohort::watch {

/// The last lines of a log, without control characters.
struct LogTail {
  std::string path;
  std::vector<std::string> lines;
  std::string why;  ///< reason why there is no log
};

class Source {
 public:
  virtual ~Source() = default;
  /// Reads again; returns true if anything has changed. Keeps old data that cannot be read now.
  virtual bool poll() = 0;
  virtual const View& view() const = 0;
  virtual LogTail log(int rank, launch::Stream stream, std::size_t lines) = 0;
  /// Seconds since 1970 by the clock of the run's host.
  virtual double now() const = 0;
  /// Reason why there is no new data; empty if there is.
  virtual std::string trouble() const = 0;
};

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
  bool read_usage();

  std::filesystem::path folder_;
  View view_;
  bool known_ = false;
  Version live_;
  std::optional<track::RecordFollower> record_, usage_record_;
  std::vector<Logged> usage_;
  double usage_since_ = 0;
  ProgressReader progress_;
};

class RemotePage final : public Source {
 public:
  /// Connects once. Throws Unavailable if there is no answer, or if the token is refused.
  RemotePage(net::Address address, const net::Secret& token);

  bool poll() override;
  const View& view() const override { return view_; }
  LogTail log(int rank, launch::Stream stream, std::size_t lines) override;
  double now() const override { return launch::seconds_now() + ahead_; }
  std::string trouble() const override { return trouble_; }

 private:
  Result<std::string> get(const std::string& target) const;

  net::Address address_;
  net::Secret token_;
  View view_;
  double ahead_ = 0;  ///< seconds by which the other clock is ahead of ours
  std::string trouble_;
  std::chrono::steady_clock::time_point next_{};
};

// Serves the live page of a run (one HTML file, its figures, the logs of its ranks) to browsers that have the token,
// and to `cohort watch HOST:PORT`. Runs in its own process, which only reads files, so that requests of strangers
// cannot disturb the run. Only the server's thread reads the files.
class PageServer {
 public:
  /// Listens; throws what net::HttpServer throws. `files` has to outlive the server, and only the server uses it.
  PageServer(RunFiles& files, const net::Address& at, const net::Secret& token);

  std::uint16_t port() const noexcept { return server_.address().port; }
  /// "http://127.0.0.1:4711/?token=..."
  std::string url() const;

 private:
  net::HttpResponse answer(const net::HttpRequest& request);
  static net::HttpResponse page();
  net::HttpResponse data(const net::HttpRequest& request);
  net::HttpResponse log(const net::HttpRequest& request);

  RunFiles& files_;
  net::Secret token_;
  std::string last_data_;  ///< data of all ranks, or of hosts if there are many ranks
  net::Deadline poll_again_{};
  net::HttpServer server_;  ///< declared last, since its thread uses the others
};

}  // namespace cohort::watch
