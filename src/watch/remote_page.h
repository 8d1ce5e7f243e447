// A run as the page of another machine shows it: what `cohort watch HOST:PORT` asks. One thread.
#pragma once

#include "net/address.h"
#include "net/secret.h"
#include "watch/source.h"

#include <chrono>
#include <string>

namespace cohort::watch {

class RemotePage final : public Source {
 public:
  /// Asks once: throws Unavailable where nobody answers, or the token is refused.
  RemotePage(net::Address address, const net::Secret& token);

  bool poll() override;
  const View& view() const override { return view_; }
  LogTail log(int rank, launch::Stream stream, std::size_t lines) override;
  double now() const override { return launch::seconds_now() + ahead_; }
  std::string trouble() const override { return trouble_; }

 private:
  Result<std::string> get(const std::string& target) const;

  net::Address address_;
  net::Secret token_;
  View view_;
  double ahead_ = 0;  ///< of our clock
  std::string trouble_;
  std::chrono::steady_clock::time_point next_{};
};

}  // namespace cohort::watch
