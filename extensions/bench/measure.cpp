#include "bench/measure.h"

#include "base/env.h"
#include "base/hardware.h"
#include "base/json.h"
#include "base/process.h"
#include "base/result.h"
#include "bench/machine.h"
#include "bench/operation.h"
#include "launch/start/starter.h"
#include "rendezvous/detect.h"
#include "shared/child_job.h"

#include <cohort/init.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <span>

namespace cohort::app::bench {
namespace {

/// Visits each field; one list serves reading and writing.
template <class S, class F>
void visit(S& side, F&& field) {
  field("time_us", side.time), field("in_a_row", side.in_a_row), field("p50_us", side.p50), field("p90_us", side.p90);
  field("p99_us", side.p99), field("p99.9_us", side.p99_9), field("max_us", side.max), field("calls", side.calls);
  field("wrong", side.wrong), field("algbw_GBps", side.algbw), field("busbw_GBps", side.busbw);
  field("bound_us", side.bound);
}
template <class R, class F>
void visit_row(R& row, F&& field) {
  field("collective", row.collective), field("ranks", row.ranks), field("memory", row.memory);
  field("state", row.state), field("bytes", row.bytes), field("count", row.count), field("type", row.type);
  field("op", row.op), field("root", row.root), field("memory_rate_GBps", row.memory_rate);
}

auto writing_to(nlohmann::json& json) {
  return [&json](const char* name, const auto& value) { json[name] = value; };
}
auto reading_from(const nlohmann::json& json) {
  return [&json](const char* name, auto& value) { json.at(name).get_to(value); };
}

nlohmann::json json_of(const Side& side) {
  nlohmann::json json = {{"of_bound", side.time > 0 ? side.bound / side.time : 0}};
  visit(side, writing_to(json));
  return json;
}

Side side_from(const nlohmann::json& json) {
  Side side;
  visit(side, reading_from(json));
  return side;
}

}  // namespace

const Side& main_side(const Row& row) { return row.in_place ? *row.in_place : *row.out_of_place; }

nlohmann::json to_json(const Row& row) {
  nlohmann::json json = {{"event", "row"}};
  visit_row(row, writing_to(json));
  if (row.out_of_place) json["out_of_place"] = json_of(*row.out_of_place);
  if (row.in_place) json["in_place"] = json_of(*row.in_place);
  return json;
}

Row row_from(const nlohmann::json& event) {
  Row row;
  visit_row(row, reading_from(event));
  if (event.contains("out_of_place")) row.out_of_place = side_from(event.at("out_of_place"));
  if (event.contains("in_place")) row.in_place = side_from(event.at("in_place"));
  return row;
}

double percentile(const std::vector<double>& sorted, double share) {
  const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(sorted.size())));
  return sorted[std::clamp<std::size_t>(rank, 1, sorted.size()) - 1];
}

namespace {

using Clock = std::chrono::steady_clock;

/// Below this size, hot calls are also timed in a row, since reading the clock takes 25 ns and a call perhaps 100.
constexpr std::size_t kInARowBytes = 4096;
constexpr int kRows = 11;  ///< number of repetitions, of which the median counts

double microseconds(Clock::duration time) { return std::chrono::duration<double, std::micro>(time).count(); }

/// One rank's part in the measurement of a plan.
class Measurement {
 public:
  Measurement(Communicator& comm, const Plan& plan, const Emit& emit) : comm_(comm), plan_(plan), emit_(emit) {}

  void run() {
    describe_world();
    for (const Collective collective : plan_.collectives) {
      const Traits& traits = traits_of(collective);
      const bool pair = collective == Collective::PingPong || collective == Collective::Exchange;
      if (pair && comm_.size() < 2) {
        if (plan_.collectives.size() > 1) continue;  // `all` is valid in any world
        raise(ErrorCode::InvalidArgument, "{} needs at least 2 ranks -- start more with -np", traits.name);
      }
      const bool data = collective != Collective::Barrier;
      const auto sizes = data ? plan_.sizes : std::vector<std::size_t>{0};
      const auto dtypes = data ? plan_.dtypes : std::vector<DType>{DType::Float32};
      const auto ops = traits.reduces ? plan_.ops : std::vector<ReduceOp>{ReduceOp::Sum};
      const auto memories = data ? plan_.memories : std::vector<MemoryKind>{MemoryKind::Heap};
      for (const MemoryKind memory : memories) {
        for (const DType dtype : dtypes) {
          for (const ReduceOp op : ops) {
            if (!supports(dtype, op)) continue;
            for (const std::size_t size : sizes) measure_row(traits, memory, dtype, op, size);
          }
        }
      }
    }
  }

