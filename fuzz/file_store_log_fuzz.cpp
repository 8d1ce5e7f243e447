// The log of a file store: another program's file, or one cut anywhere.
#include "net/file_log.h"

#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::store;
  std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto header = decode_header(bytes);
  if (header && *header) {
    if (encode((*header)->value) != bytes.substr(0, (*header)->bytes)) std::abort();
    bytes.remove_prefix((*header)->bytes);
  }
  while (true) {
    const auto record = decode_record(bytes);
    if (!record || !*record) return 0;
    if ((*record)->bytes == 0 || encode((*record)->value) != bytes.substr(0, (*record)->bytes)) std::abort();
    bytes.remove_prefix((*record)->bytes);
  }
}
