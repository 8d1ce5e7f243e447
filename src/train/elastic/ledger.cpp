#include "train/elastic/ledger.h"

#include "base/env.h"
#include "base/json.h"
#include "base/log.h"
#include "base/result.h"
#include "telemetry/record.h"

#include <fcntl.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace cohort::elastic {
namespace {

constexpr std::int64_t kStepsOfALine = 64;

}  // namespace

// A failed write, as to a full disk, ends the ledger, not the training.
void Ledger::append(const std::string& line) {
  if (!fd_) return;
  try {
    track::append_all({fd_.get(), file_, "writing to the ledger of samples"}, line + "\n");
  } catch (const Error& error) {
    log::warn("elastic", "{} -- it ends here", error.what());
    fd_.reset();
  }
}

void Ledger::write(const std::string& name, const Range& range) {
  const nlohmann::ordered_json line = {{"world", range.world},
                                       {"sampler", name},
                                       {"epoch", range.epoch},
                                       {"samples", {range.from, range.to}},
                                       {"steps", {range.first_step, range.last_step}}};
  append(json_text(line));
}

void Ledger::close(const std::string& name, Sampler& sampler) {
  if (!sampler.open) return;
  write(name, *sampler.open);
  sampler.open->closed_at = steps_;
  sampler.closed.push_back(*std::exchange(sampler.open, std::nullopt));
}

void Ledger::move(const std::string& name, Sampler& sampler, const SamplePosition& to, std::int64_t step) {
  // A new epoch begins between two steps, at its first sample.
  if (to.epoch != sampler.position.epoch || to.cursor < sampler.position.cursor) {
    close(name, sampler);
    sampler.position = {to.epoch, 0};
  }
  if (!sampler.open) sampler.open = Range{world_, to.epoch, sampler.position.cursor, to.cursor, step, step};
  sampler.open->to = to.cursor;
  sampler.open->last_step = step;
  sampler.position = to;
}

void Ledger::step(std::int64_t step, const Positions& positions) {
  steps_ = step;
  for (const auto& [name, position] : positions) {
    Sampler& sampler = samplers_[name];
    std::erase_if(sampler.closed, [step](const Range& range) { return range.closed_at < step - 1; });
    move(name, sampler, position, step);
    if (step % kStepsOfALine == 0) close(name, sampler);
  }
}

void Ledger::finish() {
  for (auto& [name, sampler] : samplers_) close(name, sampler);
}

void Ledger::open(const std::filesystem::path& file) {
  finish();
  if (file == file_) return;
  fd_.reset();
  file_ = file;
  if (file_.empty()) return;
  fd_.reset(::open(file_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!fd_) track::raise_io({-1, file_, "opening the ledger of samples"}, errno);
  for (const auto& [name, sampler] : samplers_) {
    for (const Range& range : sampler.closed) write(name, range);
  }
}

void Ledger::enter(std::uint64_t world, int size, std::int64_t step, const Positions& positions) {
  nlohmann::ordered_json samplers = nlohmann::ordered_json::object();
  for (const auto& [name, position] : positions) {
    Sampler& sampler = samplers_[name];
    // The state may come from another rank, which has ended one step more.
    const bool is_ahead = position.epoch == sampler.position.epoch && position.cursor > sampler.position.cursor;
    if (is_ahead && entered_ && step == steps_ + 1) move(name, sampler, position, step);
    close(name, sampler);
    sampler.position = position;
    samplers[name] = {position.epoch, position.cursor};
  }
  world_ = world;
  steps_ = step;
  entered_ = true;
  nlohmann::ordered_json line = {{"world", world}, {"size", size}, {"step", step}, {"samplers", samplers}};
  if (const int restart = env::number(env::kRestart).value_or(0); restart > 0) line["restart"] = restart;
  append(json_text(line));
}

}  // namespace cohort::elastic