 private:
  void describe_world() {
    nlohmann::json event = {{"event", "world"}, {"ranks", comm_.size()}, {"local_ranks", comm_.local_size()}};
    if (plan_.memories.front() == MemoryKind::Cuda) {
      const RankGpu own = gpu_of(comm_);
      regions_.gpu = own.index;
      event["gpus"] = different_gpus(comm_, own);
      event["cuda"] = own.software;
      event["gpu_sums"] = plan_.gpu_sums ? std::string(*plan_.gpu_sums == GpuSums::Exact ? "exact" : "fast")
                                         : std::get<std::string>(value_or_throw(env::value(env::kGpuSums)));
    }
    trips_ = flag_round_trips(comm_);
    if (comm_.rank() != 0) return;
    const auto [near, far] = std::minmax_element(trips_.begin(), trips_.end());
    if (!trips_.empty()) {
      event["flag_round_trip_near_ns"] = *near;
      event["flag_round_trip_far_ns"] = *far;
    }
    emit_(event);
  }

  void measure_row(const Traits& traits, MemoryKind memory, DType dtype, ReduceOp op, std::size_t size) {
    Operation operation;
    operation.collective = traits.collective;
    operation.dtype = dtype;
    operation.op = op;
    operation.root = plan_.root;
    operation.shape = shape_of(traits.collective, size, dtype, comm_.rank(), comm_.size());
    Row row;
    row.collective = std::string(traits.name);
    row.ranks = comm_.size();
    row.memory = traits.collective == Collective::Barrier ? "none" : std::string(to_string(memory));
    row.state = std::string(to_string(plan_.state));
    row.bytes = operation.shape.bytes;
    row.count = operation.shape.count;
    row.type = traits.collective == Collective::Barrier ? "none" : std::string(to_string(dtype));
    row.op = traits.reduces ? std::string(to_string(op)) : "none";
    row.root = traits.rooted ? plan_.root : -1;

    // For GPUs, the speed that is possible is not measured.
    const bool on_gpu = memory == MemoryKind::Cuda;
    double rate = 0;
    if (on_gpu) {
      operation.device = {DeviceType::CUDA, regions_.gpu};
      operation.gpu_sums = plan_.gpu_sums;
    } else {
      std::byte* const data = regions_.first.get(comm_, memory, row.bytes, regions_.gpu);
      rate = roof_.rate(comm_, data, row.bytes, memory, plan_.state);
    }
    row.memory_rate = rate / 1e9;
    const bool only_way = !traits.in_place || !traits.out_of_place;
    for (const bool in_place : {false, true}) {
      if (!(in_place ? traits.in_place : traits.out_of_place)) continue;
      if (!only_way && !(in_place ? plan_.in_place : plan_.out_of_place)) continue;
      operation.in_place = in_place;
      const auto place = [&](MemoryKind kind) {
        return place_buffers(comm_, regions_, kind, operation.collective, operation.shape, dtype, in_place);
      };
      operation.buffers = place(memory);
      operation.mirror = on_gpu ? place(MemoryKind::Heap) : operation.buffers;
      Side side = measure_side(operation);
      const double bytes = static_cast<double>(row.bytes);
      if (side.time > 0) side.algbw = bytes / side.time / 1e3;
      side.busbw = side.algbw * bus_factor(operation.collective, comm_.size());
      const double touched = touched_bytes(operation.collective, row.bytes, comm_.size(), in_place);
      const double nearest = trips_.empty() ? 0 : *std::min_element(trips_.begin(), trips_.end());
      if (!on_gpu) side.bound = std::max(rate > 0 ? touched / rate * 1e6 : 0, nearest / 2e3);
      (in_place ? row.in_place : row.out_of_place) = side;
    }
    if (comm_.rank() == 0) emit_(to_json(row));
  }

  Side measure_side(const Operation& operation) {
    Side side;
    if (plan_.check) {
      write_input(comm_, operation);
      comm_.barrier().wait();
      call(comm_, operation);
      std::array<std::int64_t, 1> wrong = {wrong_elements(comm_, operation)};
      comm_.all_reduce(std::span<std::int64_t>(wrong)).wait();
      side.wrong = wrong[0];
    }
    comm_.barrier().wait();  // other ranks may still be comparing
    clear(operation);
    for (int i = 0; i < plan_.warm_up; ++i) timed_call(operation);
    const double estimate = std::max(0.05, median_of(slowest(timed_calls(operation, 3))));
    const int calls = plan_.iterations > 0 ? plan_.iterations : std::clamp(static_cast<int>(2e5 / estimate), 20, 2000);

    std::vector<double> times = slowest(timed_calls(operation, calls));
    std::sort(times.begin(), times.end());
    side.calls = calls;
    side.p50 = percentile(times, 0.5);
    side.p90 = percentile(times, 0.9);
    side.p99 = percentile(times, 0.99);
    side.p99_9 = percentile(times, 0.999);
    side.max = times.back();
    side.time = side.p50;
    side.in_a_row =
        plan_.state == State::Hot && operation.shape.bytes < kInARowBytes && traits_of(operation.collective).symmetric;
    if (side.in_a_row) side.time = time_in_a_row(operation, estimate);
    return side;
  }

