#include "base/result.h"
#include "ps/client_impl.h"
#include "ps/requests.h"

#include <cohort/ps.h>

#include <utility>

namespace cohort::ps {

Table::Table(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
const TableOptions& Table::options() const noexcept { return impl_->options; }

Work Table::pull(std::span<const std::uint64_t> keys, std::span<float> rows) {
  Requests requests(*impl_);
  requests.pull(keys, rows);
  return requests.take();
}

Work Table::push(std::span<const std::uint64_t> keys, std::span<const float> gradients, const PushOptions& options) {
  Requests requests(*impl_);
  requests.push(keys, gradients, options.lr);
  return requests.take();
}

Work Table::push_pull(std::span<const std::uint64_t> keys, std::span<const float> gradients, std::span<float> rows,
                      const PushOptions& options) {
  Requests requests(*impl_);
  requests.push(keys, gradients, options.lr);
  requests.pull(keys, rows);
  return requests.take();
}

Work Table::assign(std::span<const std::uint64_t> keys, std::span<const float> rows) {
  Requests requests(*impl_);
  requests.assign(keys, rows);
  return requests.take();
}

Work Table::erase(std::span<const std::uint64_t> keys) {
  Requests requests(*impl_);
  requests.erase(keys);
  return requests.take();
}

TableStats Table::stats() {
  impl_->client->demand_here("stats");
  std::vector<Link::RequestPtr> asked;
  for (std::size_t i = 0; i < impl_->numbers.size(); ++i)
    asked.push_back(impl_->client->links[i].send(Method::Stats, pack(Stats{impl_->numbers[i]})));
  TableStats stats;
  for (std::size_t i = 0; i < asked.size(); ++i) {
    const Heard heard = impl_->client->links[i].finish(asked[i]);
    const TableCounts counts = value_or_throw(codec::decode<TableCounts>(heard.payload()));
    stats.rows += counts.rows;
    stats.bytes += counts.bytes;
    stats.created += counts.created;
    stats.evicted += counts.evicted;
    stats.dropped += counts.dropped;
    stats.steps += counts.steps;
    stats.rows_of_servers.push_back(counts.rows);
  }
  return stats;
}

// ---- Variable ----

namespace {

void demand_elements(const char* what, const std::string& name, std::size_t given, std::int64_t elements) {
  if (given == static_cast<std::size_t>(elements)) return;
  raise(ErrorCode::InvalidArgument, "{} of variable \"{}\": it has {} elements, and these are {}", what, name, elements,
        given);
}

}  // namespace

Variable::Variable(Table table, std::int64_t elements) : table_(std::move(table)), elements_(elements) {}
std::int64_t Variable::elements() const noexcept { return elements_; }

Work Variable::pull(std::span<float> values) {
  demand_elements("pull", table_.impl_->name, values.size(), elements_);
  Requests requests(*table_.impl_);
  requests.pull_pieces(values);
  return requests.take();
}

Work Variable::push(std::span<const float> gradients, const PushOptions& options) {
  demand_elements("push", table_.impl_->name, gradients.size(), elements_);
  Requests requests(*table_.impl_);
  requests.push_pieces(gradients, options.lr);
  return requests.take();
}

Work Variable::push_pull(std::span<const float> gradients, std::span<float> values, const PushOptions& options) {
  demand_elements("push_pull", table_.impl_->name, gradients.size(), elements_);
  demand_elements("push_pull", table_.impl_->name, values.size(), elements_);
  Requests requests(*table_.impl_);
  requests.push_pieces(gradients, options.lr);
  requests.pull_pieces(values);
  return requests.take();
}

Work Variable::assign(std::span<const float> values) {
  demand_elements("assign", table_.impl_->name, values.size(), elements_);
  Requests requests(*table_.impl_);
  requests.assign_pieces(values);
  return requests.take();
}

}  // namespace cohort::ps
