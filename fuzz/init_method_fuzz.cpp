// Addresses and init methods, as users write them. Text that parses has to be writable and parse to the same again.
#include "net/address.h"
#include "rendezvous/init_plan.h"

#include <cstdint>
#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto address = net::parse_address(text)) {
    const auto again = net::parse_address(net::to_string(*address));
    if (!again || !(*again == *address)) std::abort();
  }
  if (const auto method = rendezvous::parse_init_method(text)) {
    if (method->rank && *method->rank < 0) std::abort();
    if (method->world_size && *method->world_size < 1) std::abort();
    if (method->kind == rendezvous::InitMethod::Kind::File && method->path.front() != '/') std::abort();
  }
  return 0;
}
