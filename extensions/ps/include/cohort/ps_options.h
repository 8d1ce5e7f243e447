// Options of a parameter server's table: the length of its rows, their initial values, the optimizer that updates them,
// when a pull may see a push. Plain values; any thread. Servers refuse a table that two clients describe differently.
#pragma once

#include <chrono>
#include <cstdint>
#include <variant>

namespace cohort::ps {

/// Rules of the optimizer's step, with torch's names, defaults and formulas where torch has them. A push adds
/// gradients; rows that no push names stay as they are (no momentum, no decay of weights for them).
namespace optim {

/// torch.optim.SGD. `momentum` 0 needs no memory per row.
struct Sgd {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
};
/// torch.optim.Adagrad; its `lr_decay` counts the row's own steps.
struct Adagrad {
  double lr = 1e-2;
  double lr_decay = 0;
  double weight_decay = 0;
  double initial_accumulator_value = 0;
  double eps = 1e-10;
};
/// Adagrad with one accumulator per row: the sum over steps of the mean of the gradient's squares.
struct RowAdagrad {
  double lr = 1e-2;
  double initial_accumulator_value = 0;
  double eps = 1e-10;
};
/// torch.optim.SparseAdam, and torch.optim.Adam with `weight_decay`; but bias correction counts the row's own steps, so
/// a row that first occurs late begins like every other row.
struct Adam {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
};
/// torch.optim.AdamW, which here counts the row's own steps.
struct AdamW {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
};
/// FTRL-Proximal (McMahan et al. 2013, algorithm 1): `alpha` is `lr`, and cannot change: a push with another rate is
/// refused.
struct Ftrl {
  double lr = 0.1;
  double beta = 1;
  double l1 = 0;
  double l2 = 0;
};

}  // namespace optim

using Optimizer = std::variant<optim::Sgd, optim::Adagrad, optim::RowAdagrad, optim::Adam, optim::AdamW, optim::Ftrl>;

/// Initial values of a row, before its first push: a function of only the table's seed, the key and the position.
struct Initializer {
  enum class Kind : std::uint8_t { Constant, Uniform, Normal };
  Kind kind = Kind::Constant;
  double a = 0;  ///< the constant, the lower bound, the mean
  double b = 0;  ///< the upper bound (reached only by rounding), the standard deviation

  static Initializer constant(double value) { return {Kind::Constant, value, 0}; }
  static Initializer uniform(double low, double high) { return {Kind::Uniform, low, high}; }
  static Initializer normal(double mean, double deviation) { return {Kind::Normal, mean, deviation}; }
};

/// Defines when a push takes effect and what a pull waits for.
enum class Mode : std::uint8_t {
  Sync,  ///< a pull sees exactly the pushes of all workers' earlier clocks; a key's gradients of a clock are added by
         ///< ascending worker and stepped once, so the bits are those of one process, for any number of servers
  Bounded,  ///< each worker's pushes take effect when its clock ends; a pull waits until no worker is more than
            ///< `staleness` clocks behind
  Async,    ///< each push takes effect when it arrives; a pull waits for nobody
};
struct Consistency {
  Mode mode = Mode::Sync;
  std::int64_t staleness = 0;  ///< Bounded

  static Consistency sync() { return {Mode::Sync, 0}; }
  static Consistency bounded(std::int64_t staleness) { return {Mode::Bounded, staleness}; }
  static Consistency async() { return {Mode::Async, 0}; }
};

/// Selects the rows to evict. An evicted row that is pushed again comes back with its initial values.
struct Eviction {
  enum class Victim : std::uint8_t {
    LeastRecent,    ///< evicts, of the next 64 rows, the row whose last push was longest ago
    LeastFrequent,  ///< evicts, of the next 64 rows, the row with the fewest steps
  };
  std::chrono::seconds age{0};  ///< after this time without a push a row counts as absent; 0: never
  std::int64_t rows = 0;        ///< at most this many on each server; 0: no bound
  Victim victim = Victim::LeastRecent;
};

struct TableOptions {
  std::int64_t dim = 0;  ///< floats of a row: 1 to 65536
  Initializer initializer = {};
  Optimizer optimizer = optim::Sgd{};
  /// A key gets its row with its step of this number; gradients before that are counted and dropped. 1: with its first
  /// step.
  std::int64_t admission = 1;
  Eviction eviction = {};
  std::uint64_t seed = 0;
  Consistency consistency = {};
};

}  // namespace cohort::ps
