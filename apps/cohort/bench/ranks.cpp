#include "bench/ranks.h"

#include "base/result.h"
#include "bench/measure.h"
#include "child_job.h"
#include "cluster/detect.h"
#include "sys/process.h"

#include <cohort/join.h>

#include <cstdio>

namespace cohort::app::bench {
namespace {

/// `cohort run` wants an end of everything; each operation has its own.
constexpr std::chrono::hours kLongEnough(24 * 365);

}  // namespace

void run_on_processes(int ranks, const Emit& emit) {
  JobRequest request;
  request.options = {"--standalone"};
  request.program = sys::own_arguments();  // cohort bench WORDS
  request.program.front() = value_or_throw(sys::own_executable());
  request.program.insert(request.program.begin() + 2, kAsRank);
  request.processes = ranks;
  request.timeout = kLongEnough;
  request.on_output = [&emit](const std::string& line) {
    const auto event = nlohmann::json::parse(line, nullptr, false);
    if (event.is_object() && event.contains("event")) emit(event);
  };
  run_job(request);
}

void run_on_threads(int ranks, const Plan& plan, const Emit& emit) {
  cohort::run_on_threads(ranks, [&](Communicator comm) { run_plan(comm, plan, emit); }, {.timeout = plan.timeout});
}

bool inside_a_job() {
  const auto detected = value_or_throw(cluster::detect_rank(cluster::current_environment()));
  return detected.alone || !detected.launcher.empty();
}

void run_in_job(const Plan& plan, const Emit& emit) {
  Communicator comm = join({.timeout = plan.timeout});
  run_plan(comm, plan, emit);
}

void be_rank(const Plan& plan) {
  run_in_job(plan, [](const nlohmann::json& event) {
    std::printf("%s\n", event.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
    if (std::fflush(stdout) != 0) raise(ErrorCode::Io, "bench: a rank cannot report: {}", errno_text(errno));
  });
}

}  // namespace cohort::app::bench
