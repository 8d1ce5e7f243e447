// For tests: gradients without a framework, and the backwards that make them.
#pragma once

#include "base/result.h"
#include "train/gradients/reducer.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace cohort::gradients {

inline Parameter vector_of(const std::string& name, std::int64_t count) {
  return {.name = name, .dtype = DType::Float32, .sizes = {count}, .strides = {1}};
}

/// Gradients that exist or not. A test makes a backward by calls of these functions.
class Fake final : public Autograd {
 public:
  Fake(Communicator comm, std::vector<Parameter> parameters, const nn::DistributedDataParallelOptions& options = {},
       Reduce reduce = reduce_by_average)
      : defined(parameters.size()),
        values(parameters.size(), std::vector<float>(100, 1)),
        core(step::ranks_of(std::move(comm)), std::move(parameters), options, *this, std::move(reduce)) {
    core.lay_out();
  }

  void take_places() override { ++places_taken; }
  bool put_in_place(std::size_t parameter) override { return defined.at(parameter); }
  void give(std::size_t parameter) override { defined.at(parameter) = true; }
  void drop(std::size_t parameter) override { defined.at(parameter) = false; }
  void drop_all() override { defined.assign(defined.size(), false); }
  void clear(std::size_t parameter) override {
    if (on_clear) on_clear();
    const Buffer place = core.place_of(parameter);
    std::memset(place.data, 0, place.bytes());
  }
  void keep(std::size_t parameter) override {
    kept_[parameter].assign(gradient(parameter).begin(), gradient(parameter).end());
  }
  void put_back(std::size_t parameter) override { std::ranges::copy(kept_.at(parameter), gradient(parameter).begin()); }
  void drop_kept() override { kept_.clear(); }
  // All memory is the host's here.
  Memory allocate(const Device& /*gpu*/, std::size_t /*bytes*/) override { return {}; }
  void* stream_of(const Device& /*gpu*/) override { return nullptr; }
  bool are_finite(std::span<const int> /*parameters*/) override { return true; }
  std::vector<std::byte> copy_to_host(std::size_t /*parameter*/) override { return {}; }
  std::vector<std::span<const std::byte>> values_of(std::span<const int> parameters) override {
    std::vector<std::span<const std::byte>> all;
    for (const int index : parameters) all.push_back(std::as_bytes(std::span(values[static_cast<std::size_t>(index)])));
    return all;
  }
  void compare(std::span<const int> /*parameters*/, std::int64_t step) override {
    raise(ErrorCode::Mismatch, "after {} steps", step);
  }
  void call_at_end(std::shared_ptr<void> pass) override { pass_ = std::move(pass); }

  std::span<float> gradient(std::size_t parameter) {
    const Buffer place = core.place_of(parameter);
    return {static_cast<float*>(place.data), static_cast<std::size_t>(place.count)};
  }
  void begin(std::optional<std::int64_t> samples) {
    if (core.virtual_part() == nullptr || !core.in_step()) core.prepare_synchronising_pass();
    core.require_whole();
    core.add_forward(samples, std::nullopt);
    core.begin_backward();
  }
  void bring(std::size_t parameter, float value) {
    if (!core.receive(parameter)) return;
    for (float& element : gradient(parameter)) element = value;
    defined.at(parameter) = true;
    core.arrive(parameter);
  }
  void end() {
    pass_.reset();
    core.finish();
  }

  /// Gives up the backward under way, as an exception in a layer does.
  void fail() { pass_.reset(); }

  std::function<void()> on_clear;
  std::vector<bool> defined;
  std::vector<std::vector<float>> values;  // of the parameters
  int places_taken = 0;
  Reducer core;

 private:
  std::shared_ptr<void> pass_;
  std::map<std::size_t, std::vector<float>> kept_;
};

inline const nn::DistributedDataParallelOptions kSmall = {.bucket_bytes = 1,
                                                          .first_bucket_bytes = 1};  // one gradient each

}  // namespace cohort::gradients
