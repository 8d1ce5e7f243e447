#include <cohort/early_stopping.h>

#include "base/parse.h"
#include "base/result.h"
#include "telemetry/status_page.h"
#include "train/checkpoint/exchange.h"

#include <charconv>
#include <cmath>
#include <span>
#include <string_view>

namespace cohort {

EarlyStopping::EarlyStopping(EarlyStoppingOptions options) : options_(options) {
  if (options.patience < 1)
    raise(ErrorCode::InvalidArgument, "EarlyStopping: patience is {} -- at least 1", options.patience);
  if (!(options.min_delta >= 0) || std::isinf(options.min_delta))
    raise(ErrorCode::InvalidArgument, "EarlyStopping: min_delta is {} -- a number of at least 0", options.min_delta);
}

bool EarlyStopping::should_stop(Communicator& comm, double value) {
  Now next = now_;
  const double gain = options_.mode == BestMode::Min ? next.best - value : value - next.best;
  next.improved = std::isfinite(value) && (std::isnan(next.best) || gain > options_.min_delta) ? 1 : 0;
  if (next.improved != 0) next.best = value;
  next.waited = next.improved != 0 ? 0 : next.waited + 1;
  next.stop = next.waited >= options_.patience ? 1 : 0;
  status::called("EarlyStopping::should_stop",
                 [&] { checkpoint::share_bytes(comm, std::as_writable_bytes(std::span(&next, 1))); });
  now_ = next;
  return now_.stop != 0;
}

std::string EarlyStopping::state() const {
  return fmt::format("mode={} best={} waited={}", options_.mode == BestMode::Min ? "min" : "max", now_.best,
                     now_.waited);
}

void EarlyStopping::load_state(const std::string& text) {
  // The text is valid only if writing the state gives the same text.
  EarlyStopping read(options_);
  std::string_view rest = text;
  take_until(rest, "=");
  const std::string_view mode = take_until(rest, " ");
  read.options_.mode = mode == "max" ? BestMode::Max : BestMode::Min;
  take_until(rest, "=");
  const std::string_view best = take_until(rest, " ");
  std::from_chars(best.data(), best.data() + best.size(), read.now_.best);
  take_until(rest, "=");
  read.now_.waited = parse_integer<int>(rest).value_or(-1);
  if (read.now_.waited < 0 || read.state() != text)
    raise(ErrorCode::InvalidArgument, "EarlyStopping: '{}' is not a state -- give what state() has made", text);
  if (read.options_.mode != options_.mode)
    raise(
        ErrorCode::InvalidArgument,
        "EarlyStopping: '{}' is the state of another mode -- give the mode with which it was saved, or do not load it",
        text);
  now_ = read.now_;
}

}  // namespace cohort
