// The pickle machine over storages of 64 bytes. Every tensor that it lets through is read completely: a bound that it
// missed shows under AddressSanitizer.
#include "train/formats/pt.h"

#include <array>
#include <cstdlib>

using namespace cohort;
using namespace cohort::formats;

namespace {

std::size_t visit(const PtValue& value, std::size_t budget) {
  if (budget == 0) return 0;
  --budget;
  if (const auto* tensor = std::get_if<PtTensor>(&value)) {
    const auto bytes = byte_count(tensor->type, tensor->shape);
    if (!bytes) std::abort();
    if (*bytes < 1 << 16 && tensor->gather().size() != *bytes) std::abort();
  } else if (const auto* list = std::get_if<std::shared_ptr<const PtList>>(&value)) {
    for (const PtValue& item : (*list)->items) budget = visit(item, budget);
  } else if (const auto* tuple = std::get_if<std::shared_ptr<const PtTuple>>(&value)) {
    for (const PtValue& item : (*tuple)->items) budget = visit(item, budget);
  } else if (const auto* dict = std::get_if<std::shared_ptr<const PtDict>>(&value)) {
    for (const auto& [key, item] : (*dict)->items) budget = visit(item, budget);
  }
  return budget;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const std::vector<std::byte> storage(64);
  const PtLimits limits{.values = 100'000};
  const auto value =
      unpickle(std::as_bytes(std::span(data, size)), "fuzz", limits,
               [&](const std::string&) -> Result<std::span<const std::byte>> { return std::span(storage); });
  if (!value) return 0;
  visit(*value, 10'000);
  if (size > 10'000) return 0;  // shared containers are written out again and again
  // A value that was read can be written, and read again.
  std::size_t budget = visit(*value, 10'000);
  if (budget == 0) return 0;
  const auto again = pickle(*value, PtFloats::Number);
  if (!again) return 0;
  const auto back = unpickle(as_bytes(again->bytes), "fuzz", limits,
                             [&](const std::string& key) -> Result<std::span<const std::byte>> {
                               return again->storages.at(std::stoul(key));
                             });
  if (!back) std::abort();
  return 0;
}
