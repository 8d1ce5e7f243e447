// What ranks tell each other of the operations that they ask for by name.
#include "named/request.h"

#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  codec::Reader reader(bytes);
  if (const auto signature = named::decode_signature(reader)) {
    codec::Writer again;
    named::encode(again, *signature);
    const std::string written = again.take();
    if (written != bytes.substr(0, written.size()) || signature->count() < 0) std::abort();
    (void)to_string(*signature);
  }
  return 0;
}
