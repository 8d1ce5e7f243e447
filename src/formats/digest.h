// SHA-256 by OpenSSL, in pieces. Not thread-safe.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace cohort::formats {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  void update(std::span<const std::byte> bytes);
  /// 64 hexadecimal digits. Nothing may be added afterwards.
  std::string finish();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

std::string sha256(std::span<const std::byte> bytes);

}  // namespace cohort::formats