  double timed_call(const Operation& operation) {
    if (plan_.state != State::Hot) {
      write_input(comm_, operation);
      if (plan_.state == State::Cold) {
        const std::size_t element = size_of(operation.dtype);
        drop_from_caches(operation.buffers.input, static_cast<std::size_t>(operation.shape.input) * element);
        drop_from_caches(operation.buffers.output, static_cast<std::size_t>(operation.shape.output) * element);
      }
    }
    comm_.barrier().wait();
    const auto begin = Clock::now();
    call(comm_, operation);
    const double time = microseconds(Clock::now() - begin);
    return operation.collective == Collective::PingPong ? time / 2 : time;
  }

  std::vector<double> timed_calls(const Operation& operation, int calls) {
    std::vector<double> times(static_cast<std::size_t>(calls));
    for (double& time : times) time = timed_call(operation);
    return times;
  }

  double time_in_a_row(const Operation& operation, double estimate) {
    const int calls = plan_.iterations > 0 ? plan_.iterations : std::clamp(static_cast<int>(5e3 / estimate), 50, 10000);
    std::vector<double> times;
    for (int row = 0; row < kRows; ++row) {
      comm_.barrier().wait();
      const auto begin = Clock::now();
      for (int i = 0; i < calls; ++i) call(comm_, operation);
      times.push_back(microseconds(Clock::now() - begin) / calls);
    }
    const double time = median_of(slowest(std::move(times)));
    return operation.collective == Collective::PingPong ? time / 2 : time;
  }

  /// Returns the time of the slowest rank in each call.
  std::vector<double> slowest(std::vector<double> own) {
    comm_.all_reduce(std::span<double>(own), {.op = ReduceOp::Max}).wait();
    return own;
  }

  static double median_of(std::vector<double> times) {
    std::sort(times.begin(), times.end());
    return percentile(times, 0.5);
  }

  Communicator& comm_;
  const Plan& plan_;
  const Emit& emit_;
  Regions regions_;
  MemoryRoof roof_;
  std::vector<double> trips_;
};

}  // namespace

void check_root(const Plan& plan, int ranks) {
  if (plan.root < 0 || plan.root >= ranks)
    raise(ErrorCode::InvalidArgument, "bench: --root {} is none of {} ranks", plan.root, ranks);
}

namespace {

/// Called by all ranks with the same plan; rank 0 emits a `world` event and then a `row` event for each row. Throws
/// what the communicator throws, and InvalidArgument if this world cannot carry out the plan.
void run_plan(Communicator& comm, const Plan& plan, const Emit& emit) {
  check_root(plan, comm.size());
  Measurement(comm, plan, emit).run();
  comm.barrier().wait();  // so that no rank leaves while another still reads its memory
}

/// `cohort run` needs a timeout of the job, although each operation has its own timeout.
constexpr std::chrono::hours kLongEnough(24 * 365);

}  // namespace

void run_on_processes(int ranks, const Emit& emit) {
  JobRequest request;
  request.options = {"--standalone"};
  request.program = {value_or_throw(launch::own_command()), "bench", kAsRank};
  const std::vector<std::string> own = sys::own_arguments();  // cohort bench ARGUMENTS, or cohort-bench ARGUMENTS
  const auto words = own.begin() + (own.size() > 1 && own[1] == "bench" ? 2 : 1);
  request.program.insert(request.program.end(), words, own.end());
  request.processes = ranks;
  request.timeout = kLongEnough;
  request.on_output = [&emit](const std::string& line) {
    const auto event = parse_json_or_discard(line);
    if (event.is_object() && event.contains("event")) emit(event);
  };
  run_job(request);
}

void run_on_threads(int ranks, const Plan& plan, const Emit& emit) {
  cohort::run_on_threads(ranks, [&](Communicator comm) { run_plan(comm, plan, emit); }, {.timeout = plan.timeout});
}

bool inside_a_job() {
  const auto detected = value_or_throw(rendezvous::detect_rank(rendezvous::current_environment()));
  return detected.alone || !detected.launcher.empty();
}

void run_in_job(const Plan& plan, const Emit& emit) {
  Communicator comm = init({.timeout = plan.timeout});
  run_plan(comm, plan, emit);
}

void be_rank(const Plan& plan) {
  run_in_job(plan, [](const nlohmann::json& event) {
    std::printf("%s\n", json_text(event).c_str());
    if (std::fflush(stdout) != 0) raise(ErrorCode::Io, "bench: a rank cannot report: {}", errno_text(errno));
  });
}

}  // namespace cohort::app::bench
