// External input of an MLflow sink: an address that somebody types, names of metrics, and the file with its progress.
#include "export/mlflow.h"
#include "shared/destination.h"

#include <cohort/error.h>

#include <cstdint>
#include <cstdlib>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    (void)cohort::track::mlflow_place(text, [](std::string_view) { return std::nullopt; });
    // A place from a variable may contain a password.
    (void)cohort::track::mlflow_place("", [text](std::string_view) { return std::string(text); });
  } catch (const cohort::Error&) {
  }
  try {  // likewise typed, for wandb
    (void)cohort::track::wandb_place(text);
  } catch (const cohort::Error&) {
  }
  const std::string key = cohort::track::mlflow_key(text);
  if (key.empty() || key.size() > 250 || key.front() == '/' || key.back() == '/') std::abort();
  if (cohort::track::mlflow_key(key) != key) std::abort();
  const auto progress = cohort::track::MlflowProgress::read(text);
  const auto again = cohort::track::MlflowProgress::read(progress.text());
  if (again.offset != progress.offset || again.ended != progress.ended) std::abort();
  return 0;
}
