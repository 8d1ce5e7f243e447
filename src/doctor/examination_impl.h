// One examination, from its hosts to what was found: what `examine` consists of. examination.cpp has how hosts are
// started, asked and let go, examination_steps.cpp what they are asked for. One thread.
#pragma once

#include "doctor/examination.h"
#include "launch/start/agent_pool.h"
#include "net/secret.h"
#include "sys/signals.h"

#include <nlohmann/json_fwd.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace cohort::doctor {

class Examination {
 public:
  explicit Examination(const ExaminationOptions& options);
  Examined run();

 private:
  struct ExaminedHost {
    bool joined = false;
    std::string line;
    std::string order;    ///< that it has not answered
    double asked_at = 0;  ///< by this host's clock
    std::function<void(const std::string&)> take;
    bool over = false;  ///< nothing more comes from it
  };

  HostState& state(std::size_t at) { return checkup_.hosts[at]; }
  bool ready(std::size_t at) const { return !examined_[at].over && checkup_.hosts[at].facts.has_value(); }
  std::vector<std::size_t> all_ready() const;
  void give_up(std::size_t at, std::string row, std::string why, std::string fix);
  void on_joined(launch::AgentHandle& member);
  void on_message(std::size_t at, launch::Message message);
  void on_line(std::size_t at, const std::string& line);
  void on_process_ended(launch::AgentHandle& member);
  void diagnose_start(const launch::AgentHandle& member);
  void ask(std::size_t at, const nlohmann::json& order, std::function<void(const std::string&)> take);
  bool wait(std::chrono::milliseconds limit, const std::function<bool()>& done);
  /// Until all have answered; who has not by then is lost.
  void wait_for_answers(std::chrono::milliseconds limit, const char* meanwhile);

  void get_facts();
  void compare_clocks();
  void compare_folders();
  void probe_peers();
  void measure_speeds();
  void end();

  const ExaminationOptions& options_;
  launch::Loop loop_;
  std::optional<sys::SignalFd> signals_;
  launch::Watch signal_watch_;
  int signal_ = 0;
  bool ending_ = false;  ///< what ends now is meant to
  std::uint64_t open_files_ = 0;
  net::Secret secret_ = value_or_throw(net::Secret::generate());
  std::optional<launch::AgentPool> agents_;
  std::vector<ExaminedHost> examined_;
  Checkup checkup_;
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
};

}  // namespace cohort::doctor
