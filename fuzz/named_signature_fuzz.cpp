// Signatures that ranks send each other for operations requested by name.
#include "horovod/named/request.h"

#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  if (const auto signature = codec::decode<named::Signature>(bytes)) {
    if (codec::encode(*signature) != bytes || signature->count() < 0) std::abort();
    (void)to_string(*signature);
  }
  return 0;
}
