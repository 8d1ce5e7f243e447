// Destinations that somebody types: addresses of MLflow and of wandb. One from a variable may contain a password.
#include "shared/destination.h"

#include <cohort/error.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace {

void is_read_or_refused(const auto& read) {
  try {
    (void)read();
  } catch (const cohort::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const cohort::env::Map variables{{"MLFLOW_TRACKING_URI", std::string(text)}}, none;
  is_read_or_refused([&] { return cohort::track::mlflow_place(text, none); });
  is_read_or_refused([&] { return cohort::track::mlflow_place("", variables); });
  is_read_or_refused([&] { return cohort::track::wandb_place(text); });
  return 0;
}
