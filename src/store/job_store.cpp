#include "store/job_store.h"

#include "base/env.h"
#include "base/result.h"
#include "net/address.h"
#include "net/secret.h"
#include "store/client.h"

namespace cohort::store {

std::shared_ptr<Store> connect_job_store(Store::Deadline deadline) {
  const auto place = env::get(env::kStore);
  const auto descriptor = env::number(env::kSecretFd);
  if (!place || !descriptor) {
    raise(ErrorCode::Unavailable,
          "this process has no job whose store it could use -- {} and {} are set by `cohort run`", env::kStore,
          env::kSecretFd);
  }
  const net::Address address = value_or_throw(net::parse_address(*place));
  const net::Secret secret = value_or_throw(net::Secret::from_sealed_memfd(*descriptor));
  return connect_tcp_store(address.host, address.port, secret, deadline);
}

}  // namespace cohort::store
