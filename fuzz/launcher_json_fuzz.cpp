// JSON of launchers: TF_CONFIG, SageMaker's resourceconfig.json. JSON that parses gives a task a rank within its world.
#include "rendezvous/json_variables.h"

#include <cstdint>
#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::rendezvous;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto config = parse_tf_config(text)) {
    const auto place = tf_place(*config);
    if (place && place->role == TfPlace::Role::Rank) {
      if (place->rank < 0 || place->rank >= place->size || place->size < 2) std::abort();
      if (place->ranks.size() != static_cast<std::size_t>(place->size)) std::abort();
    }
  }
  if (const auto all = parse_resource_config(text)) {
    if (all->hosts.empty() || all->current.empty()) std::abort();
    if (training_hosts(*all, "").value() != all->hosts) std::abort();
    (void)training_hosts(*all, text);
  }
  (void)parse_sagemaker_hosts(text, "algo-1");
  return 0;
}
