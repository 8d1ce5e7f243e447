// Sums of other hosts, as they come over the wire: any bytes are values; and any values, with any residual, come back
// as near as the format says.
#include "comm/kernels/codecs.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort;
  if (size < 3) return 0;
  const auto format = static_cast<WireFormat>(1 + data[0] % (kWireFormatCount - 1));
  const std::size_t count = data[1] + std::size_t{data[2]} * 4;
  data += 3;
  size -= 3;

  std::vector<std::byte> bytes(comm::encoded_bytes(format, count));
  if (size > 0 && !bytes.empty()) std::memcpy(bytes.data(), data, std::min(size, bytes.size()));
  std::vector<float> values(count);
  comm::decode(format, bytes.data(), values.data(), count);

  std::vector<float> brought(size / sizeof(float));
  if (!brought.empty()) std::memcpy(brought.data(), data, brought.size() * sizeof(float));
  std::vector<float> came = brought, residual(brought.size());
  comm::round_trip(format, came.data(), came.size(), residual.data());
  for (std::size_t i = 0; i < came.size(); ++i) {
    const bool finite = std::isfinite(brought[i]);
    if (std::isnan(brought[i]) != std::isnan(came[i]) || !std::isfinite(residual[i])) std::abort();
    if (!finite && !std::isnan(brought[i]) && came[i] != brought[i]) std::abort();
    if (format == WireFormat::BFloat16 || !finite) continue;
    const std::size_t block = comm::block_of(format), begin = i / block * block;
    float largest = 0;
    for (std::size_t j = begin; j < std::min(begin + block, came.size()); ++j)
      if (std::isfinite(brought[j])) largest = std::max(largest, std::abs(brought[j]));
    const double step = format == WireFormat::Int4 ? 6 : 126;
    if (std::abs(static_cast<double>(brought[i]) - came[i]) > std::max(largest / step * 0.51, std::ldexp(1.0, -100)))
      std::abort();
  }
  return 0;
}
