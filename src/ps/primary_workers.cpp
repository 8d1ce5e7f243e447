// Of a Primary: workers that are lost.
#include "base/log.h"
#include "ps/answers.h"
#include "ps/primary.h"

#include <utility>

namespace cohort::ps {

using std::chrono::milliseconds;

void Primary::on_gone(const ClientPtr& client) {
  parked_.remove_if([&](const Parked& one) { return one.client == client; });
  waiting_.remove_if([&](const Waiting& one) { return one.client == client; });
  std::erase_if(late_, [&](const Late& one) {
    if (one.client == client) late_bytes_ -= one.body.size();
    return one.client == client;
  });
  if (client == backup_) lose_backup();
  const auto found = sessions_.find(client);
  if (found == sessions_.end()) return;
  const Session session = found->second;
  sessions_.erase(found);
  be_patient(session.worker, session.incarnation, options_.patience);
}

void Primary::be_patient(std::uint32_t number, std::uint64_t incarnation, milliseconds time) {
  patience_timers_[number] = rpc_.after(time, [this, number, incarnation] {
    // Who has come again meanwhile is among those that wait.
    if (must_wait()) return be_patient(number, incarnation, kStillWorking);
    const Worker& worker = state_.workers().at(number);
    if (worker.incarnation != incarnation) return;
    if (worker.phase == Worker::Phase::Live || worker.phase == Worker::Phase::Joined) decide(number, incarnation);
  });
}

void Primary::decide(std::uint32_t number, std::uint64_t incarnation) {
  for (const auto& settlement : settlements_) {
    if (settlement->question().worker == number && settlement->question().incarnation == incarnation) return;
  }
  const Settle question{number, incarnation, 0};
  if (!note({.method = Method::Settle, .worker = number}, pack(question))) return;
  const Hello& known = *state_.introduced();
  std::vector<std::uint32_t> others;
  for (std::uint32_t i = 0; i < known.servers.size(); ++i) {
    if (i != known.server) others.push_back(i);
  }
  if (others.empty()) {
    lost(question, state_.ended(question));
    return;
  }
  settlements_.push_back(std::make_unique<Settlement>(
      question, state_.ended(question), std::move(others),
      [place_of = options_.place_of, known](std::uint32_t server) { return place_of(known, server); }));
  look_at_settlements();
}

void Primary::look_at_settlements() {
  for (auto at = settlements_.begin(); at != settlements_.end() && !working_;) {
    const auto here = at++;
    const auto ended = (*here)->result();
    if (!ended) continue;
    const Settle question = (*here)->question();
    settlements_.erase(here);
    lost(question, *ended);
  }
  looking_ = settlements_.empty() ? nullptr : rpc_.after(milliseconds(10), [this] { look_at_settlements(); });
}

void Primary::lost(const Settle& question, std::int64_t ended) {
  log::warn("ps", "worker {} on {} is lost at clock {}; {}", question.worker, state_.workers().at(question.worker).host,
            ended,
            state_.has_staged(question.worker, ended) ? "its pushes after that are dropped" : "the others go on");
  (void)note({.method = Method::Lost, .worker = question.worker, .incarnation = question.incarnation},
             pack(Settled{ended}));
  afterwards([this, worker = question.worker] { let_in(worker); });
}

/// What an earlier process of the worker has done is settled.
void Primary::let_in(std::uint32_t worker) {
  for (const ClientPtr& client : clients_of(worker)) rpc_.close(client);
  std::list<Waiting> come;
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    const auto here = at++;
    if (here->hello.worker == worker) come.splice(come.end(), waiting_, here);
  }
  for (const Waiting& one : come) {
    if (const auto may = agrees(one.hello); !may) {
      answer(one.client, one.id, answer_of(may.error()));
    } else {
      join(one.client, one.id, one.hello);
    }
  }
}

std::vector<Primary::ClientPtr> Primary::clients_of(std::uint32_t worker) const {
  std::vector<ClientPtr> clients;
  for (const auto& [client, session] : sessions_) {
    if (session.worker == worker) clients.push_back(client);
  }
  return clients;
}

}  // namespace cohort::ps
