// The digest stops nearly everything, so half of the inputs get a right one first.
#include "train/formats/checkpoint_folder.h"
#include "train/formats/tensor.h"

#include <nlohmann/json.hpp>

#include <cstdlib>
#include <string_view>

using namespace cohort;
using namespace cohort::formats;

namespace {

void check(const std::string& text) {
  const auto manifest = parse_manifest(text, "fuzz");
  if (!manifest) return;
  const auto again = to_json(*manifest);
  if (!again || !parse_manifest(*again, "fuzz")) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  check(text);
  const auto body = nlohmann::json::parse(text, nullptr, false);
  if (body.is_discarded()) return 0;
  const nlohmann::json whole = {{"manifest", body}, {"sha256", sha256(as_bytes(body.dump()))}};
  check(whole.dump(2) + '\n');
  return 0;
}
